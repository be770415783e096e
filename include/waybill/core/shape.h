#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace waybill {

/// Extents, outermost first. An empty shape is a scalar (one element).
using Shape = std::vector<std::int64_t>;

/// Number of elements.
/// @throws InvalidArgument for a negative extent or a product over 2^62; `who` begins the text.
[[nodiscard]] std::int64_t num_elements(std::span<const std::int64_t> shape, const char* who);

/// "[4, 7, 2]"
[[nodiscard]] std::string to_string(std::span<const std::int64_t> shape);

/// Maps -ndim..ndim-1 to 0..ndim-1.
/// @throws InvalidArgument outside of that; `who` begins the text.
[[nodiscard]] std::int64_t normalize_dim(std::int64_t dim, std::int64_t ndim, const char* who);

}  // namespace waybill
