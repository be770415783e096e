#pragma once

#include <cstddef>
#include <cstdint>

namespace waybill::detail {

/// Index of a standard container: counts and offsets are signed throughout.
[[nodiscard]] constexpr std::size_t to_size(std::int64_t idx) noexcept {
  return static_cast<std::size_t>(idx);
}

}  // namespace waybill::detail
