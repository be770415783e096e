#include "waybill/core/random.h"

#include <numeric>
#include <utility>

#include "waybill/core/error.h"

namespace waybill {

std::int64_t Random::below(std::int64_t bound) {
  require(bound >= 1, "Random::below: bound = ", bound, ", expected >= 1");
  __extension__ using Wide = unsigned __int128;
  const auto range = static_cast<std::uint64_t>(bound);
  const std::uint64_t reject_below = (0 - range) % range;
  for (;;) {
    const Wide product = static_cast<Wide>(engine_()) * range;
    if (static_cast<std::uint64_t>(product) >= reject_below) {
      return static_cast<std::int64_t>(product >> 64);
    }
  }
}

std::vector<std::int32_t> Random::permutation(std::int32_t n, std::int32_t count) {
  require(0 <= count && count <= n, "Random::permutation: count = ", count, ", expected 0..", n);
  std::vector<std::int32_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  for (std::int32_t i = 0; i < count; ++i) {
    const auto j = static_cast<std::size_t>(i + below(n - i));
    std::swap(order[static_cast<std::size_t>(i)], order[j]);
  }
  order.resize(static_cast<std::size_t>(count));
  return order;
}

}  // namespace waybill
