// Combines that push, on GPUs, against the simulation: groups of many tokens, calls that follow
// each other without waits, a slow home rank, rows without a token, more ranks than parameters
// hold.

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include "cuda/experts/kernels.h"
#include "cuda/gpu_expert_rounds.h"
#include "cuda/one_of_many.h"
#include "support/with_hooks.h"

namespace waybill {
namespace {

using test::check_random;
using test::config_of;
using test::DeviceArena;
using test::DeviceBlocks;
using test::DeviceInput;
using test::ExpertCase;
using test::ExpertRig;
using test::OneOfMany;
using test::same_bytes;
using test::to_size;

/// Tokens are signalled in groups, and a token has several topk slots on a rank.
TEST(GpuPushCombine, groups_of_tokens) {
  check_random(config_of(2, 16, 8, 700, 256), {}, 6, 51, {8, 3});
  check_random(config_of(2, 16, 3, 700, 64), {}, 6, 52, {8, 3});
  check_random(config_of(3, 12, 12, 600, 64, DType::float16, DType::float16), {}, 6, 53, {4});
  check_random(config_of(2, 64, 32, 600, 40, DType::float32), {}, 6, 54, {4});
  check_random(config_of(2, 16, 8, 700, 37), {}, 6, 55, {4});
  check_random(config_of(2, 16, 4, 700, 128), {.rows = EPRows::compact}, 6, 56, {4});
}

/// Rows have several pieces and parts; the last ones are shorter.
TEST(GpuPushCombine, long_rows) {
  check_random(config_of(2, 16, 4, 60, 7176), {}, 6, 57, {8});
  check_random(config_of(2, 16, 4, 600, 5000), {}, 6, 58, {8});
  check_random(config_of(2, 16, 4, 20, 10007), {}, 6, 59, {8});
}

/// A token has more pieces than a block holds at once, and there are more blocks than units.
TEST(GpuPushCombine, wide_tokens) {
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
      rig.use_slabs(i % 5 != 4 || repeat % 2 == 0);  // some combines pull
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

TEST(GpuPushCombine, calls_that_nothing_holds_back) {
  check_burst(config_of(2, 16, 4, 60, 256), "delay_ns=0");
  check_burst(config_of(2, 16, 4, 60, 256), "delay_ns=50000");
  check_burst(config_of(2, 16, 8, 700, 128), "delay_ns=100000");
}
TEST(GpuPushCombine, slow_home) {
  check_burst(config_of(2, 16, 4, 60, 256), "delay_ns=0", 0);
  check_burst(config_of(2, 16, 8, 700, 128), "delay_ns=20000", 1);
}

constexpr std::int32_t topk = 4;
constexpr std::int32_t max_tokens = 40;
constexpr std::int64_t row_floats = 8;
constexpr std::int64_t row_bytes = row_floats * 4;
constexpr std::int64_t num_rows = 300;

std::vector<float> numbered_rows(std::int64_t rows) {
  std::vector<float> values(rows * row_floats);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 4099);
  return values;
}

/// One rank of many: it pushes to all of them, and sums the rows that all have pushed.
class ManyHomes {
 public:
  explicit ManyHomes(std::int32_t world_size) : many_(world_size, world_size / 2) {
    Random random(13);
    for (std::int32_t i = 0; i < world_size * max_tokens * topk; ++i) {
      const bool is_here = random.below(40) == 0;
      records_.push_back(is_here ? static_cast<std::int32_t>(random.below(num_rows)) : -1);
    }
    const auto own = records_.begin() + std::ptrdiff_t{many_.rank()} * max_tokens * topk;
    std::fill_n(own, max_tokens * topk, -1);
    // Each topk slot of this rank's tokens is on another rank.
    for (std::int32_t i = 0; i < max_tokens * topk; ++i) {
      const std::int64_t rank = (many_.rank() + 1 + i * 5 % (world_size - 1)) % world_size;
      addresses_.push_back((rank << cuda::address_dst_shift) + i + cuda::primary_row_bit);
    }
    addresses_[3] = (std::int64_t{1} << cuda::address_dst_shift) + num_rows;  // lost
    addresses_[4] = -1;
    fill();
  }

  void run(cuda::PushWay way) {
    test::cuda_ok(cuda::prepare_push_combine(DType::float32, way));
    test::cuda_ok(cuda::launch_push_combine(params_, DType::float32, way, 4, false, nullptr));
    ASSERT_TRUE(many_.finish());
  }

  void check_slabs() const {
    const std::int32_t world_size = many_.world_size();
    const auto got = DeviceBlocks::download(slabs_, world_size * slab_floats);
    for (std::int32_t t = 0; t < world_size * max_tokens; ++t) {
      if (t / max_tokens == many_.rank()) continue;
      std::vector<float> expected(topk * row_floats);
      std::int64_t first = -1;
      for (std::int32_t k = 0; k < topk; ++k) {
        const std::int32_t row = records_[t * topk + k];
        if (row < 0) continue;
        if (first < 0) first = k;
        for (std::int64_t h = 0; h < row_floats; ++h) {
          expected[first * row_floats + h] += rows_[row * row_floats + h];
        }
      }
      const auto of_token = got.begin() + std::ptrdiff_t{t} * topk * row_floats;
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), of_token)) << "token " << t;
    }
  }

  void check_sums() const {
    const auto* const output = reinterpret_cast<const float*>(params_.output);
    const auto sums = DeviceBlocks::download(output, max_tokens * row_floats);
    for (std::int64_t t = 0; t < max_tokens; ++t) {
      for (std::int64_t h = 0; h < row_floats; ++h) {
        float sum = 0;
        for (std::int64_t k = t == 1 ? 1 : 0; k < topk; ++k) {
          sum += arrived_[(t * topk + k) * row_floats + h];
        }
        const float seen = sums[t * row_floats + h];
        ASSERT_TRUE(t == 0 ? std::isnan(seen) : seen == sum) << t << ", " << h;
      }
    }
  }

 private:
  static constexpr std::int64_t slab_floats = std::int64_t{max_tokens} * topk * row_floats;

  void fill() {
    const std::int32_t world_size = many_.world_size();
    DeviceBlocks& blocks = many_.blocks();
    slabs_ = blocks.take<float>(world_size * slab_floats);
    float* const own_slab = slabs_ + many_.rank() * slab_floats;
    DeviceBlocks::write(own_slab, arrived_);
    const std::int64_t num_flags = cuda::max_push_units(max_tokens, topk) * world_size;
    auto* const flags = blocks.upload(std::vector<std::uint64_t>(num_flags, OneOfMany::epoch));
    cuda::PushParams& p = params_;
    p.m.state = reinterpret_cast<cuda::MoeState*>(
        blocks.take<std::byte>(cuda::moe_state_bytes(world_size)));
    p.m.arrive = many_.arrive(cuda::FaultKind::moe_combine, &p.m.state->call);
    p.shape.rank = many_.rank();
    p.shape.world_size = p.shape.node_ranks = world_size;
    p.shape.topk = topk;
    p.shape.num_tokens = p.shape.max_tokens = max_tokens;
    p.shape.capacity_rows = num_rows;
    p.slots = topk;
    p.once = p.sums = true;
    p.row_bytes = row_bytes;
    p.input = reinterpret_cast<const std::byte*>(blocks.upload(rows_));
    p.num_rows = num_rows;
    p.num_recv_rows = blocks.upload(std::vector<std::int32_t>{num_rows});
    p.records = blocks.upload(records_);
    p.num_input_tokens = blocks.upload(std::vector<std::int32_t>(world_size, max_tokens));
    p.slabs = many_.peers_of_all(reinterpret_cast<std::byte*>(slabs_), slab_floats * 4);
    p.flags = many_.peers(flags, blocks.take<std::uint64_t>(num_flags));
    p.own_slab = reinterpret_cast<const std::byte*>(own_slab);
    p.own_flags = flags;
    p.addresses = blocks.upload(addresses_);
    const std::vector<float> lost(row_floats, std::numeric_limits<float>::quiet_NaN());
    p.lost_row = reinterpret_cast<const std::byte*>(blocks.upload(lost));
    p.output = reinterpret_cast<std::byte*>(blocks.take<float>(max_tokens * row_floats));
  }

  OneOfMany many_;
  std::vector<std::int32_t> records_;
  std::vector<std::int64_t> addresses_;
  std::vector<float> rows_ = numbered_rows(num_rows);  ///< outputs of this rank's experts
  std::vector<float> arrived_ = numbered_rows(std::int64_t{max_tokens} * topk);
  float* slabs_ = nullptr;
  cuda::PushParams params_{};
};

void check_many(std::int32_t world_size, cuda::PushWay way) {
  ManyHomes homes(world_size);
  homes.run(way);
  homes.check_slabs();
  homes.check_sums();
}

TEST(GpuPushCombine, more_ranks_than_parameters_have) {
  int device_major = 0;
  test::cuda_ok(cudaDeviceGetAttribute(&device_major, cudaDevAttrComputeCapabilityMajor, 0));
  for (const std::int32_t world : {128, 1024}) {
    check_many(world, cuda::PushWay::elements);
    check_many(world, cuda::PushWay::words);
    if (device_major < 9) continue;
    check_many(world, cuda::PushWay::bulk);
  }
}

}  // namespace
}  // namespace waybill
