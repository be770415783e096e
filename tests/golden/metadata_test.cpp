#include "golden/record.h"
#include "waybill/routing/compute_metadata.h"

namespace waybill::golden {
namespace {

WAYBILL_GOLDEN(compute_metadata, "compute_metadata") {
  const bool wanted = in("return_intermediate");
  const DispatchMetadata got =
      waybill::compute_metadata(array(in("seq_len")), array(in("global_dispatch")), wanted);
  expect_equal("fwd", got.fwd, metadata(out("fwd")));
  expect_equal("rev", got.rev, metadata(out("rev")));
  ASSERT_EQ(got.intermediates.has_value(), wanted);
  ASSERT_EQ(outputs().contains("intermediates"), wanted);
  if (!wanted) return;
  const Json& expected = out("intermediates");
  EXPECT_EQ(expected.size(), 3U);
  expect_equal("tokens_to_dst_per_dispatch", got.intermediates->tokens_to_dst_per_dispatch,
               array(expected.at("tokens_to_dst_per_dispatch")));
  expect_equal("seq_to_dst", got.intermediates->seq_to_dst, array(expected.at("seq_to_dst")));
  expect_equal("num_received_seqs", got.intermediates->num_received_seqs,
               array(expected.at("num_received_seqs")));
}

WAYBILL_GOLDEN(compute_metadata_kv, "compute_metadata_kv") {
  const KvMetadata got = waybill::compute_metadata_kv(
      kv_mapping(inputs(), "q_to_num_kv_token"), array(in("seq_len")), array(in("num_seqs")),
      array(in("q_dispatch")), in("return_intermediate"));
  expect_equal("fwd", got.fwd, metadata(out("fwd")));
  expect_equal("rev", got.rev, metadata(out("rev")));
  expect_equal("kv_dst_global_seq_id", got.kv_dst_global_seq_id,
               std::optional(array(out("kv_dst_global_seq_id"))));
}

WAYBILL_GOLDEN(compute_attn_layout_seqlens, "compute_attn_layout_seqlens") {
  const AttnLayout got = waybill::compute_attn_layout_seqlens(
      array(in("seq_shard_len")), array(in("seq_shard_cumsum")), array(in("dispatch")),
      in("prepend_zero"), in("shard_to_tuple"));
  expect_equal(got, outputs());
}

WAYBILL_GOLDEN(compute_e2e_metadata, "compute_e2e_metadata") {
  const E2eMetadata got = waybill::compute_e2e_metadata(
      array(in("mlp_seq_len")), array(in("mlp_num_seqs")), array(in("mlp_q_dispatch")),
      kv_mapping(inputs(), "q_to_num_kv_token"));
  expect_equal("fwd_q", got.fwd_q, metadata(out("fwd_q")));
  expect_equal("rev_q", got.rev_q, metadata(out("rev_q")));
  expect_equal("fwd_kv", got.fwd_kv, metadata(out("fwd_kv")));
  expect_equal("rev_kv", got.rev_kv, metadata(out("rev_kv")));
  expect_equal(got.attention, out("fa_params"));
  EXPECT_FALSE(got.q_intermediates);
  EXPECT_FALSE(got.kv_dst_global_seq_id);
}

WAYBILL_GOLDEN(get_slice, "Metadata.get_slice") {
  const Metadata whole = metadata(in("metadata"));
  const Json& ranks = in("ranks");
  ASSERT_EQ(ranks.size(), out("slices").size());
  ASSERT_FALSE(ranks.empty());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const Rank rank{ranks[i].get<std::int32_t>()};
    expect_equal(concat("slice of rank ", rank), whole.get_slice(rank), metadata(out("slices")[i]));
  }
}

WAYBILL_GOLDEN(normalize_dtype, "Metadata.normalize_dtype") {
  expect_equal("normalized", metadata(in("metadata")).normalize_dtype(), metadata(out("metadata")));
}

}  // namespace
}  // namespace waybill::golden
