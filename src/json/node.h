#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "value.h"

namespace waybill::detail {

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
  [[nodiscard]] bool is_null() const;
  [[nodiscard]] bool is_list() const;

  /// Throws unless this is an object with no other keys than these.
  void check_keys(std::initializer_list<std::string_view> known) const;

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
  [[nodiscard]] std::string place() const;

  const JsonValue* value_;
  std::string_view origin_;
  std::string path_;
};

/// The only version of all formats so far.
inline constexpr std::int64_t json_version = 1;

}  // namespace waybill::detail
