#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace waybill {

/// Text that may hold anything, such as the name of a file, for a terminal: characters that could
/// move the cursor, change colours, titles or the direction of writing are written as \x1b or
/// \u202e, bytes that are not UTF-8 as \xff. Line feeds and tabs stay.
[[nodiscard]] std::string printable(std::string_view text);

/// The same for text inside a line: line feeds and tabs are written as \x0a and \x09.
[[nodiscard]] std::string printable_line(std::string_view text);

namespace detail {

struct CodePoint {
  std::uint32_t value = 0;
  std::size_t num_bytes = 0;  ///< 0: what begins here is not UTF-8
};

/// The first one of a text that is not empty.
[[nodiscard]] CodePoint first_code_point(std::string_view text);

/// Control characters (C0, DEL, C1), ends of lines and paragraphs, and what turns the direction of
/// writing.
[[nodiscard]] bool is_control(std::uint32_t code_point);

}  // namespace detail

}  // namespace waybill

namespace waybill::detail {

/// The system's text for an `errno`: "No such file or directory".
[[nodiscard]] std::string errno_text(int error);

}  // namespace waybill::detail
