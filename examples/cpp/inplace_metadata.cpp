// DistCA's notes on inplace_metadata.py, in C++: the helpers, and compute_metadata with the tables
// of its log. Ends with 0 when all holds, else with 1.

#include <cstdint>
#include <iostream>
#include <string_view>
#include <vector>

#include "waybill/plan.h"

namespace {

using namespace waybill;

int num_failures = 0;

/// Prints a table as the notes do, and compares it with theirs.
void check(std::string_view name, const IndexArray& got, const IndexArray& theirs) {
  const bool same = got.to(DType::int64) == theirs.to(DType::int64);
  std::cout << (same ? "  ok      " : "  FAILED  ") << name << " = " << to_string(got) << "\n";
  num_failures += same ? 0 : 1;
}

void helpers() {
  const auto vector = [](IndexArray::Row values) { return IndexArray::vector(values); };
  check("exclusive_cumsum", exclusive_cumsum(vector({0, 1, 2, 3, 4, 5})),
        vector({0, 0, 1, 3, 6, 10}));
  check("mask_by_neg", mask_by_neg(vector({1, 1, 1}), vector({1, 1, 0})), vector({1, 1, -1}));
  check("index_put_with_neg_padding_1d",
        index_put_with_neg_padding_1d(vector({1, 2, 3, 4}), vector({10, 11, 12, 13}),
                                      vector({1, 2, 3, -1})),
        vector({1, 10, 11, 12}));
  check("mlp_layout_packed_params", mlp_layout_packed_params(vector({10, 5, 4})).cu_seqlens_q,
        vector({0, 10, 15, 19}));
}

void metadata_of_the_log() {
  const IndexArray seq_len = IndexArray::matrix({{10, 5, 0}, {8, 12, 4}, {6, 0, 9}});
  const IndexArray global_dispatch =
      IndexArray::cube({{{1}, {2}, {-1}}, {{2}, {0}, {1}}, {{0}, {-1}, {2}}});
  const auto [fwd, rev, intermediates] = compute_metadata(seq_len, global_dispatch, true);
  check("dst_rank", fwd.dst_rank, global_dispatch);
  check("dst_offset", fwd.dst_offset,
        IndexArray::cube({{{0}, {0}, {0}}, {{5}, {0}, {10}}, {{12}, {0}, {13}}}));
  check("seq_len", fwd.seq_len, seq_len);
  check("num_recv_tokens", fwd.num_recv_tokens,
        IndexArray::matrix({{0, 12, 6, 18}, {10, 4, 0, 14}, {5, 8, 9, 22}}));
  check("num_seqs", *fwd.num_seqs, IndexArray::vector({2, 3, 2}));
  check("num_total_recv_tokens", IndexArray(Shape{3}, fwd.num_total_recv_tokens),
        IndexArray::vector({18, 14, 22}));
  check("num_received_seqs", intermediates->num_received_seqs, IndexArray::vector({2, 2, 3}));
  num_failures += validate(fwd, rev).empty() ? 0 : 1;
}

/// compute_metadata_kv and compute_attn_layout_seqlens, of a random plan of create_qkv_dispatch.
void keys_and_values() {
  const QkvDispatch made = create_qkv_dispatch(4, 64, 3, /*max_cp_degree=*/4, /*seed=*/1);
  const RawQkvDispatch& raw = made.raw;
  const KvMetadata kv =
      compute_metadata_kv(raw.kv, raw.cp_seq_lens, raw.num_cp_shards, raw.cp_query_dst);
  num_failures += kv.fwd == made.metadata.fwd_kv ? 0 : 1;
  const AttnLayout layout = compute_attn_layout_seqlens(
      raw.cp_seq_lens, raw.kv.q_to_num_kv_token, raw.cp_query_dst, true, /*shard_to_tuple=*/true);
  check("cu_seqlens_q of rank 0", layout.cu_seqlens_q[0], made.metadata.attention.cu_seqlens_q[0]);
  check("cu_seqlens_kv of rank 0", layout.cu_seqlens_kv[0],
        made.metadata.attention.cu_seqlens_kv[0]);
}

}  // namespace

int main() {
  try {
    helpers();
    metadata_of_the_log();
    keys_and_values();
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
  return num_failures == 0 ? 0 : 1;
}
