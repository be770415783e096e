#include "routing/kv_groups.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace waybill::detail {
namespace {

/// One document on rank 0 in shards of 10 tokens; query p needs the shards kv_begin[p]..p.
KvGroups groups_of(std::vector<std::int32_t> q_dst, std::vector<std::int32_t> kv_begin) {
  const std::int64_t num_shards = std::ssize(q_dst);
  QkvPlan plan;
  plan.world_size = 2;
  plan.rank_shard_offsets = {0, num_shards, num_shards};
  plan.shard_len.assign(q_dst.size(), 10);
  plan.q_dst = std::move(q_dst);
  plan.doc_shard_offsets = {0, num_shards};
  plan.kv_begin = std::move(kv_begin);
  for (std::int32_t s = 0; s < num_shards; ++s) plan.doc_shards.push_back(s);
  plan.check("groups_of");
  KvGroups groups;
  form_kv_groups(plan, groups);
  return groups;
}

/// (rank, first, last) of each group.
std::vector<std::vector<std::int32_t>> extents(const KvGroups& groups) {
  std::vector<std::vector<std::int32_t>> list;
  for (const KvGroup& group : groups.groups) list.push_back({group.rank, group.first, group.last});
  return list;
}

using Extents = std::vector<std::vector<std::int32_t>>;

// The tables are the same for two groups that touch; writing them takes longer.
TEST(KvGroups, WindowsThatTouchAreOneGroup) {
  const KvGroups alone = groups_of({0, 0, 0, 0}, {0, 1, 2, 3});  // each query needs its own shard
  EXPECT_EQ(extents(alone), (Extents{{0, 0, 3}}));
  EXPECT_EQ(alone.runs.size(), 1U);
  EXPECT_EQ(alone.groups[0].rows, 40);
}

TEST(KvGroups, WindowsThatOverlapAreOneGroup) {
  EXPECT_EQ(extents(groups_of({0, 1, 0, 1}, {0, 0, 1, 1})), (Extents{{1, 0, 3}, {0, 0, 2}}));
}

TEST(KvGroups, WindowsApartAreTwoGroupsInTheOrderOfTheDocument) {
  // Rank 0 attends to queries 0 and 3, and does not need shard 1.
  const KvGroups apart = groups_of({0, 1, 1, 0}, {0, 1, 1, 2});
  EXPECT_EQ(extents(apart), (Extents{{0, 0, 0}, {0, 2, 3}, {1, 1, 2}}));
  EXPECT_EQ(apart.query_group[0], 0);
  EXPECT_EQ(apart.query_group[3], 1);
  EXPECT_EQ(apart.groups[1].to_row, 10 - 20);  // after the ten rows of the first group
}

}  // namespace
}  // namespace waybill::detail
