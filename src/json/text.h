#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "waybill/core/error.h"
#include "waybill/json/file.h"

namespace waybill::detail {

struct JsonValue;

/// A number that is not an int64: its value, if one exists, and how the text spells it.
struct JsonReal {
  double value = 0;
  std::string text;
};

/// A list of integers only, as most lists of a plan are, in 8 bytes per number.
using JsonIntegers = std::vector<std::int64_t>;
using JsonList = std::vector<JsonValue>;

/// Keys in the order of the text; no key twice.
using JsonObject = std::vector<std::pair<std::string, JsonValue>>;

/// One parsed value. An empty list is a JsonIntegers.
struct JsonValue {
  std::variant<std::nullptr_t, bool, std::int64_t, JsonReal, std::string, JsonIntegers, JsonList,
               JsonObject>
      value;
};

/// Deeper texts are refused; what this library writes is less than 10 deep.
inline constexpr std::size_t max_json_depth = 24;

/// Parses a whole text: strict JSON, each key once in an object.
/// Memory is bounded by the text's size; nothing is allocated from a number in it.
/// @throws IoError "ORIGIN: line 3, column 7: ..." or "ORIGIN: /path: ..."
[[nodiscard]] JsonValue parse_json(std::string_view text, std::string_view origin);

/// At most 60 characters of `text` for an error, control characters replaced.
[[nodiscard]] std::string excerpt(std::string_view text);

/// One step of a path, escaped as JSON Pointer (RFC 6901) asks.
[[nodiscard]] std::string path_step(std::string_view key);

/// A parsed value with the way to it, so that every error can say where it is.
class JsonNode {
 public:
  JsonNode(const JsonValue& value, std::string_view origin) : value_(&value), origin_(origin) {}

  /// @throws IoError `ORIGIN: /path = GOT, expected EXPECTED`
  [[noreturn]] void fail(std::string_view expected) const;
  /// @throws IoError `ORIGIN: /path: TEXT`
  [[noreturn]] void fail_text(std::string_view text) const;

  [[nodiscard]] const JsonValue& value() const { return *value_; }
  /// A value further down, which `path` leads to from here.
  [[nodiscard]] JsonNode below(const JsonValue& value, std::string_view path) const {
    return {value, origin_, path_ + std::string(path)};
  }
  [[nodiscard]] bool is_list() const;

  /// Throws unless this is an object with no other keys than these.
  void check_keys(const std::vector<std::string_view>& known) const;

  /// A member that must be there.
  [[nodiscard]] JsonNode at(std::string_view key) const;
  /// A member that may be absent or null.
  [[nodiscard]] std::optional<JsonNode> find(std::string_view key) const;
  /// Key and value of each member.
  [[nodiscard]] std::vector<std::pair<std::string, JsonNode>> members() const;
  /// Items of a list of any kind. Copies lists of integers: not for those.
  [[nodiscard]] std::vector<JsonNode> items() const;

  [[nodiscard]] bool boolean() const;
  [[nodiscard]] const std::string& string() const;
  [[nodiscard]] std::int64_t integer(
      std::int64_t low = std::numeric_limits<std::int64_t>::min(),
      std::int64_t high = std::numeric_limits<std::int64_t>::max()) const;
  [[nodiscard]] double real() const;  ///< finite
  [[nodiscard]] const std::vector<std::int64_t>& integers() const;
  [[nodiscard]] std::vector<std::int32_t> integers32() const;

  /// Throws unless "format" and "version" are these.
  void check_format(std::string_view format) const;

 private:
  JsonNode(const JsonValue& value, std::string_view origin, std::string path)
      : value_(&value), origin_(origin), path_(std::move(path)) {}
  [[nodiscard]] const JsonObject& object() const;

  const JsonValue* value_;
  std::string_view origin_;
  std::string path_;
};

/// Calls `check`; an error that it finds becomes one of the text, at `node`.
template <class Check>
void check_at(const JsonNode& node, Check&& check) {
  try {
    check();
  } catch (const InvalidArgument& error) {
    node.fail_text(error.what());
  }
}

/// The only version of all formats so far.
inline constexpr std::int64_t json_version = 1;

/// Builds JSON text front to back. Containers opened with `line` stay on one line in the readable
/// style; all others put each member on a line of its own.
class JsonWriter {
 public:
  explicit JsonWriter(JsonStyle style) : compact_(style == JsonStyle::compact) {}

  JsonWriter& open_object(bool line = false) { return open('{', line); }
  JsonWriter& open_list(bool line = false) { return open('[', line); }
  JsonWriter& close();

  JsonWriter& key(std::string_view name);

  JsonWriter& null() { return word("null"); }
  JsonWriter& boolean(bool flag) { return word(flag ? "true" : "false"); }
  JsonWriter& integer(std::int64_t number);
  /// The shortest text that reads back as the same number. @throws InvalidArgument unless finite.
  JsonWriter& real(double number);
  JsonWriter& string(std::string_view text);

  /// A list of integers on one line.
  template <class Integers>
  JsonWriter& integers(const Integers& numbers) {
    open_list(true);
    for (const auto number : numbers) integer(number);
    return close();
  }

  /// "format" and "version" as the first members of the object just opened.
  JsonWriter& header(std::string_view format);

  /// The finished text; ends with a line break in the readable style.
  [[nodiscard]] std::string finish() &&;

 private:
  struct Level {
    char closing;
    bool line;
    bool empty = true;
  };

  JsonWriter& open(char opening, bool line);
  JsonWriter& word(std::string_view text);
  void before_value();
  void separate();
  void new_line();

  bool compact_;
  bool after_key_ = false;
  std::vector<Level> levels_;
  std::string text_;
};

/// The text of an object of this format, whose other members `write` adds.
template <class Write>
[[nodiscard]] std::string write_document(JsonStyle style, std::string_view format, Write&& write) {
  JsonWriter writer(style);
  writer.open_object().header(format);
  write(writer);
  writer.close();
  return std::move(writer).finish();
}

/// @return read(root) of a text of this format; "": of any
template <class Read>
[[nodiscard]] auto read_document(std::string_view text, std::string_view origin,
                                 std::string_view format, Read&& read) {
  const JsonValue value = parse_json(text, origin);
  const JsonNode root(value, origin);
  if (!format.empty()) root.check_format(format);
  return read(root);
}

}  // namespace waybill::detail
