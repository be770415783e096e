#include "waybill/report/plan_summary.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "report/plan_figures.h"
#include "support/expect_error.h"
#include "support/packed_plan.h"
#include "waybill/report/html_report.h"

namespace waybill::test {
namespace {

// Document 0: shards of 4 (rank 0), 6 (rank 0) and 2 (rank 1) tokens, attended by 0, 1, 1.
// Document 1: one shard of 3 tokens on rank 1, attended by rank 0.
QkvPlan small_plan(KvLayout layout) {
  QkvPlan plan;
  plan.world_size = 2;
  plan.kv_layout = layout;
  plan.rank_shard_offsets = {0, 2, 4};
  plan.shard_len = {4, 6, 2, 3};
  plan.q_dst = {0, 1, 1, 0};
  plan.doc_shard_offsets = {0, 3, 4};
  plan.doc_shards = {0, 1, 2, 3};
  return plan;
}

PlanSummary summary_of(const QkvPlan& plan, RowBytes row_bytes = {.q = 100, .kv = 10}) {
  return summarize(plan, compute_qkv_routing(plan), row_bytes);
}

TEST(PlanSummary, CountsOfASmallPlanByHand) {
  const PlanSummary s = summary_of(small_plan(KvLayout::per_rank));
  EXPECT_EQ(s.num_tokens, 15);
  EXPECT_EQ(s.num_documents, 2);
  EXPECT_EQ(s.longest_document, 12);
  EXPECT_EQ(s.median_document, 3);
  EXPECT_EQ(s.longest_shard, 6);
  // Q: 6 rows 0 -> 1, 3 rows 1 -> 0; 4 and 2 stay.
  EXPECT_EQ(s.ranks[0].q.rows_out, 6);
  EXPECT_EQ(s.ranks[0].q.rows_in, 3);
  EXPECT_EQ(s.ranks[0].q.rows_local, 4);
  EXPECT_EQ(s.ranks[1].q.rows_local, 2);
  // KV: rank 0 needs shard 0 and shard 3; rank 1 needs shards 0, 1 and 2, each once.
  EXPECT_EQ(s.ranks[0].kv.rows_out, 10);
  EXPECT_EQ(s.ranks[0].kv.rows_in, 3);
  EXPECT_EQ(s.ranks[0].kv.rows_local, 4);
  EXPECT_EQ(s.ranks[1].kv.rows_in, 10);
  EXPECT_EQ(s.ranks[1].kv.rows_local, 2);
  EXPECT_DOUBLE_EQ(s.kv_copies, 19.0 / 15.0);
  EXPECT_EQ(s.ranks[0].bytes_out, 6 * 100 + 10 * 10);
  EXPECT_EQ(s.ranks[0].bytes_in, 3 * 100 + 3 * 10);
  EXPECT_EQ(s.ranks[1].buffer_bytes, 8 * 100 + 12 * 10);
  EXPECT_EQ(s.wire_bytes, 700 + 330);
  EXPECT_EQ(s.num_wire_pairs, 2);
  ASSERT_EQ(s.pairs.size(), 4U);
  EXPECT_EQ(s.pairs[0].bytes, 0) << "rows that stay are not on the wire";
}

TEST(PlanSummary, WorkLimitAndImbalanceByHand) {
  const PlanSummary s = summary_of(small_plan(KvLayout::per_rank));
  // Pairs of a query shard: sum over its rows of the keys up to and with that row.
  EXPECT_EQ(s.ranks[0].work, (1 + 2 + 3 + 4) + (1 + 2 + 3));
  EXPECT_EQ(s.ranks[1].work, (5 + 6 + 7 + 8 + 9 + 10) + (11 + 12));
  EXPECT_EQ(s.work, 84);
  EXPECT_EQ(s.rank_work.max_rank, 1);
  EXPECT_DOUBLE_EQ(s.rank_work.imbalance(), 68.0 / 42.0);
  EXPECT_EQ(s.limit_bytes, 700);
  EXPECT_EQ(s.limit_rank, 1);
  EXPECT_EQ(s.limit_direction, Direction::in);
  EXPECT_DOUBLE_EQ(s.limit_seconds(0.5), 700 / 0.5e9);
  EXPECT_TRUE(rejects([&] { (void)s.limit_seconds(0); }, {"gb_per_s", "0"}));
}

TEST(PlanSummary, PerQueryCountsACopyForEveryQuery) {
  const PlanSummary s = summary_of(small_plan(KvLayout::per_query));
  // Rank 1: shard 1 needs 4 + 6 rows, shard 2 needs 4 + 6 + 2.
  EXPECT_EQ(s.ranks[1].kv.rows_in, 20);
  EXPECT_EQ(s.ranks[1].kv.rows_local, 2);
  EXPECT_DOUBLE_EQ(s.kv_copies, (4 + 3 + 22) / 15.0);
}

TEST(PlanSummary, DocumentsBehindTheBytes) {
  const QkvPlan plan = small_plan(KvLayout::per_rank);
  const QkvRouting routing = compute_qkv_routing(plan);
  const auto in = document_bytes(plan, routing, {.q = 100, .kv = 10}, 1, Direction::in);
  ASSERT_EQ(in.size(), 1U);
  EXPECT_EQ(in[0].document, 0);
  EXPECT_EQ(in[0].q_bytes, 600);
  EXPECT_EQ(in[0].kv_bytes, 100);
  const auto out = document_bytes(plan, routing, {.q = 100, .kv = 10}, 1, Direction::out);
  ASSERT_EQ(out.size(), 1U);
  EXPECT_EQ(out[0].document, 1);
  EXPECT_EQ(out[0].bytes(), 330);

  const auto documents = document_figures(plan);
  ASSERT_EQ(documents.size(), 2U);
  EXPECT_EQ(documents[0].num_attending_ranks, 2);
  EXPECT_EQ(documents[1].tokens, 3);
}

TEST(PlanSummary, DocumentBytesAddUpToTheRanks) {
  const std::vector<std::int64_t> lengths = {3000, 100, 700, 5000, 1, 2500};
  const QkvPlan plan =
      test::packed_plan(lengths, {.world_size = 5, .tokens_per_rank = 2300, .shard_tokens = 256});
  const QkvRouting routing = compute_qkv_routing(plan);
  const PlanSummary s = summarize(plan, routing, {.q = 8, .kv = 6});
  for (std::int32_t rank = 0; rank < 5; ++rank) {
    std::int64_t in = 0;
    for (const auto& d : document_bytes(plan, routing, s.row_bytes, rank, Direction::in))
      in += d.bytes();
    EXPECT_EQ(in, s.ranks[static_cast<std::size_t>(rank)].bytes_in);
  }
}

TEST(PlanSummary, RefusesWhatDoesNotBelongTogether) {
  const QkvPlan plan = small_plan(KvLayout::per_rank);
  const QkvRouting routing = compute_qkv_routing(plan);
  QkvPlan other = plan;
  other.shard_len[0] = 5;
  EXPECT_TRUE(rejects([&] { (void)summarize(other, routing, {1, 1}); }, {"seq_len"}));
  EXPECT_TRUE(rejects([&] { (void)summarize(plan, routing, {-1, 1}); }, {"row_bytes.q", "-1"}));
  constexpr std::int64_t huge = std::int64_t{1} << 62;
  EXPECT_TRUE(rejects([&] { (void)summarize(plan, routing, {huge, 1}); }, {"2^63"}));
}

TEST(PlanSummary, SpeaksOfTheRelayThatIsTaken) {
  const QkvPlan plan = small_plan(KvLayout::per_rank);
  const QkvRouting routing = compute_qkv_routing(plan);
  PlanSummary s = summarize(plan, routing, {.q = 100, .kv = 10});
  EXPECT_EQ(s.taken_limit(), (RankLimit{s.limit_bytes, s.limit_rank, s.limit_direction}));
  s.relay_limit = limit_of(std::vector<std::int64_t>{20, 300}, std::vector<std::int64_t>{300, 1});
  EXPECT_EQ(s.taken_limit(), (RankLimit{300, 1, Direction::in}));
  EXPECT_DOUBLE_EQ(s.limit_seconds(1), 300e-9);
  const std::string text = text_summary(plan, routing, s);
  EXPECT_NE(text.find("300 B into rank 1 with relay; 700 B into rank 1 without"), std::string::npos)
      << text;
  EXPECT_NE(text.find("With relay, rank 1 sets the limit: it receives 300 B"), std::string::npos);
  EXPECT_NE(text.find("Without that, rank 1 would"), std::string::npos) << text;
  const std::string page = html_report(plan, routing, s, {});
  EXPECT_NE(page.find("into rank 1, with relay"), std::string::npos);
}

TEST(TextSummary, SaysWhatLimitsAndStaysNarrow) {
  const QkvPlan plan = small_plan(KvLayout::per_rank);
  const QkvRouting routing = compute_qkv_routing(plan);
  const PlanSummary s = summarize(plan, routing, {.q = 100, .kv = 10});
  const std::string text = text_summary(plan, routing, s, {.unicode = false, .gb_per_s = 1});
  EXPECT_NE(text.find("Rank 1 sets the limit: it receives 700 B"), std::string::npos) << text;
  EXPECT_NE(text.find("Document 0 (12 tokens in 3 shards, attended on 2 ranks) causes all of"),
            std::string::npos)
      << text;
  for (const char c : text) EXPECT_TRUE(c == '\n' || (c >= ' ' && c < 0x7F));
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    EXPECT_LE(end - begin, 80U) << text.substr(begin, end - begin);
    begin = end + 1;
  }
}

TEST(TextSummary, LongWorldsAreShortened) {
  const std::vector<std::int64_t> lengths(300, 64);
  const QkvPlan plan = test::packed_plan(lengths, {.world_size = 100, .tokens_per_rank = 192});
  const QkvRouting routing = compute_qkv_routing(plan);
  const std::string text = text_summary(plan, routing, summarize(plan, routing, {.q = 8, .kv = 8}));
  EXPECT_NE(text.find("not shown"), std::string::npos);
  EXPECT_LT(std::count(text.begin(), text.end(), '\n'), 60);
}

TEST(TextSummary, APlanWithoutTokens) {
  QkvPlan plan;
  plan.world_size = 3;
  plan.rank_shard_offsets = {0, 0, 0, 0};
  plan.doc_shard_offsets = {0};
  const QkvRouting routing = compute_qkv_routing(plan);
  const PlanSummary s = summarize(plan, routing, {.q = 8, .kv = 8});
  EXPECT_EQ(s.limit_bytes, 0);
  EXPECT_NE(text_summary(plan, routing, s).find("nothing moves"), std::string::npos);
}

}  // namespace
}  // namespace waybill::test
