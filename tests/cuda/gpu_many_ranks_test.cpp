// Kernels for many ranks, run for one of them on one GPU: counting and placing, rows to windows,
// sums of rows from windows, chunks of a plan.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/to_size.h"
#include "cuda/experts/kernels.h"
#include "cuda/one_of_many.h"
#include "cuda/sequence/kernels.h"
#include "schedule/sequence_plan.h"
#include "support/sequence_expected.h"
#include "waybill/core/random.h"
#include "waybill/moe/expert_routing.h"

namespace waybill {
namespace {

using cuda::MoeShape;
using cuda::MoeState;
using test::DeviceBlocks;
using test::OneOfMany;
using test::to_size;
using Ints = std::vector<std::int32_t>;

constexpr std::int32_t topk = 4;
constexpr std::int64_t max_tokens = 40;

EPConfig config_of(std::int32_t world_size) {
  EPConfig config;
  config.max_tokens = max_tokens;
  config.hidden = 8;
  config.topk = topk;
  config.num_experts = 2 * world_size;
  config.rank = world_size - 3;
  config.world_size = world_size;
  config.local_world_size = world_size;
  return config;
}

MoeShape shape_of(const EPConfig& config, bool compact) {
  MoeShape shape{};
  shape.rank = config.rank;
  shape.world_size = config.world_size;
  shape.num_experts = config.num_experts;
  shape.experts_per_rank = config.num_experts_per_rank();
  shape.topk = topk;
  shape.num_tokens = static_cast<std::int32_t>(max_tokens);
  shape.max_tokens = static_cast<std::int32_t>(max_tokens);
  shape.compact = compact ? 1 : 0;
  shape.alignment = 1;
  shape.num_nodes = 1;
  shape.node_ranks = config.world_size;
  shape.capacity_rows = std::numeric_limits<std::int32_t>::max();
  return shape;
}

/// Ids of all ranks. The tested rank has more tokens than the others, and some topk slots are
/// dropped.
std::vector<Ints> random_ids(const EPConfig& config) {
  Random random(7);
  std::vector<Ints> ids;
  for (std::int32_t r = 0; r < config.world_size; ++r) {
    const std::int64_t tokens = r == config.rank ? max_tokens : random.below(3);
    Ints& of_rank = ids.emplace_back(tokens * topk);
    for (std::int32_t& id : of_rank) {
      const bool near = random.below(2) == 0;  // several topk slots of a token on one rank
      id = static_cast<std::int32_t>(near ? random.below(8) : random.below(config.num_experts + 1));
    }
  }
  return ids;
}

/// Runs the route of one rank, for which the counts of all others have arrived.
class Counting {
 public:
  Counting(const EPConfig& config, bool compact)
      : shape_(shape_of(config, compact)), many_(config.world_size, config.rank) {
    options_.rows = compact ? EPRows::compact : EPRows::grouped;
    ids_ = random_ids(config);
    Ints counts;
    for (const Ints& ids : ids_) {
      const auto own = count_topk_slots(config, ids);
      counts.insert(counts.end(), own.begin(), own.end());
    }
    rows_ = locate_rows(config, options_, counts);
    places_ = place_topk_slots(config, options_, rows_, config.rank, ids_[config.rank]);
    fill(config, counts);
  }

  void run() {
    const int blocks = cuda::route_blocks(shape_, 4);
    test::cuda_ok(cuda::prepare_route(false));
    test::cuda_ok(cuda::launch_route(params_, blocks, nullptr));
    ASSERT_TRUE(many_.finish());
  }

  void check() {
    const std::int64_t world = shape_.world_size;
    const std::int64_t per_rank = shape_.experts_per_rank;
    EXPECT_EQ(DeviceBlocks::download(params_.num_recv_rows, world), rows_.num_recv_rows);
    EXPECT_EQ(DeviceBlocks::download(params_.num_recv_rows + world, 1)[0], rows_.largest_recv_rows);
    EXPECT_EQ(DeviceBlocks::download(params_.num_input_tokens, world), rows_.num_input_tokens);
    EXPECT_EQ(DeviceBlocks::download(params_.splits, world * (shape_.num_experts + 1)),
              rows_.splits);
    EXPECT_EQ(DeviceBlocks::download(params_.segment_offsets, world * per_rank * world),
              rows_.segment_offsets);
    const auto own = [&](const Ints& all, std::int64_t each) {
      const auto first = all.begin() + shape_.rank * each;
      return Ints(first, first + each);
    };
    EXPECT_EQ(DeviceBlocks::download(params_.expert_counts, per_rank),
              own(rows_.expert_counts, per_rank));
    EXPECT_EQ(DeviceBlocks::download(params_.expert_offsets, per_rank + 1),
              own(rows_.expert_offsets, per_rank + 1));
    for (std::int64_t r = 0; r < world; ++r) {
      EXPECT_EQ(params_.host[r] & 0xFFFFFFFF, to_size(rows_.num_recv_rows[r])) << r;
    }
    check_places();
  }

 private:
  void check_places() {
    const Ints& ids = ids_[shape_.rank];
    EXPECT_EQ(DeviceBlocks::download(params_.dst_rows, max_tokens * topk), places_);
    const auto addresses = DeviceBlocks::download(params_.addresses, max_tokens * topk);
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      if (places_[i] < 0) {
        EXPECT_LT(addresses[i], 0) << i;
        continue;
      }
      EXPECT_EQ(addresses[i] & 0xFFFFFFFF, places_[i]) << i;
      EXPECT_EQ(addresses[i] >> cuda::address_dst_shift & 0xFFFF, ids[i] / shape_.experts_per_rank)
          << i;
    }
  }

  void fill(const EPConfig& config, const Ints& counts) {
    DeviceBlocks& blocks = many_.blocks();
    const std::int64_t world = config.world_size;
    const std::int64_t n = num_counts(config);
    std::vector<std::uint64_t> words(counts.size());
    for (std::size_t i = 0; i < words.size(); ++i) {
      const bool own = static_cast<std::int64_t>(i) / n == config.rank;
      if (own) continue;  // the kernel sends it
      words[i] =
          OneOfMany::epoch << cuda::count_epoch_shift | static_cast<std::uint32_t>(counts[i]);
    }
    params_.m.state = reinterpret_cast<MoeState*>(
        blocks.take<std::byte>(cuda::moe_state_bytes(config.world_size)));
    params_.m.arrive = many_.arrive(cuda::FaultKind::moe_dispatch, &params_.m.state->call);
    params_.shape = shape_;
    params_.ids = blocks.upload(ids_[config.rank]);
    params_.dropped_id = config.num_experts;
    params_.fitting_rows = std::numeric_limits<std::int32_t>::max();
    params_.max_per_expert = std::numeric_limits<std::int32_t>::max();
    params_.weight_bytes = 4;
    place_parts(words, world * max_tokens * (topk + 1));
    params_.tile_counts = blocks.take<std::int32_t>(4 * n);
    params_.out_ids = blocks.take<std::int32_t>(max_tokens * topk);
    params_.dst_rows = blocks.take<std::int32_t>(max_tokens * topk);
    params_.addresses = blocks.take<std::int64_t>(max_tokens * topk);
    params_.num_input_tokens = blocks.take<std::int32_t>(world);
    params_.splits = blocks.take<std::int32_t>(world * (config.num_experts + 1));
    params_.segment_offsets = blocks.take<std::int32_t>(config.num_experts * world);
    params_.expert_counts = blocks.take<std::int32_t>(config.num_experts_per_rank());
    params_.expert_offsets = blocks.take<std::int32_t>(config.num_experts_per_rank() + 1);
    params_.num_recv_rows = blocks.take<std::int32_t>(world + 1);
    params_.host = blocks.pinned<std::uint64_t>(world);
    params_.ticket = 1;
  }

  /// One allocation per rank: counts, then records.
  void place_parts(const std::vector<std::uint64_t>& counts, std::int64_t num_records) {
    DeviceBlocks& blocks = many_.blocks();
    const auto counts_bytes = static_cast<std::int64_t>(counts.size()) * 8;
    auto* const own = blocks.take<std::byte>(counts_bytes + num_records * 4);
    auto* const others = blocks.take<std::byte>(counts_bytes + num_records * 4);
    params_.own_counts = reinterpret_cast<std::uint64_t*>(own);
    params_.own_records = reinterpret_cast<std::int32_t*>(own + counts_bytes);
    DeviceBlocks::write(params_.own_counts, counts);
    params_.peers = many_.peers(own, others);
    params_.records = counts_bytes;
  }

  MoeShape shape_;
  OneOfMany many_;
  EPDispatchOptions options_;
  std::vector<Ints> ids_;
  ExpertRows rows_;
  Ints places_;
  cuda::RouteParams params_{};
};

TEST(GpuManyRanks, are_counted_and_placed) {
  for (const std::int32_t world : {65, 72, 128, 513, 1024}) {
    for (const bool compact : {false, true}) {
      SCOPED_TRACE(::testing::Message() << world << " ranks" << (compact ? ", compact" : ""));
      ASSERT_LE(2 * world, cuda::max_experts_on_gpu(world));
      Counting counting(config_of(world), compact);
      counting.run();
      counting.check();
    }
  }
}

TEST(GpuManyRanks, experts_have_a_limit_by_ranks) {
  EXPECT_GT(cuda::max_experts_on_gpu(2), 9900);
  EXPECT_GT(cuda::max_experts_on_gpu(1024), 7 * 1024);
  EXPECT_GE(cuda::max_experts_on_gpu(3071), 3071);
  EXPECT_LT(cuda::max_experts_on_gpu(3072), 3072);
}

bool has_bulk_copies() {
  int major = 0;
  test::cuda_ok(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  return major >= 9;
}

constexpr std::int64_t row_floats = 1024;
constexpr std::int64_t row_bytes = row_floats * 4;
constexpr std::int64_t window_rows = 2;

/// A different random address for each token.
std::vector<std::int64_t> random_addresses(std::int32_t world_size) {
  Random random(11);
  const auto places =
      random.permutation(static_cast<std::int32_t>(world_size * window_rows), max_tokens * topk);
  std::vector<std::int64_t> addresses;
  for (const std::int32_t place : places) {
    const std::int64_t rank = place / window_rows;
    const bool goes = random.below(5) != 0;
    addresses.push_back(goes ? (rank << cuda::address_dst_shift) + place % window_rows +
                                   cuda::primary_row_bit
                             : -1);
  }
  return addresses;
}

/// Row of an address, among the windows of all ranks.
std::int64_t row_of(std::int64_t address) {
  return (address >> cuda::address_dst_shift & 0xFFFF) * window_rows + (address & 0xFFFFFFFF);
}

void check_combine(std::int32_t world_size, bool bulk) {
  OneOfMany many(world_size, world_size / 2);
  DeviceBlocks& blocks = many.blocks();
  std::vector<float> rows(world_size * window_rows * row_floats);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 4099);
  const float* const window = blocks.upload(rows);
  auto addresses = random_addresses(world_size);
  addresses[0] = (std::int64_t{world_size - 1} << cuda::address_dst_shift) + window_rows;  // lost
  cuda::CombineParams params{};
  params.m.state =
      reinterpret_cast<MoeState*>(blocks.take<std::byte>(cuda::moe_state_bytes(world_size)));
  params.m.arrive = many.arrive(cuda::FaultKind::moe_combine, &params.m.state->call);
  params.shape = shape_of(config_of(world_size), false);
  params.shape.capacity_rows = window_rows;
  params.addresses = blocks.upload(addresses);
  params.windows =
      many.table_of_all(reinterpret_cast<const std::byte*>(window), window_rows * row_bytes);
  std::vector<float> lost(row_floats, std::numeric_limits<float>::quiet_NaN());
  params.lost_row = reinterpret_cast<const std::byte*>(blocks.upload(lost));
  params.in_call = true;
  params.row_bytes = row_bytes;
  float* const output = blocks.take<float>(max_tokens * row_floats);
  params.output = reinterpret_cast<std::byte*>(output);
  test::cuda_ok(cuda::prepare_combine(DType::float32, DType::float32, bulk));
  test::cuda_ok(
      cuda::launch_combine(params, DType::float32, DType::float32, bulk, 4, false, nullptr));
  ASSERT_TRUE(many.finish());
  const auto sums = DeviceBlocks::download(output, max_tokens * row_floats);
  for (std::int64_t t = 0; t < max_tokens; ++t) {
    for (std::int64_t h = 0; h < row_floats; ++h) {
      float sum = 0;
      for (std::int64_t k = 0; k < topk; ++k) {
        const std::int64_t address = addresses[t * topk + k];
        if (address >= 0) sum += rows[to_size(row_of(address) * row_floats + h) % rows.size()];
      }
      const float got = sums[t * row_floats + h];
      ASSERT_TRUE(t == 0 ? std::isnan(got) : got == sum) << t << ", " << h;
    }
  }
}

TEST(GpuManyRanks, are_summed) {
  for (const std::int32_t world : {128, 1024}) {
    check_combine(world, false);
    if (has_bulk_copies()) check_combine(world, true);
  }
}

void check_rows(std::int32_t world_size, bool bulk) {
  OneOfMany many(world_size, world_size / 2);
  DeviceBlocks& blocks = many.blocks();
  std::vector<float> tokens(max_tokens * row_floats);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<float>(i);
  const auto addresses = random_addresses(world_size);
  auto* const windows = blocks.take<std::byte>(world_size * window_rows * row_bytes);
  cuda::RowsParams params{};
  params.m.state =
      reinterpret_cast<MoeState*>(blocks.take<std::byte>(cuda::moe_state_bytes(world_size)));
  DeviceBlocks::write(&params.m.state->call.epoch, std::vector<std::uint64_t>{OneOfMany::epoch});
  params.m.arrive = many.arrive(cuda::FaultKind::moe_dispatch, &params.m.state->call);
  params.shape = shape_of(config_of(world_size), false);
  params.shape.rank = many.rank();
  params.shape.capacity_rows = window_rows;
  params.cuts = cuda::cut_rows(row_bytes, 0, bulk, 16);
  params.num_senders = 2;
  params.tokens = reinterpret_cast<const std::byte*>(blocks.upload(tokens));
  params.addresses = blocks.upload(addresses);
  params.windows = many.peers_of_all(windows, window_rows * row_bytes);
  params.own_window = windows + many.rank() * window_rows * row_bytes;
  // All other ranks have announced how they send, and send nothing.
  const std::int64_t channels = std::int64_t{world_size} * cuda::max_channels;
  params.own_channels = blocks.take<std::uint64_t>(channels + 2 * world_size);
  DeviceBlocks::write(
      params.own_channels + channels,
      std::vector<std::uint64_t>(world_size, cuda::channel_config(OneOfMany::epoch, 1, 4, false)));
  auto* const others = blocks.take<std::uint64_t>(channels + 2 * world_size);
  params.channels = many.peers(params.own_channels, others);
  params.records = blocks.take<std::int32_t>(world_size * max_tokens * topk);
  params.num_input_tokens = blocks.take<std::int32_t>(world_size);
  params.max_recv_rows = blocks.take<std::int32_t>(1);
  params.overflow = blocks.pinned<std::uint64_t>(1);
  params.fills_tables = true;  // they are empty, as no row arrives here
  test::cuda_ok(cuda::prepare_rows(bulk));
  test::cuda_ok(cuda::launch_rows(params, bulk, false, 4, nullptr));
  ASSERT_TRUE(many.finish());
  std::vector<float> expected(world_size * window_rows * row_floats);
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (addresses[i] < 0) continue;
    const auto token = static_cast<std::ptrdiff_t>(i / topk);
    std::copy_n(tokens.begin() + token * row_floats, row_floats,
                expected.begin() + row_of(addresses[i]) * row_floats);
  }
  const auto got = DeviceBlocks::download(reinterpret_cast<const float*>(windows),
                                          world_size * window_rows * row_floats);
  ASSERT_TRUE(got == expected);
  const auto configs = DeviceBlocks::download(others + channels, world_size);
  EXPECT_NE(configs[many.rank()], 0U);  // this rank has announced how it sends
}

TEST(GpuManyRanks, are_sent_rows) {
  for (const std::int32_t world : {128, 1024}) {
    check_rows(world, false);
    if (has_bulk_copies()) check_rows(world, true);
  }
}

/// Chunks of a plan in which rank 0 sends to all.
TEST(GpuManyRanks, have_chunks_in_the_order_of_the_host) {
  constexpr std::int32_t world_size = 200;
  std::vector<std::vector<std::int64_t>> shards(world_size, {5});
  shards[0].assign(300, 7);
  std::vector<std::int32_t> dst;
  for (std::int32_t s = 0; s < 300 + world_size - 1; ++s) dst.push_back(s * 7 % world_size);
  test::SequenceCase sample{"many ranks", compute_qkv_routing(test::plain_plan(
                                              world_size, shards, dst, KvLayout::per_rank))};
  sample.q = {DType::bfloat16, 512};
  const SequencePart part{&sample.routing.fwd_q, {sample.q}};
  CompileOptions options;
  options.chunks = false;
  SequencePlan plan = compile_dispatch({&part, 1}, Rank{0}, options);
  DeviceBlocks blocks;
  auto head = std::make_unique<cuda::PlanHead>();
  head->num_chunks = plan.num_chunks;
  head->num_wire_chunks = plan.num_wire_chunks;
  head->world_size = world_size;
  head->num_tensors = 1;
  head->sum_scale = 1;
  std::ranges::copy(plan.cuts, head->cuts);
  const cuda::ExpandParams params{.head = blocks.upload(std::vector<cuda::PlanHead>{*head}),
                                  .bucket_chunks = blocks.upload(plan.bucket_chunks),
                                  .segments = blocks.upload(plan.segments),
                                  .segment_addresses = blocks.upload(plan.segment_addresses),
                                  .chunks = blocks.take<RowChunk>(plan.num_chunks),
                                  .addresses = blocks.take<std::uint64_t>(plan.num_addresses),
                                  .chunk_batches = nullptr};
  test::cuda_ok(cuda::launch_expand_plan(params, std::ssize(plan.segments), nullptr));
  test::cuda_ok(cudaDeviceSynchronize());
  expand_chunks(plan);
  const auto chunks = DeviceBlocks::download(params.chunks, plan.num_chunks);
  ASSERT_EQ(std::memcmp(chunks.data(), plan.chunks.data(), chunks.size() * sizeof(RowChunk)), 0);
  const auto addresses = DeviceBlocks::download(params.addresses, plan.num_addresses);
  ASSERT_TRUE(std::ranges::equal(addresses, plan.addresses));
}

}  // namespace
}  // namespace waybill
