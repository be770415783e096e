#include <gtest/gtest.h>

#include <cstdint>

#include "support/expect_error.h"
#include "support/random_plan.h"
#include "support/seeded.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

using test::Dice;
using test::for_seeds;
using test::rejects;

/// Documents of many shards on many ranks, large enough that work is split.
QkvPlan large_plan(KvLayout layout, bool windows) {
  return test::random_plan(77, {.world_size = 300,
                                .max_shards_per_rank = 60,
                                .max_document_shards = 25,
                                .windows = windows,
                                .kv_layout = layout,
                                .edge_share = 0});
}

TEST(QkvRoutingThreads, AnyNumberGivesTheSame) {
  for (const KvLayout layout : {KvLayout::per_rank, KvLayout::per_query}) {
    for (const bool windows : {false, true}) {
      const QkvPlan plan = large_plan(layout, windows);
      const QkvRouting one = compute_qkv_routing(plan, 1);
      for (int threads = 0; threads <= 8; ++threads) {
        EXPECT_EQ(compute_qkv_routing(plan, threads), one) << threads;
      }
    }
  }
}

TEST(QkvRoutingThreadsProperty, AnyNumberGivesTheSame) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const bool windows = dice.coin();
    const QkvPlan plan =
        test::random_plan(seed, {.world_size = dice.in_range(1, 65), .windows = windows});
    const QkvRouting one = compute_qkv_routing(plan, 1);
    for (const int threads : {2, 3, 8}) EXPECT_EQ(compute_qkv_routing(plan, threads), one);
  });
}

// Whatever plan the memory served before, larger or smaller, causal or not.
TEST(QkvRoutingReuse, UsedMemoryGivesTheSame) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    QkvRouter router;
    for (std::uint64_t step = 0; step < 4; ++step) {
      const QkvPlan plan = test::random_plan(
          seed + step, {.world_size = dice.in_range(1, 30),
                        .windows = dice.coin(),
                        .kv_layout = dice.one_of({KvLayout::per_rank, KvLayout::per_query})});
      EXPECT_EQ(router.compute(plan, dice.in_range(1, 4)), compute_qkv_routing(plan));
    }
  });
}

TEST(QkvRoutingReuse, AnErrorLeavesTheResultAsItWas) {
  QkvPlan plan = test::random_plan(3, {.edge_share = 0});
  QkvRouter router;
  const QkvRouting& routing = router.compute(plan);
  const QkvRouting before = routing;
  plan.q_dst[0] = -1;
  EXPECT_TRUE(
      rejects([&] { router.compute(plan); }, {"compute_qkv_routing", "q_dst: rank 0, shard 0"}));
  EXPECT_EQ(routing, before);
  EXPECT_EQ(router.take(), before);
}

TEST(QkvRoutingMemory, CountsAreOnlyPairsThatExchangeRows) {
  const QkvPlan plan = large_plan(KvLayout::per_rank, false);
  const QkvRouting got = compute_qkv_routing(plan);
  for (const SparseMetadata* table : {&got.fwd_q, &got.rev_q, &got.fwd_kv, &got.rev_kv}) {
    EXPECT_LE(std::ssize(table->recv.tokens), table->num_destinations());
    EXPECT_LE(table->recv.tokens.capacity(),
              2 * static_cast<std::size_t>(table->num_destinations()) + 64);
  }
  // A world in which only one rank has anything: W entries, not W x W.
  QkvPlan wide;
  wide.world_size = max_world_size;
  wide.rank_shard_offsets.assign(static_cast<std::size_t>(max_world_size) + 1, 1);
  wide.rank_shard_offsets[0] = 0;
  wide.shard_len = {5};
  wide.q_dst = {max_world_size - 1};
  wide.doc_shard_offsets = {0, 1};
  wide.doc_shards = {0};
  const QkvRouting sparse = compute_qkv_routing(wide);
  EXPECT_EQ(sparse.fwd_q.recv.tokens, std::vector<std::int64_t>{5});
  EXPECT_EQ(sparse.fwd_kv.recv.src_rank, std::vector<std::int32_t>{0});
  EXPECT_EQ(sparse.fwd_kv.recv.total.back(), 5);
}

TEST(ToDenseReverse, NeedsOneWorld) {
  const QkvRouting two =
      compute_qkv_routing(test::random_plan(3, {.world_size = 2, .edge_share = 0}));
  const QkvRouting three =
      compute_qkv_routing(test::random_plan(3, {.world_size = 3, .edge_share = 0}));
  EXPECT_TRUE(rejects([&] { (void)to_dense_reverse(three.rev_kv, two.fwd_kv); },
                      {"to_dense_reverse", "world_size", "3", "2"}));
}

}  // namespace
}  // namespace waybill
