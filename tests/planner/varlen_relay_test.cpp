#include "waybill/planner/varlen_relay.h"

#include <gtest/gtest.h>

#include <set>

#include "planner_cases.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

using Ranks = std::set<std::int32_t>;

/// Documents of up to three pieces, each on any rank.
std::vector<std::vector<DocumentRange>> random_pieces(Random& random, std::int32_t world_size) {
  std::vector<std::vector<DocumentRange>> held(static_cast<std::size_t>(world_size));
  for (std::int64_t document = 0; document < 6; ++document) {
    std::int64_t offset = 0;
    for (std::int64_t piece = random.below(3); piece >= 0; --piece) {
      const std::int64_t length = 1 + random.below(document == 0 ? 3000 : 200);
      held[static_cast<std::size_t>(random.below(world_size))].push_back(
          {.document = document, .offset = offset, .length = length});
      offset += length;
    }
  }
  return held;
}

PlannerOptions random_batch_options(Random& random) {
  PlannerOptions options = test::random_options(random, random.below(3) == 0);
  options.world_size = static_cast<std::int32_t>(2 + random.below(10));
  options.tokens_per_rank = 0;
  options.kv_layout = KvLayout::per_query;
  options.tails = true;
  options.relay = false;
  return options;
}

/// The ranks that get each entry, and its home, by the table alone.
std::vector<Ranks> receivers_of(const SparseMetadata& table) {
  std::vector<Ranks> ranks(static_cast<std::size_t>(table.num_entries()));
  for (std::int32_t w = 0; w < table.world_size; ++w) {
    for (auto n = table.rank_offsets[static_cast<std::size_t>(w)];
         n < table.rank_offsets[static_cast<std::size_t>(w) + 1]; ++n) {
      ranks[static_cast<std::size_t>(n)].insert(w);
      for (auto c = table.destination_begin(n); c < table.destination_end(n); ++c)
        ranks[static_cast<std::size_t>(n)].insert(table.dst_rank[static_cast<std::size_t>(c)]);
    }
  }
  return ranks;
}

/// Carries hops out row by row. @return what is wrong; empty: nothing
std::string carry_out(const SparseMetadata& table, const RelaySchedule& relay) {
  std::vector<std::vector<Ranks>> have(static_cast<std::size_t>(table.num_entries()));
  const std::vector<Ranks> wanted = receivers_of(table);
  for (std::int32_t w = 0; w < table.world_size; ++w) {
    for (auto n = table.rank_offsets[static_cast<std::size_t>(w)];
         n < table.rank_offsets[static_cast<std::size_t>(w) + 1]; ++n)
      have[static_cast<std::size_t>(n)].assign(
          static_cast<std::size_t>(table.seq_len[static_cast<std::size_t>(n)]), Ranks{w});
  }
  for (const RelayHop& hop : relay.hops) {
    auto& rows = have.at(static_cast<std::size_t>(hop.shard));
    for (std::int64_t row = hop.row_begin; row < hop.row_begin + hop.num_rows; ++row) {
      Ranks& ranks = rows.at(static_cast<std::size_t>(row));
      if (!ranks.contains(hop.src_rank)) return "the sender does not have the row";
      if (!ranks.insert(hop.dst_rank).second) return "the receiver has the row already";
    }
  }
  for (std::size_t n = 0; n < have.size(); ++n) {
    for (const Ranks& ranks : have[n])
      if (ranks != wanted[n]) return "a row is not where it is needed";
  }
  return "";
}

TEST(VarlenRelay, BringsEveryRowOnceToWhoNeedsIt) {
  int num_forwarded = 0;
  for (std::uint64_t seed = 0; seed < 120; ++seed) {
    Random random(seed);
    const PlannerOptions options = random_batch_options(random);
    const QkvPlan plan = plan_pieces(random_pieces(random, options.world_size), options);
    const VarlenRouting routing = compute_varlen_routing(plan, seed % 2 == 0);
    const RelaySchedule relay = plan_varlen_relay(plan, routing, options, VarlenRelayUse::always);
    if (relay.empty()) continue;
    ASSERT_EQ(carry_out(routing.fwd_kv, relay), "") << "seed " << seed;
    ASSERT_EQ(carry_out(routing.sum_kv, relay_of_sums(routing, relay)), "") << "seed " << seed;
    for (const RelayHop& hop : relay.hops) num_forwarded += hop.after >= 0 ? 1 : 0;
  }
  EXPECT_GT(num_forwarded, 100);
}

TEST(VarlenRelay, LinksAreThoseOfItsHops) {
  Random random(7);
  for (int i = 0; i < 20; ++i) {
    const PlannerOptions options = random_batch_options(random);
    const QkvPlan plan = plan_pieces(random_pieces(random, options.world_size), options);
    const VarlenRouting routing = compute_varlen_routing(plan);
    const RelaySchedule relay = plan_varlen_relay(plan, routing, options, VarlenRelayUse::always);
    std::int64_t out = 0;
    for (const LinkBytes& link : relay.links) out += link.out();
    std::int64_t rows = 0;
    for (const RelayHop& hop : relay.hops) rows += hop.num_rows;
    std::int64_t q_rows = 0;
    for (std::size_t r = 0; r < routing.ranks.size(); ++r) {
      for (const RowRange& range : routing.ranks[r].q_rows) q_rows += range.rows;
    }
    const std::int64_t q_bytes = out - rows * options.model.kv_row_bytes();
    EXPECT_GE(q_bytes, 0);
    EXPECT_LE(q_bytes, q_rows * options.model.q_row_bytes());
  }
}

/// `seed_length` tokens of one document on rank 0 that all ranks attend to.
QkvPlan one_document(std::int64_t length, const PlannerOptions& options) {
  std::vector<std::vector<DocumentRange>> held(static_cast<std::size_t>(options.world_size));
  held[0].push_back({.document = 0, .offset = 0, .length = length});
  return plan_pieces(held, options);
}

TEST(VarlenRelay, OnlyWhereTheLinksGain) {
  PlannerOptions options{.world_size = 8, .tokens_per_rank = 0};
  options.kv_layout = KvLayout::per_query;
  options.tails = true;
  const QkvPlan many = one_document(32768, options);
  const RelaySchedule relay = plan_varlen_relay(many, compute_varlen_routing(many), options);
  ASSERT_FALSE(relay.empty());
  EXPECT_GT(relay.num_stages, 1);

  options.world_size = 2;  // one rank alone receives
  const QkvPlan pair = one_document(32768, options);
  EXPECT_TRUE(plan_varlen_relay(pair, compute_varlen_routing(pair), options).empty());
  EXPECT_FALSE(
      plan_varlen_relay(pair, compute_varlen_routing(pair), options, VarlenRelayUse::always)
          .empty());

  options.world_size = 1;
  const QkvPlan alone = one_document(100, options);
  for (const auto use : {VarlenRelayUse::where_links_gain, VarlenRelayUse::always})
    EXPECT_TRUE(plan_varlen_relay(alone, compute_varlen_routing(alone), options, use).empty());
}

TEST(VarlenRelay, NoneWithoutTokens) {
  const PlannerOptions options{.world_size = 3, .tokens_per_rank = 0};
  const QkvPlan plan = plan_pieces(std::vector<std::vector<DocumentRange>>(3), options);
  EXPECT_TRUE(plan_varlen_relay(plan, compute_varlen_routing(plan), options, VarlenRelayUse::always)
                  .empty());
}

}  // namespace
}  // namespace waybill
