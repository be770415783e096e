#include "golden/record.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::golden {
namespace {

/// DistCA reports one shard and a stray zero for a rank that receives nothing (R3), so its
/// layout is not recorded there. What is right follows from the dispatch alone.
void expect_empty_ranks_are_empty(const AttnLayout& layout, const IndexArray& dispatch) {
  const IndexArray no_rows({1}, std::vector<std::int64_t>{0});
  std::vector<std::int64_t> received(static_cast<std::size_t>(dispatch.dim(0)));
  for (const std::int64_t rank : dispatch.to_vector()) {
    if (rank >= 0) ++received[static_cast<std::size_t>(rank)];
  }
  int num_empty = 0;
  for (std::size_t r = 0; r < received.size(); ++r) {
    EXPECT_EQ(layout.num_local_seqs_recv.flat_at(static_cast<std::int64_t>(r)), received[r]);
    if (received[r] > 0) continue;
    ++num_empty;
    EXPECT_EQ(layout.cu_seqlens_q.at(r), no_rows) << "rank " << r;
    EXPECT_EQ(layout.cu_seqlens_kv.at(r), no_rows) << "rank " << r;
    EXPECT_EQ(layout.max_seqlen_q.flat_at(static_cast<std::int64_t>(r)), 0) << "rank " << r;
  }
  EXPECT_GT(num_empty, 0) << "the record has no attention layout without need";
}

void expect_record(const E2eMetadata& got, const Json& expected, const IndexArray& dispatch) {
  expect_equal("fwd_q", got.fwd_q, metadata(expected.at("fwd_q")));
  expect_equal("rev_q", got.rev_q, metadata(expected.at("rev_q")));
  expect_equal("fwd_kv", got.fwd_kv, metadata(expected.at("fwd_k")));
  expect_equal("rev_kv", got.rev_kv, metadata(expected.at("rev_k")));
  if (expected.at("attention").is_null()) {
    expect_empty_ranks_are_empty(got.attention, dispatch);
  } else {
    expect_equal(got.attention, expected.at("attention"));
  }
}

void expect_same(const E2eMetadata& got, const E2eMetadata& expected) {
  expect_equal("fwd_q", got.fwd_q, expected.fwd_q);
  expect_equal("rev_q", got.rev_q, expected.rev_q);
  expect_equal("fwd_kv", got.fwd_kv, expected.fwd_kv);
  expect_equal("rev_kv", got.rev_kv, expected.rev_kv);
  EXPECT_TRUE(got.attention == expected.attention);
}

void expect_equal_ids(const std::optional<IndexArray>& got, const Json& expected) {
  if (expected.is_null()) return;  // too long to record; its size depends on the plan
  expect_equal("kv_dst_global_seq_id", got, std::optional(array(expected)));
}

RawQkvDispatch raw_plan(const Json& inputs) {
  return {array(inputs.at("cp_seq_lens")), array(inputs.at("num_cp_shards")),
          array(inputs.at("cp_query_dst")), kv_mapping(inputs, "q_to_num_kv_tokens")};
}

void expect_same(const RawQkvDispatch& got, const RawQkvDispatch& expected) {
  expect_equal("cp_seq_lens", got.cp_seq_lens, expected.cp_seq_lens);
  expect_equal("num_cp_shards", got.num_cp_shards, expected.num_cp_shards);
  expect_equal("cp_query_dst", got.cp_query_dst, expected.cp_query_dst);
  expect_equal("kv_to_q_mapping", got.kv.kv_to_q_mapping, expected.kv.kv_to_q_mapping);
  expect_equal("kv_to_q_rank", got.kv.kv_to_q_rank, expected.kv.kv_to_q_rank);
  expect_equal("kv_context_size", got.kv.kv_context_size, expected.kv.kv_context_size);
  expect_equal("q_to_num_kv_seq", got.kv.q_to_num_kv_seq, expected.kv.q_to_num_kv_seq);
  expect_equal("q_to_num_kv_token", got.kv.q_to_num_kv_token, expected.kv.q_to_num_kv_token);
}

WAYBILL_GOLDEN(create_qkv_dispatch, "create_qkv_dispatch") {
  const RawQkvDispatch raw = raw_plan(inputs());
  const E2eMetadata got =
      compute_e2e_metadata(raw.cp_seq_lens, raw.num_cp_shards, raw.cp_query_dst, raw.kv, true);
  expect_record(got, outputs(), raw.cp_query_dst);
  ASSERT_TRUE(got.kv_dst_global_seq_id);
  expect_equal_ids(got.kv_dst_global_seq_id, out("kv_dst_global_seq_id"));
}

WAYBILL_GOLDEN(create_qkv_dispatch_with_custom_mapping, "create_qkv_dispatch_with_custom_mapping") {
  const IndexArray seq_lens = array(in("seq_lens"));
  const IndexArray cp_dst = array(in("cp_dst"));
  const QkvDispatch got = waybill::create_qkv_dispatch_with_custom_mapping(
      in("world_size"), seq_lens, array(in("cp_num")), cp_dst, array(in("seq_shard_lens")), true);
  const RawQkvDispatch raw = raw_plan(inputs());
  expect_same(got.raw, raw);
  expect_record(got.metadata, outputs(), raw.cp_query_dst);
  expect_equal_ids(got.metadata.kv_dst_global_seq_id, out("kv_dst_global_seq_id"));
  expect_equal("seq_lens", got.seq_lens, seq_lens);

  // The sparse way must end at the same place.
  expect_same(to_raw_dispatch(got.plan, cp_dst.shape().back()), raw);
  EXPECT_EQ(got.plan.kv_layout, KvLayout::per_query);
  const RawQkvDispatch own = to_raw_dispatch(got.plan);
  expect_same(to_dense(compute_qkv_routing(got.plan)),
              compute_e2e_metadata(own.cp_seq_lens, own.num_cp_shards, own.cp_query_dst, own.kv));
}

}  // namespace
}  // namespace waybill::golden
