#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/to_size.h"
#include "moe/expert_case.h"

namespace waybill::test {

/// Whether all rows of a rank's token fit into windows of so many rows.
inline bool fits(const ExpertDispatch& dispatch, std::size_t rank, std::int64_t token,
                 std::int64_t capacity) {
  const std::int64_t topk = dispatch.config.topk;
  for (std::int64_t k = 0; k < topk; ++k) {
    if (dispatch.dst_row[rank][token * topk + k] >= capacity) return false;
  }
  return true;
}

/// Sums of a rank's tokens: NaN of those that have lost a row, as expected else.
/// @return how many have lost one
inline std::int64_t expect_lost_are_nan(const ExpertDispatch& dispatch, std::size_t rank,
                                        const HostTensor& got, const HostTensor& expected,
                                        std::int64_t capacity) {
  const std::int64_t hidden = dispatch.config.hidden;
  std::int64_t lost = 0;
  for (std::int64_t token = 0; token < got.shape()[0]; ++token) {
    const bool is_whole = fits(dispatch, rank, token, capacity);
    lost += is_whole ? 0 : 1;
    for (std::int64_t i = token * hidden; i < (token + 1) * hidden; ++i) {
      const float value = float_at(got, i);
      EXPECT_TRUE(is_whole ? value == float_at(expected, i) : std::isnan(value))
          << "token " << token << " of rank " << rank << (is_whole ? " fits: " : " has lost rows: ")
          << value << ", expected " << float_at(expected, i);
      if (testing::Test::HasFailure()) return lost;
    }
  }
  return lost;
}

/// Of received rows, those that fit are as expected; padding aside.
inline void expect_rows_that_fit(const HostTensor& got, const HostTensor& expected,
                                 std::int64_t capacity) {
  const std::int64_t rows = std::min(expected.shape()[0], capacity);
  const auto bytes =
      waybill::detail::to_size(rows * expected.shape()[1] * dtype_bytes(expected.dtype()));
  EXPECT_TRUE(std::equal(expected.bytes().begin(),
                         expected.bytes().begin() + static_cast<std::ptrdiff_t>(bytes),
                         got.bytes().begin()));
}

}  // namespace waybill::test
