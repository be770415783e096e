#include "waybill/report/expert_summary.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <string_view>

#include "core/to_size.h"
#include "support/expect_error.h"
#include "waybill/core/random.h"

namespace waybill {
namespace {

using detail::to_size;
using Ids = std::vector<std::vector<std::int32_t>>;

EPConfig config_of(std::int32_t nodes, std::int32_t per_node, std::int32_t topk = 3) {
  EPConfig config;
  config.max_tokens = 50;
  config.hidden = 256;
  config.topk = topk;
  config.world_size = nodes * per_node;
  config.local_world_size = per_node;
  config.num_experts = 4 * config.world_size;
  return config;
}

Ids random_ids(const EPConfig& config, Random& random) {
  Ids ids(config.world_size);
  for (auto& rank : ids) {
    const std::int64_t size = random.below(config.max_tokens + 1) * config.topk;
    for (std::int64_t i = 0; i < size; ++i)
      rank.push_back(static_cast<std::int32_t>(random.below(config.num_experts + 1)));
  }
  return ids;
}

/// Token by token, from the sets of ranks and nodes that it goes to.
std::vector<ExpertRankFigures> counted(const EPConfig& config, const Ids& ids) {
  std::vector<ExpertRankFigures> ranks(config.world_size);
  const std::int32_t local = config.local_world_size;
  for (std::int32_t source = 0; source < config.world_size; ++source) {
    const auto& own = ids[source];
    for (std::int64_t t = 0; t < std::ssize(own) / config.topk; ++t) {
      ++ranks[source].tokens;
      std::set<std::int32_t> goes;
      std::set<std::int32_t> nodes;
      for (std::int32_t k = 0; k < config.topk; ++k) {
        const std::int32_t expert = own[t * config.topk + k];
        if (expert == config.num_experts) {
          ++ranks[source].dropped;
          continue;
        }
        ++ranks[expert / 4].computed;
        goes.insert(expert / 4);
        nodes.insert(expert / 4 / local);
      }
      nodes.erase(source / local);
      for (const std::int32_t node : nodes) {
        ++ranks[source].network_out;
        ++ranks[node * local + source % local].network_in;
      }
      for (const std::int32_t rank : goes) {
        ++ranks[rank].received;
        const std::int32_t forwarder = rank / local * local + source % local;
        if (forwarder == rank) continue;
        ++ranks[forwarder].node_out;
        ++ranks[rank].node_in;
      }
    }
  }
  return ranks;
}

bool same(const ExpertRankFigures& a, const ExpertRankFigures& b) {
  return a.tokens == b.tokens && a.dropped == b.dropped && a.computed == b.computed &&
         a.received == b.received && a.node_in == b.node_in && a.node_out == b.node_out &&
         a.network_in == b.network_in && a.network_out == b.network_out;
}

TEST(ExpertSummary, counts_what_each_token_does) {
  Random random(1);
  for (const auto& [nodes, per_node] :
       std::vector<std::pair<std::int32_t, std::int32_t>>{{1, 1}, {1, 4}, {2, 2}, {3, 1}, {2, 4}}) {
    for (int round = 0; round < 10; ++round) {
      const EPConfig config = config_of(nodes, per_node);
      const Ids ids = random_ids(config, random);
      const ExpertSummary summary = summarize_experts(config, {}, ids);
      const auto want = counted(config, ids);
      for (std::size_t r = 0; r < want.size(); ++r)
        ASSERT_TRUE(same(summary.ranks[r], want[r]))
            << nodes << " x " << per_node << ", rank " << r;
      std::int64_t topk_slots = 0;
      for (const std::int64_t c : summary.expert_entries) topk_slots += c;
      std::int64_t computed = 0;
      for (const auto& rank : want) computed += rank.computed;
      EXPECT_EQ(topk_slots, computed);
    }
  }
}

TEST(ExpertSummary, rows_have_their_scales) {
  const EPConfig config = config_of(1, 2);
  const Ids ids(2);
  EXPECT_EQ(summarize_experts(config, {}, ids).row_bytes, 512);
  EXPECT_EQ(summarize_experts(config, {.payload = EPPayload::quantized}, ids).row_bytes, 256 + 8);
}

TEST(ExpertSummary, the_slower_link_sets_the_limit) {
  const EPConfig config = config_of(2, 2, 1);
  // Rank 0 sends three tokens to rank 1, and one to node 1.
  const Ids ids = {{4, 5, 6, 8}, {}, {}, {}};
  const ExpertSummary summary = summarize_experts(config, {}, ids);
  const ExpertLimit near = summary.limit({512.0, 512.0});
  EXPECT_EQ(near.rank, 1);
  EXPECT_FALSE(near.network);
  EXPECT_EQ(near.direction, Direction::in);
  EXPECT_EQ(near.rows, 3);
  EXPECT_DOUBLE_EQ(near.mean_rows, 0.75);
  EXPECT_DOUBLE_EQ(near.seconds, 3);
  const ExpertLimit far = summary.limit({512.0, 64.0});
  EXPECT_TRUE(far.network);
  EXPECT_EQ(far.rank, 2);
  EXPECT_DOUBLE_EQ(far.seconds, 8);
  for (const double speed : {0.0, -1.0, std::nan(""), HUGE_VAL})
    EXPECT_TRUE(test::rejects([&] { (void)summary.limit({speed, 1}); }, {"speed", "number > 0"}));
}

TEST(ExpertSummary, experts_are_placed_by_their_choices) {
  const EPConfig config = config_of(1, 2, 1);
  Ids ids(2);
  const std::int32_t topk_slots[] = {9, 8, 1, 1, 1, 1, 1, 0};  // rank 0 has 19 of 22
  for (std::int32_t e = 0; e < 8; ++e) ids[0].insert(ids[0].end(), to_size(topk_slots[e]), e);
  const ExpertSummary summary = summarize_experts(config, {}, ids);
  const auto placement = place_experts(summary);
  std::vector<std::int32_t> experts(2);
  std::vector<std::int64_t> rows(2);
  for (std::int32_t e = 0; e < 8; ++e) {
    ++experts[placement[e]];
    rows[placement[e]] += topk_slots[e];
  }
  EXPECT_EQ(experts, (std::vector<std::int32_t>{4, 4}));
  EXPECT_EQ(std::ranges::max(rows), 11);
  const auto text = explain_experts(summary);
  EXPECT_TRUE(std::ranges::any_of(text, [](const std::string& s) {
    return s.find("If experts were placed by load, 4 per rank") != std::string::npos;
  }));
}

TEST(ExpertSummary, ways_of_two_ranks) {
  const EPConfig config = config_of(1, 2);  // ranks have experts 0 to 3 and 4 to 7
  // Rank 0: one token to both ranks, two of its topk slots on rank 1; one that stays.
  const ExpertSummary summary = summarize_experts(config, {}, Ids{{0, 4, 5, 1, 2, 3}, {4, 5, 6}});
  const double row = 2.0 * 256 * 2;  // dispatch and combine
  const ExpertWays ways = compare_expert_ways(summary, {row, 1.0});
  EXPECT_EQ(ways.waybill, 1);
  EXPECT_EQ(ways.all_to_all, 2);
  EXPECT_EQ(ways.all_gather, 2);  // two tokens of rank 0 to rank 1
  EXPECT_NE(explain_experts(summary, {row, 1.0})
                .back()
                .find("Waybill wins, the others take at least 2.00 times as long"),
            std::string::npos);
}

TEST(ExpertSummary, ways_where_every_token_goes_everywhere) {
  const EPConfig config = config_of(1, 2, 2);
  const ExpertSummary summary = summarize_experts(config, {}, Ids{{0, 4}, {1, 5}});
  const ExpertWays ways = compare_expert_ways(summary, {});
  EXPECT_EQ(ways.waybill, ways.all_to_all);
  EXPECT_EQ(ways.waybill, ways.all_gather);
  EXPECT_NE(explain_experts(summary).back().find("hardly less than all_to_all and all_gather"),
            std::string::npos);
}

TEST(ExpertSummary, ways_between_nodes) {
  const EPConfig config = config_of(2, 2, 2);
  // Rank 0: a token to both ranks of the other node. It crosses once, all_to_all's rows twice.
  const ExpertSummary summary = summarize_experts(config, {}, Ids{{8, 12}, {}, {}, {}});
  const ExpertWays ways = compare_expert_ways(summary, {1e30, 2.0 * 256 * 2});
  EXPECT_EQ(ways.waybill, 1);
  EXPECT_EQ(ways.all_to_all, 2);
  EXPECT_EQ(ways.all_gather, 0.5);  // half of it by each rank's link
}

TEST(ExpertSummary, says_when_nothing_moves) {
  const EPConfig config = config_of(1, 2, 1);
  EXPECT_EQ(explain_experts(summarize_experts(config, {}, Ids{{8, 8}, {}})).size(), 1);
  const auto stays = explain_experts(summarize_experts(config, {}, Ids{{0}, {4}}));
  EXPECT_NE(stays[0].find("every token stays"), std::string::npos);
  EXPECT_NE(expert_text(summarize_experts(config, {}, Ids(2))).find("every topk slot is dropped"),
            std::string::npos);
}

TEST(ExpertSummary, wrong_ids_are_named) {
  const EPConfig config = config_of(1, 2);
  const auto fails = [&](const Ids& ids, std::initializer_list<std::string_view> words) {
    return test::rejects([&] { (void)summarize_experts(config, {}, ids); }, words);
  };
  EXPECT_TRUE(fails(Ids(1), {"summarize_experts", "ids has 1", "expected one per rank: 2"}));
  EXPECT_TRUE(fails({{1, 2}, {}}, {"ids[0] has 2", "topk = 3"}));
  EXPECT_TRUE(fails({{}, std::vector<std::int32_t>(153)}, {"ids[1] has 153", "at most 50"}));
  EXPECT_TRUE(fails({{}, {0, 1, 9}}, {"ids[1]: token 0, topk slot 2 has expert 9, expected 0..8"}));
  EXPECT_TRUE(fails({{}, {0, -1, 0}}, {"topk slot 1 has expert -1"}));
}

}  // namespace
}  // namespace waybill
