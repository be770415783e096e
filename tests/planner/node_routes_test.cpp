#include "planner/node_routes.h"

#include <gtest/gtest.h>

#include <map>

#include "planner_cases.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

/// Rank 0 has a shard of ten rows for each rank; that of rank s goes to ranks s and above.
QkvRouting staircase(std::int32_t world_size) {
  QkvPlan plan;
  plan.world_size = world_size;
  plan.rank_shard_offsets.assign(static_cast<std::size_t>(world_size) + 1, world_size);
  plan.rank_shard_offsets[0] = 0;
  for (std::int32_t s = 0; s < world_size; ++s) {
    plan.shard_len.push_back(10);
    plan.q_dst.push_back(s);
    plan.doc_shards.push_back(s);
  }
  plan.doc_shard_offsets = {0, world_size};
  return compute_qkv_routing(plan);
}

TEST(NodeRoutes, ToTheHomesLocalIndexOnce) {
  const QkvRouting routing = staircase(6);
  const RelaySchedule routes = route_over_nodes(routing.fwd_kv, {6, 3}, 2);
  std::map<std::int32_t, std::int64_t> rows_of_entry;
  for (const RelayHop& hop : routes.hops) {
    if (hop.src_rank < 3 && hop.dst_rank >= 3) rows_of_entry[hop.dst_rank] += hop.num_rows;
    if (hop.src_rank >= 3) {
      EXPECT_EQ(hop.src_rank, 3);
      ASSERT_GE(hop.after, 0);
      EXPECT_EQ(routes.hops[static_cast<std::size_t>(hop.after)].dst_rank, 3);
    }
  }
  // Shards 0 to 4 go to several of 3, 4, 5, by way of 3; shard 5 to rank 5 alone.
  EXPECT_EQ(rows_of_entry, (std::map<std::int32_t, std::int64_t>{{3, 50}, {5, 10}}));
  EXPECT_EQ(routes.links[0].network_out, 60 * 2);
  EXPECT_EQ(routes.links[0].nvlink_out, (20 + 30) * 2);  // to ranks 1 and 2
  EXPECT_EQ(routes.links[3].network_in, 50 * 2);
  EXPECT_EQ(routes.links[3].nvlink_out, (50 + 50) * 2);  // to ranks 4 and 5
  const RelaySchedule straight = route_over_nodes(routing.fwd_kv, {6, 3}, 2, false);
  const std::vector<LinkBytes>& direct = straight.links;
  EXPECT_EQ(direct[0].network_out, (40 + 50 + 60) * 2);
  EXPECT_EQ(direct[0].nvlink_out, routes.links[0].nvlink_out);
  EXPECT_EQ(limit_seconds(direct, 1e9, 1), 300);
  EXPECT_EQ(limit_seconds(routes.links, 1e9, 1), 120);
  EXPECT_EQ(straight.num_stages, 1);
}

TEST(NodeRoutes, LimitsOfPlansFallWithTheCopiesInANode) {
  int num_lower = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    Random random(seed);
    PlannerOptions options = test::random_options(random, seed % 3 == 0);
    options.world_size = 16;
    options.hardware.ranks_per_node = 4;
    options.hardware.nvlink_bytes_per_second = 1e18;  // the network decides
    const AttentionPlan plan = plan_attention(test::random_flat(random, options), options);
    const double once = plan.limit_seconds(TransferMode::once_per_node);
    std::int64_t direct_bytes = 0;
    std::int64_t once_bytes = 0;
    for (const LinkBytes& link : plan.links) direct_bytes += link.network_out;
    for (const LinkBytes& link : plan.links_of(TransferMode::once_per_node))
      once_bytes += link.network_out;
    EXPECT_LE(once_bytes, direct_bytes) << "seed " << seed;
    num_lower += once < plan.limit_seconds(TransferMode::direct) ? 1 : 0;
  }
  EXPECT_GT(num_lower, 5);
}

TEST(NodeRoutes, OneNodeChangesNothing) {
  const QkvRouting routing = staircase(4);
  EXPECT_TRUE(route_over_nodes(routing.fwd_kv, {4, 4}, 8).hops.empty());
  EXPECT_EQ(route_over_nodes(routing.fwd_kv, {4, 4}, 8).links,
            route_over_nodes(routing.fwd_kv, {4, 4}, 8, false).links);
  EXPECT_THROW((void)route_over_nodes(routing.fwd_kv, {8, 4}, 8), InvalidArgument);
}

}  // namespace
}  // namespace waybill
