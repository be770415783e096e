#include <gtest/gtest.h>

#include <algorithm>

#include "schedule/check_sequence_plans.h"
#include "support/expect_error.h"
#include "support/node_case.h"
#include "waybill/planner/planner.h"

namespace waybill {
namespace {

using test::NodeCase;
using test::to_size;

std::vector<SequencePlan> plans_of(std::span<const SequencePart> parts, SequenceOperation operation,
                                   const CompileOptions& options) {
  std::vector<SequencePlan> plans;
  for (std::int32_t r = 0; r < parts.front().metadata->world_size; ++r) {
    plans.push_back(operation == SequenceOperation::dispatch
                        ? compile_dispatch(parts, Rank{r}, options)
                        : compile_kv_gradient(parts, Rank{r}, options));
  }
  return plans;
}

std::string first_of(const std::vector<std::string>& findings) {
  return findings.empty() ? "" : findings.front();
}

CompileOptions small_batches(const Topology& topology) {
  CompileOptions options{.plan = test::eager_options().plan};
  options.chunks = false;
  options.ranks_per_node = topology.ranks_per_node;
  return options;
}

TEST(BatchedPlans, the_checker_finds_nothing) {
  int num_batches = 0;
  int num_once = 0;
  int num_all_rows = 0;
  for (const Topology topology :
       {Topology{4, 2}, Topology{8, 4}, Topology{8, 2}, Topology{6, 6}, Topology{3, 1}}) {
    for (const auto& node : test::node_cases(topology, 24)) {
      const CompileOptions options = small_batches(topology);
      for (const auto operation : {SequenceOperation::dispatch, SequenceOperation::kv_gradient}) {
        const bool sends = operation == SequenceOperation::dispatch;
        const auto parts = sends ? node->forward() : node->kv();
        const auto plans = plans_of(parts, operation, options);
        ASSERT_EQ(first_of(test::check_sequence_plans(plans, parts, topology.ranks_per_node)), "")
            << node->sample.name << ", " << topology.world_size << " ranks";
        for (const SequencePlan& plan : plans) num_batches += static_cast<int>(plan.batches.size());
      }
      if (topology.num_nodes() > 1) ++(node->once ? num_once : num_all_rows);
    }
  }
  EXPECT_GT(num_batches, 1000);
  EXPECT_GT(num_once, 5);  // both ways back were there
  EXPECT_GT(num_all_rows, 5);
}

TEST(BatchedPlans, direct_plans_are_checked_too) {
  for (const test::SequenceCase& sample : test::sequence_cases(4, 12)) {
    const auto forward = test::forward_parts(sample);
    const auto kv = test::kv_parts(sample);
    EXPECT_EQ(first_of(test::check_sequence_plans(
                  plans_of(forward, SequenceOperation::dispatch, {}), forward)),
              "");
    EXPECT_EQ(
        first_of(test::check_sequence_plans(plans_of(kv, SequenceOperation::kv_gradient, {}), kv)),
        "");
  }
}

/// Damages every plan of a case with batches in one way; how many of the damages are not found.
template <class Damage>
int num_missed(SequenceOperation operation, Damage&& damage) {
  const Topology topology{4, 2};
  int missed = 0;
  int damaged = 0;
  for (const auto& node : test::node_cases(topology, 12)) {
    const auto parts = operation == SequenceOperation::dispatch ? node->forward() : node->kv();
    const auto good = plans_of(parts, operation, small_batches(topology));
    for (std::size_t r = 0; r < good.size(); ++r) {
      auto plans = good;
      if (!damage(plans[r])) continue;
      ++damaged;
      missed += test::check_sequence_plans(plans, parts, topology.ranks_per_node).empty() ? 1 : 0;
    }
  }
  EXPECT_GT(damaged, 5);
  return missed;
}

TEST(BatchedPlans, the_checker_finds_damage) {
  using enum SequenceOperation;
  for (const auto operation : {dispatch, kv_gradient}) {
    EXPECT_EQ(num_missed(operation,
                         [](SequencePlan& plan) {  // a wait less
                           const auto batch = std::ranges::find_if(
                               plan.batches, [](const auto& b) { return b.num_waits == 1; });
                           if (batch == plan.batches.end()) return false;
                           batch->num_waits = 0;
                           return true;
                         }),
              0);
    EXPECT_EQ(num_missed(operation,
                         [](SequencePlan& plan) {  // a signal less
                           if (plan.signals.empty()) return false;
                           plan.signals.back().slot += plan.world_size;
                           return true;
                         }),
              0);
    EXPECT_EQ(num_missed(operation,
                         [](SequencePlan& plan) {  // a row less
                           if (plan.segments.empty()) return false;
                           plan.segments.back().rows -= 1;
                           return true;
                         }),
              0);
    EXPECT_EQ(num_missed(operation,
                         [](SequencePlan& plan) {  // another row
                           if (plan.segments.empty()) return false;
                           plan.segments.front().row += 1;
                           return true;
                         }),
              0);
    EXPECT_EQ(num_missed(operation,
                         [](SequencePlan& plan) {  // another address
                           if (plan.segment_addresses.empty()) return false;
                           plan.segment_addresses.back() += 1;
                           return true;
                         }),
              0);
    EXPECT_EQ(num_missed(operation,
                         [](SequencePlan& plan) {  // wrong order
                           if (plan.batches.size() < 2 || plan.batches.back().num_waits == 0)
                             return false;
                           std::swap(plan.batches.front(), plan.batches.back());
                           return true;
                         }),
              0);
  }
}

/// One document on rank 0 whose end many ranks attend to.
AttentionPlan skewed_plan(std::int32_t world_size, std::int32_t ranks_per_node) {
  std::vector<std::int64_t> lengths{900};
  for (std::int32_t i = 0; i < world_size * 8; ++i) lengths.push_back(100 + 13 * i % 40);
  PlannerOptions options{.world_size = world_size, .tokens_per_rank = 0, .block_tokens = 16};
  options.hardware.ranks_per_node = ranks_per_node;
  return plan_attention(lengths, options);
}

TEST(BatchedPlans, the_planners_schedules_fit) {
  for (const Topology topology : {Topology{8, 8}, Topology{8, 4}, Topology{16, 8}}) {
    const AttentionPlan attention = skewed_plan(topology.world_size, topology.ranks_per_node);
    const QkvRouting routing = compute_qkv_routing(attention.plan);
    ASSERT_TRUE(std::ranges::any_of(attention.relay.hops,
                                    [](const RelayHop& hop) { return hop.after >= 0; }));
    const TensorFormat format{DType::bfloat16, 64};
    const std::vector<SequencePart> kv{{&routing.fwd_kv, {format, format}, &attention.relay}};
    for (const auto operation : {SequenceOperation::dispatch, SequenceOperation::kv_gradient}) {
      const auto plans = plans_of(kv, operation, small_batches(topology));
      EXPECT_EQ(plans[0].limits.way, TransferMode::relay);
      EXPECT_EQ(first_of(test::check_sequence_plans(plans, kv, topology.ranks_per_node)), "");
    }
  }
}

/// Rank 0 has a document that all attend to.
QkvRouting one_for_all(std::int32_t world_size) {
  std::vector<std::vector<std::int64_t>> shards(world_size);
  std::vector<std::int32_t> dst;
  for (std::int32_t r = 0; r < world_size; ++r) {
    shards[0].push_back(100);
    dst.push_back(r);
  }
  return compute_qkv_routing(test::plain_plan(world_size, shards, dst, KvLayout::per_rank));
}

/// A chain over all ranks.
RelaySchedule chain(const SparseMetadata& kv) {
  RelaySchedule relay;
  relay.links.resize(kv.world_size);
  for (std::int32_t entry = 0; entry < kv.num_entries(); ++entry) {
    std::int32_t last = 0;
    std::int32_t after = -1;
    for (auto c = kv.destination_begin(entry); c < kv.destination_end(entry); ++c) {
      const std::int32_t dst = kv.dst_rank[c];
      if (dst == 0) continue;
      relay.hops.push_back({last, dst, entry, 0, 0, kv.seq_len[entry], after});
      after = static_cast<std::int32_t>(relay.hops.size()) - 1;
      last = dst;
    }
  }
  return relay;
}

TEST(BatchedPlans, limits_decide_and_can_be_overridden) {
  const QkvRouting routing = one_for_all(8);
  const RelaySchedule relay = chain(routing.fwd_kv);
  const TensorFormat format{DType::bfloat16, 1000};
  const std::vector<SequencePart> kv{{&routing.fwd_kv, {format}, &relay}};
  CompileOptions options{.plan = {.nvlink_bytes_per_second = 1e9}};
  // Rows of shard s go to ranks s..7: 1 + 2 + ... + 6 + 7 + 7 times 100 rows of 2000 bytes.
  const SequencePlan plan = compile_dispatch(kv, Rank{0}, options);
  EXPECT_EQ(plan.limits.way, TransferMode::relay);
  EXPECT_NEAR(plan.limits.direct_seconds, 35 * 100 * 2000 / 1e9, 1e-9);
  EXPECT_NEAR(plan.limits.relay_seconds, 8 * 100 * 2000 / 1e9, 1e-9);
  EXPECT_FALSE(plan.batches.empty());
  options.plan.relay = RelayUse::never;
  EXPECT_TRUE(compile_dispatch(kv, Rank{0}, options).batches.empty());
  // Sums in float32 are twice as wide, but for the ends of chains.
  options.plan.relay = RelayUse::automatic;
  const SequencePlan back = compile_kv_gradient(kv, Rank{0}, options);
  EXPECT_GT(back.limits.relay_seconds, 1.5 * plan.limits.relay_seconds);
  EXPECT_EQ(back.limits.way, TransferMode::direct);  // on one node only when asked for
  options.plan.relay = RelayUse::always;
  EXPECT_EQ(compile_kv_gradient(kv, Rank{0}, options).limits.way, TransferMode::relay);
  options.plan.relay = RelayUse::automatic;

  // A schedule that wins little is not taken, unless it must be.
  RelaySchedule straight;
  straight.links.resize(8);
  for (std::int32_t entry = 0; entry < routing.fwd_kv.num_entries(); ++entry) {
    for (auto c = routing.fwd_kv.destination_begin(entry);
         c < routing.fwd_kv.destination_end(entry); ++c) {
      if (routing.fwd_kv.dst_rank[c] != 0)
        straight.hops.push_back({0, routing.fwd_kv.dst_rank[c], entry, 0, 0, 100, -1});
    }
  }
  const std::vector<SequencePart> same{{&routing.fwd_kv, {format}, &straight}};
  EXPECT_EQ(compile_dispatch(same, Rank{0}, options).limits.way, TransferMode::direct);
  options.plan.relay = RelayUse::always;
  EXPECT_EQ(compile_dispatch(same, Rank{0}, options).limits.way, TransferMode::relay);
}

TEST(BatchedPlans, room_makes_batches_also_where_nobody_forwards) {
  const QkvRouting routing = one_for_all(4);
  const RelaySchedule relay = chain(routing.fwd_kv);
  const TensorFormat format{DType::bfloat16, 8};
  const CompileOptions options;
  for (const RelaySchedule* hops : {static_cast<const RelaySchedule*>(nullptr), &relay}) {
    const std::vector<SequencePart> kv{{&routing.fwd_kv, {format}, hops, 0, 100}};
    for (const auto operation : {SequenceOperation::dispatch, SequenceOperation::kv_gradient}) {
      const auto plans = plans_of(kv, operation, options);
      EXPECT_EQ(first_of(test::check_sequence_plans(plans, kv, 4)), "");
      EXPECT_FALSE(plans[0].batches.empty());
      EXPECT_EQ(plans[0].min_batches, 100);
      EXPECT_EQ(plans[0].num_slots, 100);
    }
  }
  const auto fingerprint = [&](std::int32_t room) {
    const std::vector<SequencePart> kv{{&routing.fwd_kv, {format}, nullptr, 0, room}};
    return compile_dispatch(kv, Rank{0}, options).fingerprint;
  };
  EXPECT_NE(fingerprint(0), fingerprint(1));
  EXPECT_NE(fingerprint(1), fingerprint(2));
  EXPECT_THROW((void)fingerprint(-1), InvalidArgument);
  EXPECT_THROW((void)fingerprint((1 << 20) + 1), InvalidArgument);
}

TEST(BatchedPlans, rows_cross_between_nodes_once) {
  const QkvRouting routing = one_for_all(8);
  const TensorFormat format{DType::bfloat16, 1000};
  const std::vector<SequencePart> kv{{&routing.fwd_kv, {format}}};
  CompileOptions options{.plan = {.network_bytes_per_second = 1e9}, .ranks_per_node = 4};
  const auto plans = plans_of(kv, SequenceOperation::dispatch, options);
  // Shards 0..4 go to ranks 4..7, shards 5..7 to fewer; each once, to rank 4 but for the last.
  EXPECT_EQ(plans[0].limits.way, TransferMode::once_per_node);
  EXPECT_NEAR(plans[0].limits.once_per_node_seconds, 8 * 100 * 2000 / 1e9, 1e-9);
  EXPECT_NEAR(plans[0].limits.direct_seconds, (5 * 4 + 3 + 2 + 1) * 100 * 2000 / 1e9, 1e-9);
  EXPECT_EQ(plans[0].wire_bytes[4], 7 * 100 * 2000);
  EXPECT_EQ(plans[0].wire_bytes[5] + plans[0].wire_bytes[6], 0);
  EXPECT_EQ(plans[0].wire_bytes[7], 100 * 2000);  // of which it alone needs the rows
  EXPECT_EQ(plans[4].wire_bytes[7], 7 * 100 * 2000);
}

TEST(BatchedPlans, refuses_schedules_that_do_not_fit) {
  const QkvRouting routing = one_for_all(4);
  const RelaySchedule good = chain(routing.fwd_kv);
  const auto rejected = [&](auto&& damage, std::string_view text) {
    RelaySchedule relay = good;
    damage(relay.hops);
    const std::vector<SequencePart> kv{{&routing.fwd_kv, {{DType::float32, 4}}, &relay}};
    EXPECT_TRUE(test::rejects([&] { (void)compile_dispatch(kv, Rank{0}); }, {text})) << text;
  };
  rejected([](auto& hops) { hops[0].shard = 99; }, "a shard that there is");
  rejected([](auto& hops) { hops[0].src_rank = 7; }, "two ranks of the world");
  rejected([](auto& hops) { hops[1].dst_rank = 0; }, "not the rows' home");
  rejected([](auto& hops) { hops[0].num_rows = 101; }, "rows of the shard");
  rejected([](auto& hops) { hops[0].src_rank = 2; }, "a sender that is the rows' home");
  rejected([](auto& hops) { hops[1].after = 1; }, "an earlier hop");
  rejected([](auto& hops) { hops[1].src_rank = 1; }, "a hop in `after`");
  rejected([](auto& hops) { hops[2].num_rows = 50; },
           "bring 250 rows to ranks that need them, expected 300");
  rejected(
      [](auto& hops) {
        hops.push_back({0, 1, 3, 0, 0, 100, -1});
      },
      "neither needs nor forwards");
  CompileOptions options{.ranks_per_node = 3};
  const std::vector<SequencePart> kv{{&routing.fwd_kv, {{DType::float32, 4}}}};
  EXPECT_TRUE(test::rejects([&] { (void)compile_dispatch(kv, Rank{0}, options); },
                            {"ranks_per_node = 3, expected 0 or a divisor of world_size = 4"}));
  options = {.plan = {.batch_bytes = -1}};
  EXPECT_TRUE(
      test::rejects([&] { (void)compile_dispatch(kv, Rank{0}, options); }, {"batch_bytes = -1"}));
}

}  // namespace
}  // namespace waybill
