#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/json/file.h"

namespace waybill::detail {

/// Builds JSON text front to back. Containers opened with `line` stay on one line in the readable
/// style; all others put each member on a line of its own.
class JsonWriter {
 public:
  explicit JsonWriter(JsonStyle style) : compact_(style == JsonStyle::compact) {}

  JsonWriter& open_object(bool line = false) { return open('{', line); }
  JsonWriter& open_list(bool line = false) { return open('[', line); }
  JsonWriter& close();

  JsonWriter& key(std::string_view name);

  JsonWriter& null();
  JsonWriter& boolean(bool flag);
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
  void before_value();
  void separate();
  void new_line();

  bool compact_;
  bool after_key_ = false;
  std::vector<Level> levels_;
  std::string text_;
};

}  // namespace waybill::detail
