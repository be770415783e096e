#include <gtest/gtest.h>

#include "json/support.h"
#include "support/expect_error.h"
#include "waybill/json/plan_json.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::json_tests {
namespace {

DispatchMetadata documented_example() {
  return compute_metadata(IndexArray::matrix({{10, 5, 0}, {8, 12, 4}, {6, 0, 9}}),
                          IndexArray::matrix({{1, 2, -1}, {2, 0, 1}, {0, -1, 2}}));
}

DispatchMetadata with_copies() {
  return compute_metadata(IndexArray::matrix({{10, 5}, {8, 12}}),
                          IndexArray::cube({{{1, 0}, {1, -1}}, {{0, 1}, {-1, 0}}}));
}

/// The forward metadata of the example, one line changed.
std::string metadata_error(std::string_view what, std::string_view with) {
  const std::string text = replaced(to_json(documented_example().fwd), what, with);
  return error_of([&] { return metadata_from_json(text, "m.json"); });
}

TEST(metadata_json, writes_the_documented_form) {
  const std::string text = to_json(documented_example().fwd);
  EXPECT_EQ(text, R"({
  "format": "waybill.metadata",
  "version": 1,
  "world_size": 3,
  "normalized": false,
  "dst_rank": {"shape": [3, 3], "dtype": "int64", "data": [[1, 2, -1], [2, 0, 1], [0, -1, 2]]},
  "dst_offset": {"shape": [3, 3], "dtype": "int64", "data": [[0, 0, 0], [5, 0, 10], [12, 0, 13]]},
  "seq_len": {"shape": [3, 3], "dtype": "int64", "data": [[10, 5, 0], [8, 12, 4], [6, 0, 9]]},
  "num_recv_tokens": {"shape": [3, 4], "dtype": "int64", "data": [[0, 12, 6, 18], [10, 4, 0, 14], [5, 8, 9, 22]]},
  "seq_recv_mask": null,
  "recv_seq_lens": null,
  "num_seqs": {"shape": [3], "dtype": "int64", "data": [2, 3, 2]},
  "num_total_recv_tokens": [18, 14, 22]
}
)");
}

void expect_round_trip(const Metadata& metadata) {
  for (const JsonStyle style : {JsonStyle::readable, JsonStyle::compact}) {
    EXPECT_EQ(metadata_from_json(to_json(metadata, style)), metadata);
  }
}

TEST(metadata_json, reads_back_equal) {
  for (const DispatchMetadata& dispatch : {documented_example(), with_copies()}) {
    for (const Metadata& metadata : {dispatch.fwd, dispatch.rev}) {
      expect_round_trip(metadata);
      expect_round_trip(metadata.normalize_dtype());
      for (const Rank rank : {Rank{0}, Rank{1}}) {
        expect_round_trip(metadata.get_slice(rank));
        expect_round_trip(metadata.get_slice(rank).normalize_dtype());
      }
    }
  }
}

TEST(metadata_json, arrays_without_elements_keep_their_shape) {
  const DispatchMetadata nothing_sent =
      compute_metadata(IndexArray({2, 3}), IndexArray::full({2, 3}, -1));
  EXPECT_EQ(nothing_sent.rev.dst_rank.shape(), (Shape{2, 0}));
  expect_round_trip(nothing_sent.rev);
  const DispatchMetadata no_shards = compute_metadata(IndexArray({2, 0}), IndexArray({2, 0}));
  expect_round_trip(no_shards.fwd);
  const DispatchMetadata no_copies = compute_metadata(IndexArray({2, 3}), IndexArray({2, 3, 0}));
  expect_round_trip(no_copies.fwd);
  expect_round_trip(no_copies.rev);
}

TEST(metadata_json, names_the_counts_that_are_missing) {
  Metadata table = compute_metadata(IndexArray::matrix({{4, 2}}), IndexArray::matrix({{0, 0}})).fwd;
  table.num_recv_tokens = IndexArray();
  EXPECT_TRUE(
      test::rejects([&] { (void)to_json(table); },
                    {"to_json: num_recv_tokens is missing, expected counts of shape [1, 2]"}));
  table.num_recv_tokens = IndexArray::matrix({{6}});
  EXPECT_TRUE(test::rejects([&] { (void)to_json(table); },
                            {"to_json: num_recv_tokens has shape [1, 1], expected [1, 2]"}));
}

TEST(metadata_json, totals_of_a_slice_are_one_number) {
  const Metadata slice = documented_example().fwd.get_slice(Rank{2});
  EXPECT_NE(to_json(slice).find("\"num_total_recv_tokens\": 22\n"), std::string::npos);
  Metadata world_of_one = compute_metadata(IndexArray({1, 1}, {5}), IndexArray({1, 1}, {0})).fwd;
  EXPECT_NE(to_json(world_of_one).find("\"num_total_recv_tokens\": [5]\n"), std::string::npos);
  expect_round_trip(world_of_one);
  world_of_one.num_total_recv_tokens.clear();
  expect_round_trip(world_of_one);
}

TEST(metadata_json, absent_is_null_and_format_may_be_absent) {
  const Metadata metadata = metadata_from_json(R"({
    "dst_rank": {"shape": [1, 1], "dtype": "int64", "data": [[0]]},
    "dst_offset": {"shape": [1, 1], "dtype": "int64", "data": [[0]]},
    "seq_len": {"shape": [1, 1], "dtype": "int64", "data": [[7]]},
    "num_recv_tokens": {"shape": [1, 2], "dtype": "int64", "data": [[7, 7]]}})");
  EXPECT_FALSE(metadata.num_seqs);
  EXPECT_FALSE(metadata.world_size);
  EXPECT_TRUE(metadata.num_total_recv_tokens.empty());
}

TEST(metadata_json, data_must_have_the_shape) {
  EXPECT_EQ(metadata_error("[2, 0, 1]", "[2, 0]"),
            "m.json: /dst_rank/data/1 = a list of 2, expected a list of 3, extent 1 of the shape "
            "[3, 3]");
  expect_parts(metadata_error("[2, 0, 1]", "7"), {"/dst_rank/data/1 = 7", "a list"});
  expect_parts(metadata_error("[2, 0, 1]", "[2, [0], 1]"), {"/dst_rank/data/1/1"});
  expect_parts(metadata_error("[2, 0, 1]", "[2, \"0\", 1]"),
               {"/dst_rank/data/1/1 = \"0\"", "an integer"});
  expect_parts(metadata_error("[[1, 2, -1], [2, 0, 1], [0, -1, 2]]", "[1, 2, 3]"),
               {"/dst_rank/data/0 = 1"});
  expect_parts(metadata_error("[3, 3]", "[3, 4]"), {"/dst_rank/data/0"});
  expect_parts(metadata_error("[3, 3]", "[9]"), {"/dst_rank/data"});
}

TEST(metadata_json, a_shape_is_never_allocated_unchecked) {
  expect_parts(metadata_error("[3, 3]", "[1000000000000, 3]"), {"/dst_rank/data", "1000000000000"});
  expect_parts(metadata_error("[3, 3]", "[4611686018427387904, 4611686018427387904]"),
               {"/dst_rank/shape", "2^62"});
  expect_parts(metadata_error("[3, 3]", "[-3, -3]"), {"/dst_rank/shape", "negative"});
  expect_parts(metadata_error("[3, 3]", "[3.0, 3]"), {"/dst_rank/shape/0 = 3.0"});
  expect_parts(metadata_error("[3, 3]", "[1, 1, 1, 1, 1, 1, 1, 1, 9]"), {"/dst_rank/shape", "8"});
  expect_parts(metadata_error("[3, 3]", "3"), {"/dst_rank/shape = 3", "a list"});
}

TEST(metadata_json, dtypes_are_checked_with_their_range) {
  expect_parts(metadata_error("\"int64\"", "\"float32\""),
               {"/dst_rank/dtype = \"float32\"", "int64"});
  expect_parts(metadata_error("\"int64\"", "\"uint32\""),
               {"/dst_rank/data", "data[0, 2] = -1", "uint32"});
  expect_parts(metadata_error("\"int64\"", "\"bool\""), {"/dst_rank/data", "data[0, 1] = 2"});
}

TEST(metadata_json, fields_must_fit_each_other) {
  expect_parts(metadata_error(R"({"shape": [3], "dtype": "int64", "data": [2, 3, 2]})",
                              R"({"shape": [2], "dtype": "int64", "data": [2, 3]})"),
               {"m.json: /: metadata: num_seqs has shape [2], expected [3]"});
  expect_parts(metadata_error("\"world_size\": 3", "\"world_size\": 4"), {"world_size = 4"});
  expect_parts(metadata_error("[18, 14, 22]", "[18, 14]"), {"num_total_recv_tokens"});
  expect_parts(metadata_error("[18, 14, 22]", "\"18\""), {"/num_total_recv_tokens = \"18\""});
}

TEST(metadata_json, negative_counts_are_an_error) {
  expect_parts(metadata_error("[10, 5, 0]", "[10, -5, 0]"), {"/seq_len", "element 1 = -5"});
  expect_parts(metadata_error("[5, 0, 10]", "[5, 0, -10]"), {"/dst_offset", "element 5 = -10"});
  expect_parts(metadata_error("[1, 2, -1]", "[1, 2, -2]"), {"/dst_rank", "element 2 = -2"});
  expect_parts(metadata_error("[18, 14, 22]", "[18, -14, 22]"), {"/num_total_recv_tokens"});
  expect_parts(metadata_error("\"data\": [2, 3, 2]", "\"data\": [2, 3, -2]"), {"/num_seqs"});
}

TEST(metadata_json, form_only_leaves_values_to_the_caller) {
  const std::string text = replaced(to_json(documented_example().fwd), "[10, 5, 0]", "[10, -5, 0]");
  EXPECT_EQ(metadata_from_json(text, "JSON", ReadCheck::form).seq_len.at({0, 1}), -5);
}

TEST(metadata_json, keys_are_checked) {
  expect_parts(metadata_error("\"normalized\"", "\"normalised\""), {"unknown key \"normalised\""});
  expect_parts(metadata_error("\"dtype\": \"int64\", ", ""), {"/dst_rank: the key \"dtype\""});
  expect_parts(metadata_error("\"dtype\": \"int64\", ", "\"dtype\": \"int64\", \"device\": 0, "),
               {"/dst_rank: unknown key \"device\""});
  expect_parts(metadata_error("\"normalized\": false", "\"normalized\": 0"), {"/normalized = 0"});
  expect_parts(metadata_error("waybill.metadata", "waybill.plan"), {"/format", "waybill.metadata"});
  expect_parts(metadata_error("\"version\": 1", "\"version\": 7"), {"/version = 7"});
}

TEST(metadata_json, a_value_over_int64_cannot_be_written) {
  Metadata metadata = documented_example().fwd.normalize_dtype();
  auto* counts = static_cast<std::uint64_t*>(metadata.num_recv_tokens.data());
  counts[0] = std::uint64_t{1} << 63U;
  EXPECT_THROW((void)to_json(metadata), InvalidArgument);
}

TEST(metadata_json, files_read_back_equal) {
  const TemporaryFolder folder;
  const Metadata metadata = with_copies().rev;
  write_metadata(folder / "m.json", metadata);
  EXPECT_EQ(read_metadata(folder / "m.json"), metadata);
  write_metadata(folder / "m.json", metadata, JsonStyle::compact);
  EXPECT_EQ(read_metadata(folder / "m.json"), metadata);
}

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
               {"d.json: /plan: ", "q_dst: rank 0, shard 0"});
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
