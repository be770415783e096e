#include <gtest/gtest.h>

#include <map>
#include <set>

#include "planner_cases.h"
#include "waybill/planner/planner.h"

namespace waybill {
namespace {

using test::Lengths;

/// Carries hops out row by row: which ranks have which row of a document. Nothing is shared with
/// the library's own check.
class RowWorld {
 public:
  explicit RowWorld(const QkvPlan& plan) : plan_(plan), have_(plan.shard_len.size()) {
    for (std::int32_t r = 0; r < plan.world_size; ++r) {
      for (auto n = plan.rank_shard_offsets[static_cast<std::size_t>(r)];
           n < plan.rank_shard_offsets[static_cast<std::size_t>(r) + 1]; ++n) {
        auto& rows = have_[static_cast<std::size_t>(n)];
        rows.resize(static_cast<std::size_t>(plan.shard_len[static_cast<std::size_t>(n)]));
        for (auto& ranks : rows) ranks.insert(r);
        home_.push_back(r);
      }
    }
  }

  /// What is wrong with the hop; empty: nothing.
  std::string carry_out(const RelayHop& hop) {
    auto& rows = have_.at(static_cast<std::size_t>(hop.shard));
    for (std::int64_t row = hop.row_begin; row < hop.row_begin + hop.num_rows; ++row) {
      auto& ranks = rows.at(static_cast<std::size_t>(row));
      if (!ranks.contains(hop.src_rank)) return "the sender does not have the row";
      if (!ranks.insert(hop.dst_rank).second) return "the receiver has the row already";
    }
    return "";
  }

  /// Whether exactly those who need a row have it, besides its home.
  [[nodiscard]] bool all_have_what_they_need() const {
    std::vector<std::set<std::int32_t>> needed(have_.size());
    for (std::int64_t d = 0; d < plan_.num_documents(); ++d) {
      const auto first = plan_.doc_shard_offsets[static_cast<std::size_t>(d)];
      for (auto q = first; q < plan_.doc_shard_offsets[static_cast<std::size_t>(d) + 1]; ++q) {
        const auto shard = plan_.doc_shards[static_cast<std::size_t>(q)];
        const auto begin = plan_.first_needed(shard);
        const auto end = first + plan_.end_needed(shard, static_cast<std::int32_t>(q - first));
        for (auto k = first + begin; k < end; ++k)
          needed[static_cast<std::size_t>(plan_.doc_shards[static_cast<std::size_t>(k)])].insert(
              plan_.q_dst[static_cast<std::size_t>(shard)]);
      }
    }
    for (std::size_t n = 0; n < have_.size(); ++n) {
      needed[n].insert(home_[n]);
      for (const auto& ranks : have_[n])
        if (ranks != needed[n]) return false;
    }
    return true;
  }

 private:
  const QkvPlan& plan_;
  std::vector<std::vector<std::set<std::int32_t>>> have_;  // by shard and row
  std::vector<std::int32_t> home_;
};

TEST(Relay, BringsEveryRowOnceToWhoNeedsIt) {
  int num_forwarded = 0;
  for (std::uint64_t seed = 0; seed < 80; ++seed) {
    Random random(seed);
    PlannerOptions options = test::random_options(random, seed % 3 == 0);
    options.tokens_per_rank = 1 + random.below(300);
    const AttentionPlan plan = plan_attention(test::random_flat(random, options), options);
    RowWorld world(plan.plan);
    for (const RelayHop& hop : plan.relay.hops) {
      ASSERT_EQ(world.carry_out(hop), "") << "seed " << seed;
      num_forwarded += hop.after >= 0;
    }
    ASSERT_TRUE(world.all_have_what_they_need()) << "seed " << seed;
  }
  EXPECT_GT(num_forwarded, 100);
}

TEST(Relay, ARowEntersEachNodeOnce) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    PlannerOptions options = test::random_options(random, seed % 3 == 0);
    const AttentionPlan plan = plan_attention(test::random_flat(random, options), options);
    std::map<std::pair<std::int32_t, std::int32_t>, std::int64_t> rows;  // shard, node
    for (const RelayHop& hop : plan.relay.hops) {
      const std::int32_t node = hop.dst_rank / options.hardware.ranks_per_node;
      if (hop.src_rank / options.hardware.ranks_per_node == node) continue;
      rows[{hop.shard, node}] += hop.num_rows;
    }
    for (const auto& [key, num] : rows)
      ASSERT_LE(num, plan.plan.shard_len[static_cast<std::size_t>(key.first)]);
  }
}

// The checker finds what the schedule does wrong.
TEST(Relay, ValidateFindsDamage) {
  Random random(1);
  const PlannerOptions options{.world_size = 8, .tokens_per_rank = 4096};
  const AttentionPlan good =
      plan_attention(test::random_documents(random, 8 * 4096, 20000), options);
  ASSERT_TRUE(validate(good).empty());
  const auto forwarded = std::find_if(good.relay.hops.begin(), good.relay.hops.end(),
                                      [](const RelayHop& hop) { return hop.after >= 0; });
  ASSERT_NE(forwarded, good.relay.hops.end());
  const auto idx = static_cast<std::size_t>(forwarded - good.relay.hops.begin());
  const auto damaged = [&](auto&& damage) {
    AttentionPlan plan = good;
    damage(plan.relay.hops[idx], plan);
    return !validate(plan).empty();
  };
  EXPECT_TRUE(damaged([](RelayHop& hop, auto&) { hop.num_rows -= 1; }));
  EXPECT_TRUE(damaged([](RelayHop& hop, auto&) { hop.row_begin += 1; }));
  EXPECT_TRUE(damaged([](RelayHop& hop, auto&) { hop.after = -1; }));
  EXPECT_TRUE(damaged([](RelayHop& hop, auto&) { hop.stage += 1; }));
  EXPECT_TRUE(damaged([](RelayHop& hop, auto&) { hop.shard = 1 << 20; }));
  EXPECT_TRUE(damaged([](RelayHop& hop, auto&) { std::swap(hop.src_rank, hop.dst_rank); }));
  EXPECT_TRUE(damaged([](RelayHop&, auto& plan) { plan.relay.hops.pop_back(); }));
  EXPECT_TRUE(damaged([](RelayHop& hop, auto& plan) { plan.relay.hops.push_back(hop); }));
  EXPECT_TRUE(damaged([](RelayHop&, auto& plan) { plan.relay.links[0].nvlink_out += 1; }));
  EXPECT_TRUE(damaged([](RelayHop&, auto& plan) { plan.work[3] += 1; }));
  EXPECT_TRUE(damaged([](RelayHop&, auto& plan) { plan.links[3].nvlink_in -= 1; }));
  EXPECT_TRUE(damaged([](RelayHop&, auto& plan) { plan.kv_tokens.pop_back(); }));
  EXPECT_TRUE(damaged([](RelayHop&, auto& plan) { plan.relay.hops[0].after = -2; }));
  EXPECT_TRUE(damaged([](RelayHop&, auto& plan) { plan.least_bytes_in = 1LL << 62; }));
  EXPECT_TRUE(damaged([](RelayHop&, auto& plan) { plan.least_bytes_in = -1; }));
}

TEST(Relay, NoneWhenNotAskedFor) {
  Random random(1);
  PlannerOptions options{.world_size = 8, .tokens_per_rank = 4096};
  options.relay = false;
  const AttentionPlan plan =
      plan_attention(test::random_documents(random, 8 * 4096, 20000), options);
  EXPECT_TRUE(plan.relay.empty());
  EXPECT_EQ(plan.limit_seconds(TransferMode::relay), plan.limit_seconds(TransferMode::direct));
  EXPECT_EQ(plan.bytes_out(TransferMode::relay), plan.bytes_out());
}

}  // namespace
}  // namespace waybill
