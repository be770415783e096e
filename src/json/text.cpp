#include "json/text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/printable.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

/// Receives the parser's events and builds the value. Iterative, so depth costs no stack.
class TreeBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit TreeBuilder(std::string_view text) : text_(text) {}

  bool null() override { return add(JsonValue{nullptr}); }
  bool boolean(bool flag) override { return add(JsonValue{flag}); }
  bool number_integer(number_integer_t number) override { return add(JsonValue{number}); }
  bool number_unsigned(number_unsigned_t number) override {
    if (std::in_range<std::int64_t>(number)) {
      return add(JsonValue{static_cast<std::int64_t>(number)});
    }
    return add(JsonValue{JsonReal{static_cast<double>(number), std::to_string(number)}});
  }
  bool number_float(number_float_t number, const string_t& spelled) override {
    return add(JsonValue{JsonReal{number, spelled}});
  }
  bool string(string_t& text) override { return add(JsonValue{std::move(text)}); }
  bool binary(binary_t&) override { return fail("binary data"); }

  bool start_object(std::size_t) override { return open(JsonValue{JsonObject{}}); }
  bool key(string_t& name) override {
    keys_.back() = std::move(name);
    return true;
  }
  bool end_object() override {
    std::vector<std::string_view> names;
    for (const auto& [key, value] : std::get<JsonObject>(open_.back().value)) names.push_back(key);
    std::ranges::sort(names);
    const auto twice = std::ranges::adjacent_find(names);
    if (twice == names.end()) return close();
    return fail(concat("the key \"", excerpt(*twice), "\" appears twice"));
  }
  bool start_array(std::size_t) override { return open(JsonValue{JsonIntegers{}}); }
  bool end_array() override { return close(); }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    error_ = concat(line_and_column(position), ": ", reason(error.what()));
    return false;
  }

  JsonValue root;
  [[nodiscard]] const std::string& error() const { return error_; }

 private:
  bool open(JsonValue container) {
    if (open_.size() >= max_json_depth) {
      return fail(concat("nested deeper than ", max_json_depth, " levels"));
    }
    open_.push_back(std::move(container));
    keys_.emplace_back();
    return true;
  }

  bool close() {
    JsonValue done = std::move(open_.back());
    open_.pop_back();
    keys_.pop_back();
    return add(std::move(done));
  }

  /// Hands a finished value to the container around it.
  bool add(JsonValue value) {
    if (open_.empty()) {
      root = std::move(value);
      return true;
    }
    JsonValue& parent = open_.back();
    if (auto* object = std::get_if<JsonObject>(&parent.value)) {
      object->emplace_back(std::move(keys_.back()), std::move(value));
      return true;
    }
    if (auto* integers = std::get_if<JsonIntegers>(&parent.value)) {
      if (const auto* number = std::get_if<std::int64_t>(&value.value)) {
        integers->push_back(*number);
        return true;
      }
      JsonList list;
      list.reserve(integers->size() + 1);
      for (const std::int64_t number : *integers) list.push_back(JsonValue{number});
      parent.value = std::move(list);
    }
    std::get<JsonList>(parent.value).push_back(std::move(value));
    return true;
  }

  bool fail(const std::string& what) {
    std::string path;
    for (std::size_t level = 0; level < open_.size(); ++level) path += step(level);
    error_ = concat(path.empty() ? "/" : path.substr(0, 200), ": ", what);
    return false;
  }

  /// From the container at `level` to what is being read inside it.
  [[nodiscard]] std::string step(std::size_t level) const {
    if (level + 1 == open_.size()) return "";  // the container itself is at fault
    const JsonValue& container = open_[level];
    if (std::holds_alternative<JsonObject>(container.value)) return path_step(keys_[level]);
    const auto* list = std::get_if<JsonList>(&container.value);
    const auto* integers = std::get_if<JsonIntegers>(&container.value);
    return concat('/', list != nullptr ? list->size() : integers->size());
  }

  [[nodiscard]] std::string line_and_column(std::size_t position) const {
    // `position` counts the characters read, the offending one included.
    const std::string_view read = text_.substr(0, position == 0 ? 0 : position - 1);
    const auto line = std::count(read.begin(), read.end(), '\n') + 1;
    const std::size_t newline = read.rfind('\n');
    const std::size_t column =
        newline == std::string_view::npos ? read.size() + 1 : read.size() - newline;
    return concat("line ", line, ", column ", column);
  }

  /// The parser's words, without its own prefix and without a token of megabytes.
  static std::string reason(std::string_view what) {
    for (const std::string_view prefix : {"] ", "column "}) {
      const std::size_t at = what.find(prefix);
      if (at != std::string_view::npos && at < 100) what.remove_prefix(at + prefix.size());
    }
    const std::size_t colon = what.find(": ");
    const bool place = colon != std::string_view::npos && colon > 0 &&
                       what.find_first_not_of("0123456789") == colon;
    if (place) what.remove_prefix(colon + 2);
    return what.size() <= 300 ? std::string(what) : concat(what.substr(0, 300), "...");
  }

  std::string_view text_;
  std::vector<JsonValue> open_;    // containers not closed yet, outermost first
  std::vector<std::string> keys_;  // the key that is being read in each of them
  std::string error_;
};

}  // namespace

JsonValue parse_json(std::string_view text, std::string_view origin) {
  TreeBuilder builder(text);
  const bool ok = nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  if (!ok) throw IoError(concat(origin, ": ", builder.error()));
  return std::move(builder.root);
}

std::string excerpt(std::string_view text) {
  constexpr std::size_t limit = 60;
  std::size_t end = 0;
  while (end < text.size()) {
    const std::size_t next =
        end + std::max<std::size_t>(1, first_code_point(text.substr(end)).num_bytes);
    if (next > limit) return printable_line(text.substr(0, end)) + "...";
    end = next;
  }
  return printable_line(text);
}

std::string path_step(std::string_view key) {
  std::string step = "/";
  for (const char c : excerpt(key)) step += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  return step;
}

namespace {

/// A value as an error shows it.
std::string shown(const JsonValue& json) {
  const auto show = []<class Value>(const Value& value) -> std::string {
    if constexpr (std::is_same_v<Value, std::nullptr_t>) {
      return "null";
    } else if constexpr (std::is_same_v<Value, bool>) {
      return value ? "true" : "false";
    } else if constexpr (std::is_same_v<Value, std::int64_t>) {
      return std::to_string(value);
    } else if constexpr (std::is_same_v<Value, JsonReal>) {
      return excerpt(value.text);
    } else if constexpr (std::is_same_v<Value, std::string>) {
      return concat('"', excerpt(value), '"');
    } else if constexpr (std::is_same_v<Value, JsonObject>) {
      return "an object";
    } else {
      return value.empty() ? "[]" : concat("a list of ", value.size());
    }
  };
  return std::visit(show, json.value);
}

/// The value of this type. @throws IoError `... expected EXPECTED`
template <class Value>
const Value& get(const JsonNode& node, std::string_view expected) {
  const auto* const value = std::get_if<Value>(&node.value().value);
  if (value == nullptr) node.fail(expected);
  return *value;
}

/// Null: there is no such member.
const JsonValue* member_of(const JsonObject& object, std::string_view key) {
  const auto found = std::ranges::find(object, key, &JsonObject::value_type::first);
  return found == object.end() ? nullptr : &found->second;
}

}  // namespace

void JsonNode::fail(std::string_view expected) const {
  throw IoError(concat(origin_, ": ", path_.empty() ? "/" : path_, " = ", shown(*value_),
                       ", expected ", expected));
}

void JsonNode::fail_text(std::string_view text) const {
  throw IoError(concat(origin_, ": ", path_.empty() ? "/" : path_, ": ", text));
}

bool JsonNode::is_list() const {
  return std::holds_alternative<JsonIntegers>(value_->value) ||
         std::holds_alternative<JsonList>(value_->value);
}

const JsonObject& JsonNode::object() const { return get<JsonObject>(*this, "an object"); }

void JsonNode::check_keys(const std::vector<std::string_view>& known) const {
  for (const auto& [key, value] : object()) {
    if (std::ranges::find(known, key) != known.end()) continue;
    std::string names;
    for (const std::string_view name : known) names += concat(names.empty() ? "" : ", ", name);
    fail_text(concat("unknown key \"", excerpt(key), "\", expected some of ", names));
  }
}

JsonNode JsonNode::at(std::string_view key) const {
  const JsonValue* member = member_of(object(), key);
  if (member == nullptr) fail_text(concat("the key \"", key, "\" is missing"));
  return {*member, origin_, path_ + path_step(key)};
}

std::optional<JsonNode> JsonNode::find(std::string_view key) const {
  const JsonValue* member = member_of(object(), key);
  if (member == nullptr || std::holds_alternative<std::nullptr_t>(member->value)) {
    return std::nullopt;
  }
  return JsonNode{*member, origin_, path_ + path_step(key)};
}

std::vector<std::pair<std::string, JsonNode>> JsonNode::members() const {
  std::vector<std::pair<std::string, JsonNode>> result;
  for (const auto& [key, value] : object()) {
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
  const auto& list = get<JsonList>(*this, "a list");
  for (std::size_t i = 0; i < list.size(); ++i) {
    result.push_back(JsonNode{list[i], origin_, concat(path_, '/', i)});
  }
  return result;
}

bool JsonNode::boolean() const { return get<bool>(*this, "true or false"); }

const std::string& JsonNode::string() const { return get<std::string>(*this, "a string"); }

std::int64_t JsonNode::integer(std::int64_t low, std::int64_t high) const {
  const std::int64_t number = get<std::int64_t>(*this, "an integer");
  if (number < low || high < number) fail(concat(low, "..", high));
  return number;
}

double JsonNode::real() const {
  if (std::holds_alternative<std::int64_t>(value_->value)) return static_cast<double>(integer());
  const double number = get<JsonReal>(*this, "a number").value;
  if (!std::isfinite(number)) fail("a number");
  return number;
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

namespace {

template <class Number>
void append_number(std::string& text, Number number) {
  std::array<char, 32> digits{};
  const auto [end, error] = std::to_chars(digits.data(), digits.data() + digits.size(), number);
  text.append(digits.data(), end);
}

void append_escaped(std::string& text, std::string_view raw) {
  constexpr std::string_view hex = "0123456789abcdef";
  for (const char c : raw) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      text += '\\';
      text += c;
    } else if (c == '\n') {
      text += "\\n";
    } else if (byte < 0x20) {
      text += "\\u00";
      text += hex[byte >> 4U];
      text += hex[byte & 15U];
    } else {
      text += c;
    }
  }
}

}  // namespace

void JsonWriter::new_line() {
  if (compact_) return;
  text_ += '\n';
  text_.append(2 * levels_.size(), ' ');
}

void JsonWriter::separate() {
  if (levels_.empty()) return;
  Level& level = levels_.back();
  if (!level.empty) text_ += level.line && !compact_ ? ", " : ",";
  level.empty = false;
  if (!level.line) new_line();
}

void JsonWriter::before_value() {
  if (!after_key_) separate();
  after_key_ = false;
}

JsonWriter& JsonWriter::open(char opening, bool line) {
  before_value();
  text_ += opening;
  const bool inside_line = !levels_.empty() && levels_.back().line;
  levels_.push_back({opening == '{' ? '}' : ']', line || inside_line});
  return *this;
}

JsonWriter& JsonWriter::close() {
  const Level level = levels_.back();
  levels_.pop_back();
  if (!level.line && !level.empty) new_line();
  text_ += level.closing;
  return *this;
}

JsonWriter& JsonWriter::key(std::string_view name) {
  separate();
  text_ += '"';
  append_escaped(text_, name);
  text_ += compact_ ? "\":" : "\": ";
  after_key_ = true;
  return *this;
}

JsonWriter& JsonWriter::word(std::string_view text) {
  before_value();
  text_ += text;
  return *this;
}

JsonWriter& JsonWriter::integer(std::int64_t number) {
  before_value();
  append_number(text_, number);
  return *this;
}

JsonWriter& JsonWriter::real(double number) {
  require(std::isfinite(number), "to_json: a number = ", number, ", expected a finite one");
  before_value();
  append_number(text_, number);
  return *this;
}

JsonWriter& JsonWriter::string(std::string_view text) {
  before_value();
  text_ += '"';
  append_escaped(text_, text);
  text_ += '"';
  return *this;
}

JsonWriter& JsonWriter::header(std::string_view format) {
  return key("format").string(format).key("version").integer(json_version);
}

std::string JsonWriter::finish() && {
  if (!compact_) text_ += '\n';
  return std::move(text_);
}

}  // namespace waybill::detail
