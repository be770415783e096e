#include <gtest/gtest.h>

#include <algorithm>

#include "simulate_support.h"
#include "support/expect_error.h"
#include "waybill/simulate/orchestrate.h"

namespace waybill {
namespace {

using test::filled_tensor;
using test::random_job;
using test::random_tensor;
using test::RandomJob;
using test::rejects;

constexpr std::int64_t hidden = 3;

/// What a gather by `rows` makes of `tensor`; rows that are -1 keep what `output` holds.
void gather(const HostTensor& tensor, const IndexArray& rows, HostTensor& output) {
  const auto from = tensor.as<std::int32_t>();
  const auto to = output.as<std::int32_t>();
  for (std::int64_t i = 0; i < rows.size(); ++i) {
    const std::int64_t row = rows.flat_at(i);
    if (row >= 0) {
      std::copy_n(from.begin() + row * hidden, hidden, to.begin() + i * hidden);
    }
  }
}

TEST(source_rows, a_gather_by_them_is_the_simulation) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const bool overlapping = seed % 3 == 0;
    const RandomJob job = random_job(
        seed, {.copies = static_cast<std::int64_t>(seed % 4), .overlapping = overlapping});
    const SimulateOptions options{.overlap = overlapping ? Overlap::last_wins : Overlap::reject,
                                  .num_threads = 1};
    const HostTensor source = random_tensor(DType::int32, {3, job.source_rows, hidden}, seed);
    HostTensor moved = random_tensor(DType::int32, {3, job.output_rows, hidden}, seed + 1000);
    HostTensor gathered = moved;
    orchestrate_simulate(source.view(), moved.view(), job.metadata, options);
    gather(source, source_rows(source.shape(), moved.shape(), job.metadata, options), gathered);
    EXPECT_TRUE(std::ranges::equal(moved.bytes(), gathered.bytes())) << "seed " << seed;
  }
}

TEST(source_rows, names_the_caller_s_shapes) {
  const RandomJob job = random_job(1);
  const Shape tensor{3, job.source_rows, 4096};
  const Shape output{3, 0, 4096};
  EXPECT_TRUE(rejects([&] { (void)source_rows(tensor, output, job.metadata); },
                      {"orchestrate_simulate", "output shape [3, 0, 4096]", "offset + length"}));
  EXPECT_TRUE(rejects(
      [&] {
        (void)source_rows({3, 4}, output, job.metadata);
      },
      {"tensor has shape [3, 4], expected 3 axes"}));
  EXPECT_TRUE(rejects(
      [&] {
        (void)source_rows(tensor, {3, 9, 64}, job.metadata);
      },
      {"output has shape [3, 9, 64], expected [3, rows, 4096]"}));
  EXPECT_TRUE(rejects([&] { (void)source_rows({3, -1, 8}, output, job.metadata); }, {"-1"}));
}

}  // namespace
}  // namespace waybill
