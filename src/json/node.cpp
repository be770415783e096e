#include "node.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

/// A value as an error shows it.
std::string shown(const JsonValue& value) {
  struct Show {
    std::string operator()(std::nullptr_t) const { return "null"; }
    std::string operator()(bool flag) const { return flag ? "true" : "false"; }
    std::string operator()(std::int64_t number) const { return std::to_string(number); }
    std::string operator()(const JsonReal& number) const { return excerpt(number.text); }
    std::string operator()(const std::string& text) const {
      return concat('"', excerpt(text), '"');
    }
    std::string operator()(const JsonIntegers& list) const {
      return list.empty() ? "[]" : concat("a list of ", list.size());
    }
    std::string operator()(const JsonList& list) const { return concat("a list of ", list.size()); }
    std::string operator()(const JsonObject&) const { return "an object"; }
  };
  return std::visit(Show{}, value.value);
}

constexpr std::string_view expected_integer = "an integer";

}  // namespace

std::string JsonNode::place() const { return path_.empty() ? "/" : path_; }

void JsonNode::fail(std::string_view expected) const {
  throw IoError(concat(origin_, ": ", place(), " = ", shown(*value_), ", expected ", expected));
}

void JsonNode::fail_text(std::string_view text) const {
  throw IoError(concat(origin_, ": ", place(), ": ", text));
}

bool JsonNode::is_null() const { return std::holds_alternative<std::nullptr_t>(value_->value); }

bool JsonNode::is_list() const {
  return std::holds_alternative<JsonIntegers>(value_->value) ||
         std::holds_alternative<JsonList>(value_->value);
}

const JsonObject& JsonNode::object() const {
  const auto* object = std::get_if<JsonObject>(&value_->value);
  if (object == nullptr) fail("an object");
  return *object;
}

void JsonNode::check_keys(std::initializer_list<std::string_view> known) const {
  for (const auto& [key, value] : object().members) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    std::string names;
    for (const std::string_view name : known) names += concat(names.empty() ? "" : ", ", name);
    fail_text(concat("unknown key \"", excerpt(key), "\", expected some of ", names));
  }
}

JsonNode JsonNode::at(std::string_view key) const {
  const JsonValue* member = object().find(key);
  if (member == nullptr) fail_text(concat("the key \"", key, "\" is missing"));
  return {*member, origin_, path_ + path_step(key)};
}

std::optional<JsonNode> JsonNode::find(std::string_view key) const {
  const JsonValue* member = object().find(key);
  if (member == nullptr || std::holds_alternative<std::nullptr_t>(member->value)) {
    return std::nullopt;
  }
  return JsonNode{*member, origin_, path_ + path_step(key)};
}

std::vector<std::pair<std::string, JsonNode>> JsonNode::members() const {
  std::vector<std::pair<std::string, JsonNode>> result;
  for (const auto& [key, value] : object().members) {
    result.emplace_back(key, JsonNode{value, origin_, path_ + path_step(key)});
  }
  return result;
}

std::vector<JsonNode> JsonNode::items() const {
  std::vector<JsonNode> result;
  if (const auto* integers = std::get_if<JsonIntegers>(&value_->value)) {
    if (!integers->empty()) fail("a list of objects");
    return result;
  }
  const auto* list = std::get_if<JsonList>(&value_->value);
  if (list == nullptr) fail("a list");
  for (std::size_t i = 0; i < list->size(); ++i) {
    result.push_back(JsonNode{(*list)[i], origin_, concat(path_, '/', i)});
  }
  return result;
}

bool JsonNode::boolean() const {
  const auto* flag = std::get_if<bool>(&value_->value);
  if (flag == nullptr) fail("true or false");
  return *flag;
}

const std::string& JsonNode::string() const {
  const auto* text = std::get_if<std::string>(&value_->value);
  if (text == nullptr) fail("a string");
  return *text;
}

std::int64_t JsonNode::integer(std::int64_t low, std::int64_t high) const {
  const auto* number = std::get_if<std::int64_t>(&value_->value);
  if (number == nullptr) fail(expected_integer);
  if (*number < low || high < *number) fail(concat(low, "..", high));
  return *number;
}

double JsonNode::real() const {
  if (const auto* number = std::get_if<std::int64_t>(&value_->value)) {
    return static_cast<double>(*number);
  }
  const auto* number = std::get_if<JsonReal>(&value_->value);
  if (number == nullptr || !std::isfinite(number->value)) fail("a number");
  return number->value;
}

const std::vector<std::int64_t>& JsonNode::integers() const {
  if (const auto* integers = std::get_if<JsonIntegers>(&value_->value)) return *integers;
  for (const JsonNode& item : items()) (void)item.integer();  // names the first that is none
  fail("a list of integers");
}

std::vector<std::int32_t> JsonNode::integers32() const {
  const std::vector<std::int64_t>& wide = integers();
  std::vector<std::int32_t> result;
  result.reserve(wide.size());
  for (std::size_t i = 0; i < wide.size(); ++i) {
    if (!std::in_range<std::int32_t>(wide[i])) {
      throw IoError(
          concat(origin_, ": ", path_, '/', i, " = ", wide[i], ", expected an integer of 32 bits"));
    }
    result.push_back(static_cast<std::int32_t>(wide[i]));
  }
  return result;
}

void JsonNode::check_format(std::string_view format) const {
  const JsonNode name = at("format");
  if (name.string() != format) name.fail(concat('"', format, '"'));
  const JsonNode version = at("version");
  if (version.integer() != json_version) version.fail(concat("version ", json_version));
}

}  // namespace waybill::detail
