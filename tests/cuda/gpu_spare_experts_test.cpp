// Copies of experts on GPUs: slots in place of experts, for one rank of many; layers against the
// simulation.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "core/to_size.h"
#include "cuda/experts/kernels.h"
#include "cuda/experts/spare/spare.h"
#include "cuda/gpu_expert_rounds.h"
#include "cuda/one_of_many.h"
#include "cuda/planner/even_experts.h"
#include "support/even_experts_cases.h"
#include "waybill/core/random.h"
#include "waybill/experts/ep_all2all_layer.h"
#include "waybill/planner/expert_balance.h"

namespace waybill {
namespace {

using cuda::MoeShape;
using cuda::MoeState;
using detail::to_size;
using test::DeviceBlocks;
using test::OneOfMany;
using Ints = std::vector<std::int32_t>;

/// One rank's part in planning a microbatch.
struct SlotsCase {
  std::int32_t world_size, rank, num_experts, topk, num_tokens;
  const char* family;  ///< of loads, see weights_of
  EvenExpertsOptions options = {.spare_experts = 2};
  int blocks = 1;
  bool wide_ids = false;
  std::int32_t dropped_id = -1;
  /// Several nodes of so many ranks, which have sent each other ids; 0: one node.
  std::int32_t ranks_per_node = 0;

  [[nodiscard]] bool has_nodes() const { return ranks_per_node > 0; }
  [[nodiscard]] std::int32_t num_nodes() const {
    return has_nodes() ? world_size / ranks_per_node : 1;
  }
  /// Whether this rank places the tokens of a rank.
  [[nodiscard]] bool forwards(std::int32_t r) const {
    return has_nodes() ? r % ranks_per_node == rank % ranks_per_node : r == rank;
  }
  [[nodiscard]] std::int32_t tokens_of(std::int32_t r) const {
    const std::int32_t of_other = r % 5 * 9;
    if (r == rank) return num_tokens;
    return has_nodes() ? std::min(of_other, num_tokens) : of_other;
  }
};

/// Experts of T tokens: random by the weights, every ninth topk slot dropped.
Ints draw_ids(const SlotsCase& one, const std::vector<double>& weights, std::int32_t num_tokens,
              Random& random) {
  std::vector<double> upto;
  for (const double weight : weights) upto.push_back((upto.empty() ? 0 : upto.back()) + weight);
  Ints ids;
  for (std::int32_t i = 0; i < num_tokens * one.topk; ++i) {
    const double drawn = random.uniform_float() * upto.back();
    const auto expert = std::ranges::lower_bound(upto, drawn) - upto.begin();
    ids.push_back(i % 9 == 5 ? one.dropped_id : static_cast<std::int32_t>(expert));
  }
  return ids;
}

/// Runs the kernels of one rank, to which the others have sent their counts.
class Slots {
 public:
  explicit Slots(const SlotsCase& one)
      : one_(one),
        many_(one.world_size, one.rank),
        node_(one.world_size / one.num_nodes(), one.rank % (one.world_size / one.num_nodes())) {
    Random random(static_cast<std::uint64_t>(one.world_size * 31 + one.num_tokens));
    const std::int32_t homes = one.num_experts / one.world_size;
    const auto weights = test::weights_of(one.family, one.num_experts, homes, random);
    for (std::int32_t r = 0; r < one.world_size; ++r) {
      const Ints ids = draw_ids(one, weights, one.tokens_of(r), random);
      if (one.forwards(r)) take_ids(ids);
      std::vector<std::int64_t> counts(one.num_experts);
      for (const std::int32_t id : ids) {
        if (0 <= id && id < one.num_experts) ++counts[id];
      }
      rows_.insert(rows_.end(), counts.begin(), counts.end());
    }
    plan_ = even_experts(rows_, one.world_size, one.num_experts, one.options);
    fill();
  }

  void run() {
    cuda::GpuEvenExperts planner(one_.world_size, one_.num_experts, one_.options, nullptr);
    params_.slots = planner.tables().slots;
    params_.quotas = planner.tables().quotas;
    params_.local_rows = planner.tables().local_rows;
    params_.first_row = planner.tables().first_row;
    test::cuda_ok(cuda::prepare_spare());
    ASSERT_TRUE(cuda::spare_kernels_fit(params_.experts.shape, num_slots()));
    test::cuda_ok(cuda::launch_count_experts(params_, one_.blocks, nullptr));
    planner.plan(params_.rows, nullptr);
    test::cuda_ok(cuda::launch_slot_ids(params_, one_.blocks, nullptr));
    ASSERT_TRUE(many_.finish());
  }

  void check() const {
    const auto same = [](const Ints& got, const auto& expected) {
      return std::ranges::equal(got, expected);
    };
    EXPECT_TRUE(same(DeviceBlocks::download(params_.rows, std::ssize(rows_)), rows_));
    EXPECT_TRUE(same(DeviceBlocks::download(params_.slot_experts, num_slots()), plan_.slots));
    EXPECT_TRUE(same(DeviceBlocks::download(params_.slot_quotas, num_slots()), plan_.quotas));
    EXPECT_EQ(DeviceBlocks::download(params_.slot_ids, std::ssize(ids_)), expected_ids());
    // The route of the same call begins as if nothing had run.
    const auto state = DeviceBlocks::download(params_.experts.m.state, 1)[0];
    EXPECT_EQ(state.arrived_blocks, 0U);
    EXPECT_EQ(state.call.blocks, 0U);
    EXPECT_EQ(state.call.epoch, 0U);
  }

 private:
  /// Nodes send each other a whole slice, with -1 where there is no token.
  void take_ids(const Ints& ids) {
    for (const std::int32_t id : ids)
      ids_.push_back(one_.has_nodes() && id == one_.dropped_id ? one_.num_experts : id);
    if (one_.has_nodes()) ids_.resize(++num_slices_ * to_size(one_.num_tokens * one_.topk), -1);
  }

  [[nodiscard]] Ints expected_ids() const {
    Ints expected;
    for (std::int32_t r = 0; r < one_.world_size; ++r) {
      if (!one_.forwards(r)) continue;
      const auto first = ids_.begin() + std::ssize(expected);
      const Ints ids(first, first + std::int64_t{one_.tokens_of(r)} * one_.topk);
      const std::size_t end = expected.size() + to_size(one_.num_tokens * one_.topk);
      for (const std::int32_t id : slot_ids(plan_, rows_, ids, r))
        expected.push_back(id < 0 ? num_slots() : id);
      expected.resize(end, -1);
    }
    return expected;
  }

  [[nodiscard]] std::int32_t num_slots() const {
    return one_.world_size * (one_.num_experts / one_.world_size + one_.options.spare_experts);
  }

  [[nodiscard]] MoeShape shape() const {
    MoeShape shape{};
    shape.rank = one_.rank;
    shape.world_size = one_.world_size;
    shape.num_experts = one_.num_experts;
    shape.experts_per_rank = one_.num_experts / one_.world_size;
    shape.topk = one_.topk;
    shape.num_tokens = one_.num_tokens;
    shape.max_tokens = one_.num_tokens;
    shape.alignment = 1;
    shape.num_nodes = one_.num_nodes();
    shape.node_ranks = one_.world_size / shape.num_nodes;
    shape.first_rank = one_.rank / shape.node_ranks * shape.node_ranks;
    return shape;
  }

  void fill() {
    DeviceBlocks& blocks = many_.blocks();
    cuda::RouteParams& of = params_.experts;
    of.m.state =
        reinterpret_cast<MoeState*>(blocks.take<std::byte>(cuda::moe_state_bytes(one_.world_size)));
    of.m.arrive = many_.arrive(cuda::FaultKind::moe_dispatch, &of.m.state->call);
    of.shape = shape();
    of.ids = one_.wide_ids ? static_cast<const void*>(
                                 blocks.upload(std::vector<std::int64_t>(ids_.begin(), ids_.end())))
                           : static_cast<const void*>(blocks.upload(ids_));
    of.wide_ids = one_.wide_ids;
    of.dropped_id = one_.dropped_id;
    of.max_per_expert = std::numeric_limits<std::int32_t>::max();
    const std::int64_t n = cuda::num_counts(of.shape);
    std::vector<std::uint64_t> words(one_.world_size * n);
    for (std::int32_t r = 0; r < one_.world_size; ++r) {
      for (std::int32_t e = 0; e < one_.num_experts && !one_.forwards(r); ++e) {
        words[r * n + e] = OneOfMany::epoch << cuda::count_epoch_shift |
                           to_size(rows_[std::int64_t{r} * one_.num_experts + e]);
      }
    }
    of.own_counts = blocks.upload(words);
    auto* const others = blocks.take<std::uint64_t>(std::ssize(words));
    of.peers = node_.peers(reinterpret_cast<std::byte*>(of.own_counts),
                           reinterpret_cast<std::byte*>(others));
    of.tile_counts = blocks.take<std::int32_t>(one_.blocks * one_.num_nodes() * n);
    params_.rows = blocks.take<std::int32_t>(std::ssize(rows_));
    params_.slots_per_rank = num_slots() / one_.world_size;
    params_.slot_ids = one_.has_nodes() ? static_cast<std::int32_t*>(const_cast<void*>(of.ids))
                                        : blocks.take<std::int32_t>(std::ssize(ids_));
    params_.slot_experts = blocks.take<std::int32_t>(num_slots());
    params_.slot_quotas = blocks.take<std::int32_t>(num_slots());
  }

  SlotsCase one_;
  OneOfMany many_;
  OneOfMany node_;  ///< its ranks, which get the counts
  Ints ids_;        ///< of all sources whose tokens this rank places
  std::size_t num_slices_ = 0;
  std::vector<std::int64_t> rows_;
  EvenExperts plan_;
  cuda::SpareParams params_{};
};

void expect_slots(const SlotsCase& one) {
  SCOPED_TRACE(::testing::Message() << one.family << ", rank " << one.rank << " of "
                                    << one.world_size << ", " << one.num_tokens << " tokens");
  Slots slots(one);
  slots.run();
  slots.check();
}

TEST(GpuSpareExperts, SlotsAreThoseOfTheHost) {
  for (const char* family : {"flat", "lognormal", "skewed", "zipf", "hot rank", "few"}) {
    expect_slots({8, 3, 64, 8, 300, family, {.spare_experts = 2}, 4});
    expect_slots({8, 0, 64, 8, 128, family, {.spare_experts = 1}, 1, true});
    expect_slots({64, 63, 256, 8, 500, family, {.spare_experts = 2}, 8});
    expect_slots({128, 77, 256, 4, 700, family, {.spare_experts = 2, .limit = 1.02}, 3});
    expect_slots({16, 9, 48, 3, 100, family, {.spare_experts = 3, .min_rows = 16}, 2});
    if (testing::Test::HasFailure()) return;
  }
}

TEST(GpuSpareExperts, EdgesOfRanksAndTokens) {
  expect_slots({1, 0, 4, 2, 50, "zipf"});
  expect_slots({2, 1, 2, 1, 40, "few", {.spare_experts = 1}});
  expect_slots({8, 5, 64, 8, 0, "zipf"});
  expect_slots({8, 5, 64, 8, 1, "zipf"});
  expect_slots({8, 5, 64, 32, 70, "zipf", {.spare_experts = 8}, 5});
  expect_slots({8, 2, 64, 8, 200, "zipf", {.spare_experts = 0}, 2});
  SlotsCase dropped{8, 5, 64, 8, 90, "zipf"};
  dropped.dropped_id = 64;
  expect_slots(dropped);
}

SlotsCase on_nodes(SlotsCase one, std::int32_t ranks_per_node) {
  one.ranks_per_node = ranks_per_node;
  one.options.num_nodes = one.num_nodes();
  return one;
}

/// Ids of all nodes, which slots replace where they lie.
TEST(GpuSpareExperts, SlotsOfTokensThatAreForwarded) {
  for (const char* family : {"lognormal", "zipf", "hot rank", "few"}) {
    expect_slots(on_nodes({8, 5, 64, 8, 300, family, {.spare_experts = 2}, 4}, 2));
    expect_slots(on_nodes({6, 1, 12, 3, 100, family, {.spare_experts = 1}, 1}, 1));
    expect_slots(
        on_nodes({64, 63, 256, 8, 200, family, {.spare_experts = 2, .limit = 1.02}, 3}, 8));
    expect_slots(on_nodes({8, 0, 64, 8, 70, family, {.spare_experts = 2}, 1}, 4));
    expect_slots(on_nodes({8, 6, 64, 8, 0, family, {.spare_experts = 1}, 2}, 4));
    if (testing::Test::HasFailure()) return;
  }
}

/// As many warps as have space for their counts, at last one.
TEST(GpuSpareExperts, ManyExperts) {
  expect_slots({2, 1, 2048, 8, 300, "zipf", {.spare_experts = 2}, 3});
  MoeShape shape{};
  shape.world_size = shape.node_ranks = 2;
  shape.num_experts = 2048;
  EXPECT_TRUE(cuda::spare_kernels_fit(shape, 2052));
  shape.num_experts = 8192;
  EXPECT_FALSE(cuda::spare_kernels_fit(shape, 8196));
}

using test::check_random;
using test::config_of;
using test::spare_options;

TEST(GpuSpareExperts, LayersAreThoseOfTheSimulation) {
  check_random(config_of(1, 4, 2, 40, 64), spare_options(1), 6, 41);
  check_random(config_of(2, 8, 4, 150, 128), spare_options(2), 10, 42);
  check_random(config_of(8, 64, 8, 60, 256, DType::bfloat16, DType::bfloat16), spare_options(2), 6,
               43, {4, 1});
  EPDispatchOptions options = spare_options(3);
  options.limit = 1.05;
  options.min_rows = 4;
  options.expert_alignment = 8;
  check_random(config_of(4, 16, 3, 190, 64), options, 10, 44, {4, 1, 8, 2});
}

/// Up to 128 tokens of a rank are sent before their places are known: to the ranks of their slots.
TEST(GpuSpareExperts, SomeRanksHaveFewTokens) {
  check_random(config_of(4, 16, 8, 180, 256), spare_options(2), 10, 45, {8, 2});
}

TEST(GpuSpareExperts, RowsAndPayloadsOfAllKinds) {
  EPDispatchOptions options = spare_options(2);
  options.rows = EPRows::compact;
  check_random(config_of(2, 12, 4, 90, 64), options, 8, 46, {4});
  options.expert_alignment = 4;
  check_random(config_of(4, 16, 4, 150, 40), options, 6, 47, {4});
  options = spare_options(2);
  options.payload = EPPayload::quantized;
  check_random(config_of(2, 12, 4, 60, 512), options, 6, 48, {4});
}

TEST(GpuSpareExperts, CopiesThatAreThereAreUsedAgain) {
  const EPConfig config = config_of(4, 24, 4, 140, 64);
  const auto rounds = test::copy_rounds(config, spare_options(2), 49);
  run_gpu_thread_world(
      config.world_size,
      [&](World& world) { test::run_copy_rounds(world, config, spare_options(2), rounds); },
      test::world_options());
}

TEST(GpuSpareExperts, LayersOnNodesWhoseMemoryIsMapped) {
  check_random(test::on_nodes(config_of(2, 8, 4, 60, 64), 1), spare_options(1), 4, 51);
  EPDispatchOptions options = spare_options(2);
  options.rows = EPRows::compact;
  check_random(test::on_nodes(config_of(8, 32, 4, 150, 64), 4), options, 4, 52, {4});
}

}  // namespace
}  // namespace waybill
