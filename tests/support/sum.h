#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace waybill::test {

[[nodiscard]] inline std::int64_t sum(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

}  // namespace waybill::test
