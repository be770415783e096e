#pragma once

#include <vector>

#include "waybill/core/index_array.h"

namespace waybill {

/// Arguments of variable-length attention on every rank after the forward dispatch. N is the most
/// shards that a rank receives, n_r those of rank r.
struct AttnLayout {
  /// Padded: one array [W, N + 1], where the last sum repeats over the padding. Ragged: W arrays
  /// [n_r + 1]. Without the leading zero each is one shorter. int64, rows.
  std::vector<IndexArray> cu_seqlens_q;
  std::vector<IndexArray>
      cu_seqlens_kv;               ///< empty where KV lies once per rank (KvLayout::per_rank)
  IndexArray max_seqlen_q;         ///< [W]
  IndexArray max_seqlen_kv;        ///< [W]
  IndexArray num_local_seqs_recv;  ///< [W]: n_r
  /// KvLayout::per_rank only, W arrays [n_r]: the rows of the rank's KV buffer that each query
  /// shard reads, kv_begin .. kv_begin + kv_len. Else empty.
  std::vector<IndexArray> kv_begin;
  std::vector<IndexArray> kv_len;

  friend bool operator==(const AttnLayout&, const AttnLayout&) = default;
};

/// Sequence lengths of Q and of its KV context in the attention layout, one copy of KV a query.
/// @param seq_shard_len [W, S] int64, rows of each query shard
/// @param seq_shard_cumsum [W, S] int64, rows of its KV context, itself included
/// @param dispatch [W, S] int64, destination rank, -1 none
/// @param leading_zero put a 0 in front, as attention kernels expect
/// @param shard_to_tuple ragged: one array per rank, cut to what it receives
/// A rank that receives nothing has count 0 and, ragged, cu_seqlens [0].
/// @throws InvalidArgument for wrong shapes, ranks outside -1..W-1 and negative lengths.
[[nodiscard]] AttnLayout compute_attn_layout_seqlens(const IndexArray& seq_shard_len,
                                                     const IndexArray& seq_shard_cumsum,
                                                     const IndexArray& dispatch,
                                                     bool leading_zero = true,
                                                     bool shard_to_tuple = false);

}  // namespace waybill
