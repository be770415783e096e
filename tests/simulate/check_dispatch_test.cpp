#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "simulate_support.h"
#include "support/expect_error.h"
#include "support/random_plan.h"
#include "waybill/simulate/check.h"

namespace waybill {
namespace {

using test::random_plan;
using test::rejects;
using test::text_of;

TEST(check_dispatch, passes_what_the_routing_code_makes) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const QkvPlan plan =
        random_plan(seed, {.windows = seed % 3 == 1,
                           .full = seed % 3 == 2,
                           .destinations = seed % 5 == 0 ? 2 : 0,
                           .kv_layout = seed % 2 == 0 ? KvLayout::per_rank : KvLayout::per_query});
    const DispatchCheck check = check_dispatch(plan, compute_qkv_routing(plan));
    ASSERT_TRUE(check.passed()) << "seed " << seed << "\n" << text_of(check.findings);
  }
}

TEST(check_dispatch, tells_what_it_did) {
  // Rank 0: one document of 3 + 2 tokens, the second half goes to rank 1. Rank 1: one of 4 stays.
  QkvPlan plan;
  plan.world_size = 2;
  plan.rank_shard_offsets = {0, 2, 3};
  plan.shard_len = {3, 2, 4};
  plan.q_dst = {0, 1, 1};
  plan.doc_shard_offsets = {0, 2, 3};
  plan.doc_shards = {0, 1, 2};
  std::vector<std::string> seen;
  CheckOptions options{.q_row_bytes = 100, .kv_row_bytes = 8};
  options.progress = [&](std::string_view phase, int done, int total) {
    EXPECT_EQ(done, static_cast<int>(seen.size()));
    EXPECT_EQ(total, 9);
    seen.emplace_back(phase);
  };
  const DispatchCheck check = check_dispatch(plan, compute_qkv_routing(plan), options);
  ASSERT_TRUE(check.passed()) << text_of(check.findings);
  EXPECT_EQ(seen.size(), 10U);
  EXPECT_EQ(check.phases.size(), 9U);
  EXPECT_EQ(check.q_rows, 9);
  EXPECT_EQ(check.kv_rows, 9);
  EXPECT_EQ(check.kv_rows_attention, 3 + 5 + 4);
  EXPECT_EQ(check.queries_checked, 3);
  EXPECT_EQ(check.context_rows_checked, 3 + 5 + 4);
  // Q: 9 rows each way; KV: 12 each way, of which 2 * 5 planes of rank 0 and 4 of rank 1 are read.
  EXPECT_EQ(check.bytes_moved, 2 * 9 * 100 + 2 * 12 * 8);
  EXPECT_EQ(check.wire_bytes, 2 * 2 * 100 + 2 * 5 * 8);
  EXPECT_EQ(check.rows_checked, 9 + 9 + 12 + 14);
  EXPECT_EQ(check.bytes_checked, 18 * 100 + 26 * 8);
}

TEST(check_dispatch, does_not_depend_on_threads_or_row_size) {
  const QkvPlan plan = random_plan(11, {.world_size = 6, .edge_share = 0});
  const QkvRouting routing = compute_qkv_routing(plan);
  for (int threads = 0; threads <= 8; ++threads) {
    for (const std::int64_t row_bytes : {8, 13, 4096}) {
      const DispatchCheck check = check_dispatch(
          plan, routing,
          {.q_row_bytes = row_bytes, .kv_row_bytes = row_bytes + 1, .num_threads = threads});
      ASSERT_TRUE(check.passed()) << text_of(check.findings);
    }
  }
}

/// A plan on which every kind of damage below makes a difference.
QkvPlan plan_to_damage(KvLayout layout) {
  QkvPlan plan;
  plan.world_size = 3;
  plan.kv_layout = layout;
  plan.rank_shard_offsets = {0, 4, 7, 9};
  plan.shard_len = {5, 5, 5, 5, 7, 7, 7, 4, 4};
  plan.q_dst = {0, 1, 2, 0, 1, 2, 1, 2, 0};
  plan.doc_shard_offsets = {0, 4, 7, 9};
  plan.doc_shards = {0, 1, 2, 3, 4, 5, 6, 7, 8};
  return plan;
}

struct Damage {
  const char* name;
  std::function<void(QkvRouting&)> plant;
  const char* table;  ///< that a finding must name
};

void swap_offsets(SparseMetadata& table, std::size_t a, std::size_t b) {
  std::swap(table.dst_offset[a], table.dst_offset[b]);
}

const std::vector<Damage>& damages() {
  // Entries 1 and 6 are Q shards of rank 1 and others of one length with it; see plan_to_damage.
  static const std::vector<Damage> list{
      {"q_offsets_swapped", [](QkvRouting& r) { swap_offsets(r.fwd_q, 4, 6); }, "fwd_q"},
      {"q_offset_shifted", [](QkvRouting& r) { r.fwd_q.dst_offset[8] += 1; }, "fwd_q"},
      {"q_wrong_rank", [](QkvRouting& r) { r.fwd_q.dst_rank[0] = 1; }, "fwd_q"},
      {"q_cut_short",
       [](QkvRouting& r) {
         --r.fwd_q.seq_len[3];  // the last of its rank: nothing behind it moves
       },
       "fwd_q"},
      {"q_lines_swapped",
       [](QkvRouting& r) {
         std::swap(r.fwd_q.dst_rank[1], r.fwd_q.dst_rank[2]);
         swap_offsets(r.fwd_q, 1, 2);
       },
       "fwd_q"},
      {"q_back_swapped", [](QkvRouting& r) { swap_offsets(r.rev_q, 0, 1); }, "rev_q"},
      {"q_back_past_the_end", [](QkvRouting& r) { r.rev_q.dst_offset[0] += 1000; }, "rev_q"},
      {"q_back_cut_short",
       [](QkvRouting& r) {
         --r.rev_q.seq_len[static_cast<std::size_t>(r.rev_q.rank_offsets[1] - 1)];
       },
       "rev_q"},
      {"kv_offsets_swapped",
       [](QkvRouting& r) {
         const auto a = static_cast<std::size_t>(r.fwd_kv.destination_begin(0));
         const auto b = static_cast<std::size_t>(r.fwd_kv.destination_begin(1));
         swap_offsets(r.fwd_kv, a, b);
         std::swap(r.fwd_kv.dst_rank[a], r.fwd_kv.dst_rank[b]);
       },
       nullptr},
      {"kv_copy_dropped",
       [](QkvRouting& r) {
         const auto last = r.fwd_kv.copy_offsets[1] - 1;
         r.fwd_kv.dst_rank.erase(r.fwd_kv.dst_rank.begin() + last);
         r.fwd_kv.dst_offset.erase(r.fwd_kv.dst_offset.begin() + last);
         for (std::size_t i = 1; i < r.fwd_kv.copy_offsets.size(); ++i) --r.fwd_kv.copy_offsets[i];
       },
       "fwd_kv"},
      {"kv_shard_cut_short", [](QkvRouting& r) { --r.fwd_kv.seq_len[3]; }, "fwd_kv"},
      {"kv_negative_offset", [](QkvRouting& r) { r.fwd_kv.dst_offset[0] = -1; }, "fwd_kv"},
      {"kv_rank_outside", [](QkvRouting& r) { r.fwd_kv.dst_rank[0] = 3; }, "fwd_kv"},
      {"gradient_swapped", [](QkvRouting& r) { swap_offsets(r.rev_kv, 0, 1); }, "rev_kv"},
      {"gradient_wrong_plane",
       [](QkvRouting& r) {
         // Two copies of one shard change their planes: the sum is the same, its order is not.
         for (std::size_t a = 0; a < r.rev_kv.dst_rank.size(); ++a) {
           for (std::size_t b = a + 1; b < r.rev_kv.dst_rank.size(); ++b) {
             const std::int64_t apart = r.rev_kv.dst_offset[b] - r.rev_kv.dst_offset[a];
             if (r.rev_kv.dst_rank[a] == 0 && r.rev_kv.dst_rank[b] == 0 && apart != 0 &&
                 apart % 20 == 0) {
               return swap_offsets(r.rev_kv, a, b);
             }
           }
         }
         FAIL() << "no two copies of one shard";
       },
       "rev_kv"},
      {"gradient_wrong_home",
       [](QkvRouting& r) {
         r.rev_kv.dst_rank[0] = 1;
         r.rev_kv.dst_offset[0] = 3 * 21 - 5;
       },
       "rev_kv"},
      {"gradient_line_lost",
       [](QkvRouting& r) {
         r.rev_kv.seq_len[static_cast<std::size_t>(r.rev_kv.rank_offsets[1] - 1)] = 0;
       },
       "rev_kv"},
      {"tables_do_not_fit", [](QkvRouting& r) { r.rev_kv.dst_offset.pop_back(); }, "rev_kv"},
      {"count_of_a_pair", [](QkvRouting& r) { ++r.fwd_q.recv.tokens[0]; }, "fwd_q"},
      {"count_of_a_total", [](QkvRouting& r) { ++r.rev_kv.recv.total[1]; }, "rev_kv"},
      {"count_without_pairs", [](QkvRouting& r) { r.fwd_kv.recv = {}; }, "fwd_kv"},
      {"attention_shard", [](QkvRouting& r) { r.attention.shard[0] = 8; }, "attention"},
      {"attention_q_begin", [](QkvRouting& r) { ++r.attention.q_begin[1]; }, "attention"},
      {"attention_q_len", [](QkvRouting& r) { --r.attention.q_len[1]; }, "attention"},
      {"attention_kv_row", [](QkvRouting& r) { ++r.attention.kv_row[1]; }, "attention"},
      {"attention_kv_row_far", [](QkvRouting& r) { r.attention.kv_row[1] = std::int64_t{1} << 62; },
       "attention"},
      {"attention_kv_len", [](QkvRouting& r) { --r.attention.kv_len[0]; }, "attention"},
      {"attention_kv_len_negative", [](QkvRouting& r) { r.attention.kv_len[0] = -5; }, "attention"},
      {"attention_max_q", [](QkvRouting& r) { ++r.attention.max_seqlen_q[2]; }, "attention"},
      {"attention_max_kv", [](QkvRouting& r) { --r.attention.max_seqlen_kv[2]; }, "attention"},
      {"attention_ranks", [](QkvRouting& r) { ++r.attention.rank_offsets[1]; }, "attention"},
      {"attention_short", [](QkvRouting& r) { r.attention.kv_len.pop_back(); }, "attention"},
  };
  return list;
}

class planted_damage : public testing::TestWithParam<std::tuple<KvLayout, std::size_t>> {};
INSTANTIATE_TEST_SUITE_P(all, planted_damage,
                         testing::Combine(testing::Values(KvLayout::per_rank, KvLayout::per_query),
                                          testing::Range(std::size_t{0}, damages().size())),
                         [](const auto& param) {
                           const bool shared = std::get<0>(param.param) == KvLayout::per_rank;
                           return concat(damages()[std::get<1>(param.param)].name,
                                         shared ? "_per_rank" : "_per_query");
                         });

TEST_P(planted_damage, is_found) {
  const auto [layout, idx] = GetParam();
  const Damage& damage = damages()[idx];
  const QkvPlan plan = plan_to_damage(layout);
  QkvRouting routing = compute_qkv_routing(plan);
  ASSERT_TRUE(check_dispatch(plan, routing).passed());
  damage.plant(routing);
  const DispatchCheck check = check_dispatch(plan, routing);
  ASSERT_FALSE(check.passed());
  if (damage.table == nullptr) return;
  EXPECT_TRUE(std::ranges::any_of(check.findings, [&](const Finding& finding) {
    return finding.table == damage.table;
  })) << text_of(check.findings);
}

TEST(check_dispatch, says_which_row_is_wrong) {
  const QkvPlan plan = plan_to_damage(KvLayout::per_rank);
  QkvRouting routing = compute_qkv_routing(plan);
  swap_offsets(routing.fwd_q, 4, 6);  // both of 7 rows, to rank 1, from rows 0 and 14 of rank 1
  const DispatchCheck check = check_dispatch(plan, routing);
  ASSERT_FALSE(check.passed());
  const Finding& first = check.findings.front();
  EXPECT_EQ(first.kind, FindingKind::order);
  EXPECT_EQ(first.rank, 1);
  EXPECT_EQ(first.shard, 4);
  EXPECT_EQ(first.got, "row 5 holds row 14 of rank 1 (and 6 more rows are wrong)");
  EXPECT_EQ(first.expected, "row 0 of rank 1");
}

TEST(check_dispatch, stops_at_the_limit) {
  const QkvPlan plan = plan_to_damage(KvLayout::per_rank);
  QkvRouting routing = compute_qkv_routing(plan);
  for (std::int64_t& begin : routing.attention.q_begin) ++begin;
  EXPECT_EQ(check_dispatch(plan, routing, {.max_findings = 3}).findings.size(), 3U);
}

TEST(check_dispatch, refuses_options_out_of_range) {
  const QkvPlan plan = plan_to_damage(KvLayout::per_rank);
  const QkvRouting routing = compute_qkv_routing(plan);
  const auto call = [&](const CheckOptions& options) {
    return [&plan, &routing, options] { (void)check_dispatch(plan, routing, options); };
  };
  EXPECT_TRUE(rejects(call({.q_row_bytes = 7}), {"q_row_bytes = 7", "8.."}));
  EXPECT_TRUE(rejects(call({.kv_row_bytes = -1}), {"kv_row_bytes = -1"}));
  EXPECT_TRUE(rejects(call({.num_threads = -1}), {"num_threads = -1"}));
  EXPECT_TRUE(rejects(call({.max_findings = 0}), {"max_findings = 0"}));
  EXPECT_TRUE(rejects([] { (void)check_dispatch(QkvPlan{}, QkvRouting{}); }, {"check_dispatch"}));
}

}  // namespace
}  // namespace waybill
