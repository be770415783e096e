#include "golden/record.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/index_ops.h"

// The suites have the names of the functions, so these are called with their namespace.
namespace waybill::golden {
namespace {

WAYBILL_GOLDEN(exclusive_cumsum, "exclusive_cumsum") {
  expect_equal("result", waybill::exclusive_cumsum(array(in("tensor")), in("dim")),
               array(out("result")));
}

WAYBILL_GOLDEN(prepend_zero, "prepend_zero_fn") {
  expect_equal("result", waybill::prepend_zero(array(in("tensor")), in("dim")),
               array(out("result")));
}

WAYBILL_GOLDEN(mask_by_neg, "mask_by_neg") {
  expect_equal("result", waybill::mask_by_neg(array(in("tensor")), array(in("mask"))),
               array(out("result")));
}

WAYBILL_GOLDEN(index_put_with_neg_padding_1d, "index_put_with_neg_padding_1d") {
  const IndexArray got = waybill::index_put_with_neg_padding_1d(
      array(in("tensor")), array(in("src")), array(in("index")));
  expect_equal("result", got, array(out("result")));
}

WAYBILL_GOLDEN(gen_seq_lens, "gen_seq_lens") {
  std::vector<float> uniforms;
  add_leaves(in("uniforms").at("data"), uniforms);
  const IndexArray got =
      waybill::gen_seq_lens(in("world_size"), in("num_seqs"), in("total_len"), uniforms);
  expect_equal("seq_len", got, array(out("seq_len")));
}

WAYBILL_GOLDEN(mlp_layout_packed_params, "mlp_layout_packed_params") {
  const PackedSeqParams got = waybill::mlp_layout_packed_params(array(in("seq_lens")));
  EXPECT_EQ(got.qkv_format, out("qkv_format").get<std::string>());
  expect_equal("cu_seqlens_q", got.cu_seqlens_q, array(out("cu_seqlens_q")));
  expect_equal("cu_seqlens_kv", got.cu_seqlens_kv, array(out("cu_seqlens_kv")));
  EXPECT_EQ(got.max_seqlen_q, array(out("max_seqlen_q")).flat_at(0));
  EXPECT_EQ(got.max_seqlen_kv, array(out("max_seqlen_kv")).flat_at(0));
}

}  // namespace
}  // namespace waybill::golden
