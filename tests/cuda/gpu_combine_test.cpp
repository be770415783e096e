// Combines on GPUs, against the simulation: several rows of a token on a rank, long rows, calls
// that follow each other without waits, a slow home rank, rows without a token.

#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <thread>

#include "cuda/gpu_expert_rounds.h"
#include "support/with_hooks.h"

namespace waybill {
namespace {

using test::check_random;
using test::config_of;
using test::DeviceArena;
using test::DeviceInput;
using test::ExpertCase;
using test::ExpertRig;
using test::same_bytes;

/// A token has several topk slots on a rank.
TEST(GpuCombine, many_tokens) {
  check_random(config_of(2, 16, 8, 700, 256), {}, 6, 51, {8, 3});
  check_random(config_of(2, 16, 3, 700, 64), {}, 6, 52, {8, 3});
  check_random(config_of(3, 12, 12, 600, 64, DType::float16, DType::float16), {}, 6, 53, {4});
  check_random(config_of(2, 64, 32, 600, 40, DType::float32), {}, 6, 54, {4});
  check_random(config_of(2, 16, 8, 700, 37), {}, 6, 55, {4});
  check_random(config_of(2, 16, 4, 700, 128), {.rows = EPRows::compact}, 6, 56, {4});
}

/// Rows have several pieces; the last ones are shorter.
TEST(GpuCombine, long_rows) {
  check_random(config_of(2, 16, 4, 60, 7176), {}, 6, 57, {8});
  check_random(config_of(2, 16, 4, 600, 5000), {}, 6, 58, {8});
  check_random(config_of(2, 16, 4, 20, 10007), {}, 6, 59, {8});
}

/// A token has more pieces than a block holds at once, and there are more blocks than tokens.
TEST(GpuCombine, wide_tokens) {
  check_random(config_of(2, 64, 32, 12, 7168, DType::float32), {}, 6, 61, {1, 3});
  check_random(config_of(2, 32, 16, 540, 2600), {}, 6, 62, {2});
  check_random(config_of(4, 32, 8, 3, 2048), {.rows = EPRows::compact}, 6, 63, {24});
}

/// The experts' outputs, with NaN in rows that belong to no token, and in some further rows.
HostTensor poisoned(const HostTensor& outputs, const IndexArray& origin) {
  const std::int64_t rows = outputs.shape()[0];
  const std::int64_t hidden = outputs.shape()[1];
  const auto origins = origin.to_vector();
  HostTensor poison(outputs.dtype(), {rows + 5, hidden});
  for (std::int64_t row = 0; row < rows + 5; ++row) {
    const bool is_token = row < rows && origins[row * 3] >= 0;
    for (std::int64_t i = row * hidden; i < (row + 1) * hidden; ++i) {
      const float value =
          is_token ? test::float_at(outputs, i) : std::numeric_limits<float>::quiet_NaN();
      test::set_float(poison, i, value);
    }
  }
  return poison;
}

/// Combines of one dispatch, each with other rows, queued one after the other.
struct Burst {
  ExpertCase sample;
  ExpertDispatch dispatch;
  std::vector<std::vector<HostTensor>> inputs;  ///< per combine and rank
  std::vector<EPCombineOptions> options;
  std::vector<std::vector<HostTensor>> sums;
};

Burst make_burst(const EPConfig& config, int combines) {
  Random random(61);
  Burst burst{test::random_case(config, random, {.tokens = config.max_tokens}), {}, {}, {}, {}};
  burst.dispatch = burst.sample.dispatch({.expert_alignment = 4});
  for (int i = 0; i < combines; ++i) {
    const auto outputs = test::random_outputs(burst.dispatch, random);
    const EPCombineOptions options{.local_combine = i % 2 == 0, .weighted = i % 3 == 1};
    burst.options.push_back(options);
    burst.sums.push_back(simulate_expert_combine(burst.dispatch, test::views_of(outputs), options));
    auto& inputs = burst.inputs.emplace_back();
    for (std::size_t r = 0; r < outputs.size(); ++r) {
      inputs.push_back(poisoned(outputs[r], burst.dispatch.recv_origin[r]));
    }
  }
  return burst;
}

/// @param late the rank whose host is late each time; -1: none
void run_burst(World& world, const Burst& burst, std::int32_t late) {
  const EPConfig& config = burst.dispatch.config;
  DeviceArena arena(world);
  ExpertRig rig(world, config, {.expert_alignment = 4}, burst.dispatch.rows.largest_recv_rows + 5,
                8);
  const std::size_t r = rig.config().rank;
  const Stream stream{arena.stream()};
  const DeviceInput device(arena, burst.sample, rig.config().rank);
  world.barrier();  // no upload may follow a kernel that waits for a rank on the same GPU
  const auto tables = rig.dispatch(device.input, stream);
  std::vector<ConstTensorView> inputs;
  std::vector<TensorView> sums;
  for (std::size_t i = 0; i < burst.inputs.size(); ++i) {
    inputs.push_back(arena.upload(burst.inputs[i][r]));
    sums.push_back(arena.take(config.token_dtype, burst.sums[i][r].shape()));
  }
  arena.synchronize();
  world.barrier();
  for (int repeat = 0; repeat < test::num_random_cases(20); ++repeat) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (rig.config().rank == late && i % 3 == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      rig.combine({inputs[i], burst.options[i], {}, sums[i]}, *tables, stream);
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      EXPECT_TRUE(same_bytes(arena.download(sums[i]), burst.sums[i][r]))
          << "combine " << i << " of burst " << repeat << ", rank " << r;
      EXPECT_TRUE(arena.guards_hold(sums[i]));
    }
    if (testing::Test::HasFailure()) break;
  }
  world.barrier();
}

void check_burst(const EPConfig& config, const char* delay, std::int32_t late = -1) {
  const test::WithHooks hooks(delay);
  const Burst burst = make_burst(config, 11);
  run_gpu_thread_world(
      config.world_size, [&](World& world) { run_burst(world, burst, late); },
      test::options_of(config));
}

TEST(GpuCombine, calls_that_nothing_holds_back) {
  check_burst(config_of(2, 16, 4, 60, 256), "delay_ns=0");
  check_burst(config_of(2, 16, 4, 60, 256), "delay_ns=50000");
  check_burst(config_of(2, 16, 8, 700, 128), "delay_ns=100000");
}
TEST(GpuCombine, slow_home) {
  check_burst(config_of(2, 16, 4, 60, 256), "delay_ns=0", 0);
  check_burst(config_of(2, 16, 8, 700, 128), "delay_ns=20000", 1);
}

}  // namespace
}  // namespace waybill
