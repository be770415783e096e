#include <gtest/gtest.h>

#include "json/support.h"
#include "waybill/json/plan_json.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::json_tests {
namespace {

DispatchBundle bundle_of(KvLayout layout) {
  QkvPlan plan = small_plan();
  plan.kv_layout = layout;
  return {plan, to_dense(compute_qkv_routing(plan))};
}

void expect_equal(const DispatchBundle& got, const DispatchBundle& expected) {
  EXPECT_EQ(got.plan, expected.plan);
  EXPECT_EQ(got.metadata.fwd_q, expected.metadata.fwd_q);
  EXPECT_EQ(got.metadata.rev_q, expected.metadata.rev_q);
  EXPECT_EQ(got.metadata.fwd_kv, expected.metadata.fwd_kv);
  EXPECT_EQ(got.metadata.rev_kv, expected.metadata.rev_kv);
  EXPECT_EQ(got.metadata.attention, expected.metadata.attention);
  EXPECT_EQ(got.metadata.kv_dst_global_seq_id, expected.metadata.kv_dst_global_seq_id);
  const auto& mine = got.metadata.q_intermediates;
  const auto& its = expected.metadata.q_intermediates;
  ASSERT_EQ(mine.has_value(), its.has_value());
  if (!mine) return;
  EXPECT_EQ(mine->tokens_to_dst_per_dispatch, its->tokens_to_dst_per_dispatch);
  EXPECT_EQ(mine->seq_to_dst, its->seq_to_dst);
  EXPECT_EQ(mine->num_received_seqs, its->num_received_seqs);
}

std::string dispatch_error(std::string_view what, std::string_view with) {
  const std::string text = replaced(to_json(bundle_of(KvLayout::per_query)), what, with);
  return error_of([&] { return dispatch_from_json(text, "d.json"); });
}

TEST(dispatch_json, reads_back_equal) {
  for (const KvLayout layout : {KvLayout::per_query, KvLayout::per_rank}) {
    for (const JsonStyle style : {JsonStyle::readable, JsonStyle::compact}) {
      const DispatchBundle bundle = bundle_of(layout);
      expect_equal(dispatch_from_json(to_json(bundle, style)), bundle);
    }
  }
}

TEST(dispatch_json, intermediates_read_back_equal) {
  const QkvDispatch dispatch = create_qkv_dispatch(4, 64, 3, 2, /*seed=*/5, true);
  ASSERT_TRUE(dispatch.metadata.q_intermediates);
  ASSERT_TRUE(dispatch.metadata.kv_dst_global_seq_id);
  const DispatchBundle bundle{dispatch.plan, dispatch.metadata};
  expect_equal(dispatch_from_json(to_json(bundle)), bundle);
}

TEST(dispatch_json, a_padded_attention_layout_reads_back_equal) {
  DispatchBundle bundle = bundle_of(KvLayout::per_query);
  bundle.metadata.attention = compute_attn_layout_seqlens(IndexArray::matrix({{4, 6}, {3, 0}}),
                                                          IndexArray::matrix({{4, 10}, {3, 0}}),
                                                          IndexArray::matrix({{0, 1}, {1, -1}}));
  expect_equal(dispatch_from_json(to_json(bundle)), bundle);
}

TEST(dispatch_json, compact_is_smaller_and_one_line) {
  const DispatchBundle bundle = bundle_of(KvLayout::per_rank);
  const std::string compact = to_json(bundle, JsonStyle::compact);
  EXPECT_LT(compact.size(), to_json(bundle).size());
  EXPECT_EQ(compact.find('\n'), std::string::npos);
}

TEST(dispatch_json, errors_name_the_part) {
  expect_parts(dispatch_error("\"q_dst\": [0,", "\"q_dst\": [-1,"),
               {"d.json: /plan: ", "q_dst[0]"});
  expect_parts(dispatch_error("\"q_dst\": [0,", "\"q_dst\": [\"0\","), {"d.json: /plan/q_dst/0"});
  expect_parts(dispatch_error("\"rev_q\"", "\"rev_x\""), {"d.json: /: ", "rev_x"});
  expect_parts(
      dispatch_error("\"max_seqlen_q\": {\"shape\": [3]", "\"max_seqlen_q\": {\"shape\": [4]"),
      {"d.json: /attention/max_seqlen_q/data"});
  expect_parts(dispatch_error("\"ragged\": [", "\"ragged\": [5, "),
               {"d.json: /attention/cu_seqlens_q/ragged/0"});
  expect_parts(dispatch_error("\"dtype\": \"int64\"", "\"dtype\": \"int\""),
               {"d.json: /fwd_q/dst_rank/dtype"});
  expect_parts(dispatch_error("waybill.dispatch", "waybill.plan"), {"d.json: /format"});
}

TEST(dispatch_json, parts_of_another_world_are_an_error) {
  DispatchBundle bundle = bundle_of(KvLayout::per_query);
  bundle.metadata.rev_q = compute_metadata(IndexArray({2, 1}), IndexArray({2, 1})).rev;
  expect_parts(error_of([&] { return dispatch_from_json(to_json(bundle), "d.json"); }),
               {"d.json: /rev_q", "world_size"});
  EXPECT_NO_THROW((void)dispatch_from_json(to_json(bundle), "d.json", ReadCheck::form));
}

TEST(dispatch_json, every_cut_is_an_error) {
  const std::string text = to_json(bundle_of(KvLayout::per_rank), JsonStyle::compact);
  for (std::size_t size = 0; size < text.size(); size += 7) {
    EXPECT_THROW((void)dispatch_from_json(text.substr(0, size)), IoError) << size;
  }
}

TEST(dispatch_json, files_read_back_equal) {
  const TemporaryFolder folder;
  const DispatchBundle bundle = bundle_of(KvLayout::per_rank);
  write_dispatch(folder / "d.json", bundle, JsonStyle::compact);
  expect_equal(read_dispatch(folder / "d.json"), bundle);
}

TEST(json_format, tells_the_formats_apart) {
  const DispatchBundle bundle = bundle_of(KvLayout::per_rank);
  EXPECT_EQ(json_format(to_json(bundle)), "waybill.dispatch");
  EXPECT_EQ(json_format(to_json(bundle.plan)), "waybill.plan");
  EXPECT_EQ(json_format(to_json(bundle.metadata.fwd_q)), "waybill.metadata");
  EXPECT_EQ(json_format("{}"), "");
  EXPECT_THROW((void)json_format("[]"), IoError);
  EXPECT_THROW((void)json_format("{\"format\": 3}"), IoError);
  EXPECT_THROW((void)json_format(""), IoError);
}

}  // namespace
}  // namespace waybill::json_tests
