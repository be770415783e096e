#pragma once

#include <cstdint>

namespace waybill {

/// How JSON is laid out.
enum class JsonStyle : std::uint8_t {
  readable,  ///< a field a line; the numbers of an array on one line
  compact,   ///< no line breaks and no spaces
};

/// How far a reader looks.
enum class ReadCheck : std::uint8_t {
  values,  ///< form, and that the values can be meant: no negative lengths, ranks of the world ...
  form,    ///< only types and shapes, for a caller that validates and reports by itself
};

}  // namespace waybill
