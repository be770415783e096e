#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace waybill::detail {

struct JsonMember;
struct JsonValue;

/// A number that is not an int64: its value, if one exists, and how the text spells it.
struct JsonReal {
  double value = 0;
  std::string text;
};

/// A list of integers only, which is what most of a plan is: 8 bytes a number.
using JsonIntegers = std::vector<std::int64_t>;
using JsonList = std::vector<JsonValue>;

/// Keys in the order of the text; no key twice.
struct JsonObject {
  std::vector<JsonMember> members;
  [[nodiscard]] const JsonValue* find(std::string_view key) const;
};

/// One parsed value. An empty list is a JsonIntegers.
struct JsonValue {
  std::variant<std::nullptr_t, bool, std::int64_t, JsonReal, std::string, JsonIntegers, JsonList,
               JsonObject>
      value;
};

struct JsonMember {
  std::string key;
  JsonValue value;
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

}  // namespace waybill::detail
