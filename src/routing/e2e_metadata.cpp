#include "waybill/routing/e2e_metadata.h"

#include <utility>

namespace waybill {

E2eMetadata compute_e2e_metadata(const IndexArray& mlp_seq_len, const IndexArray& mlp_num_seqs,
                                 const IndexArray& mlp_q_dispatch, const KvMapping& mapping,
                                 bool return_intermediate) {
  DispatchMetadata q = compute_metadata(mlp_seq_len, mlp_q_dispatch, return_intermediate);
  KvMetadata kv =
      compute_metadata_kv(mapping, mlp_seq_len, mlp_num_seqs, mlp_q_dispatch, return_intermediate);
  E2eMetadata result;
  result.attention = compute_attn_layout_seqlens(mlp_seq_len, mapping.q_to_num_kv_token,
                                                 mlp_q_dispatch, /*leading_zero=*/true,
                                                 /*shard_to_tuple=*/true);
  result.fwd_q = std::move(q.fwd);
  result.rev_q = std::move(q.rev);
  result.fwd_kv = std::move(kv.fwd);
  result.rev_kv = std::move(kv.rev);
  result.q_intermediates = std::move(q.intermediates);
  result.kv_dst_global_seq_id = std::move(kv.kv_dst_global_seq_id);
  return result;
}

}  // namespace waybill
