#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "waybill/core/index_array.h"
#include "waybill/routing/metadata.h"

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
  /// shard reads, kv_row .. kv_row + kv_len. Else empty.
  std::vector<IndexArray> kv_row;
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

/// Intermediate tables of compute_metadata, for checking. C = 1 for a 2-D dispatch.
struct DispatchIntermediates {
  IndexArray tokens_to_dst_per_dispatch;  ///< [W, S, C, W]: length at the destination, else 0
  IndexArray seq_to_dst;                  ///< [W, S, C, W]: one-hot of the destination
  IndexArray num_received_seqs;           ///< [W]: shards (copies) a rank receives

  friend bool operator==(const DispatchIntermediates&, const DispatchIntermediates&) = default;
};

/// Forward (MLP layout to attention layout) and reverse metadata of one dispatch.
struct DispatchMetadata {
  Metadata fwd;
  Metadata rev;
  std::optional<DispatchIntermediates> intermediates;
};

/// The meaning of a shard with rows but without destination.
enum class Undispatched {
  reject,  ///< an error: its tokens would be lost
  keep,    ///< it stays at home: its rows are skipped and never sent
};

/// Routing of Q (2-D) or of any tensor whose shards go to several ranks (3-D).
///
/// Every destination buffer is filled without gaps in the global order (source rank, shard, copy).
/// The reverse metadata is a send table of the receiving rank: its t-th entry is the t-th shard it
/// received; the rows return to `copy * T + begin`, where T is the home rank's number of rows and
/// begin the shard's first row there (so copies land in planes of T rows).
///
/// The arguments become part of the result: move them in where they are not needed any more.
/// Tables of any type of integers are taken; those of the result are int64.
/// @param seq_len [W, S], rows of each shard in the MLP layout
/// @param global_dispatch [W, S] or [W, S, C], destination rank of the shard (copy), -1 none
/// @throws InvalidArgument for wrong shapes, a rank outside -1..W-1, a negative length, more than
///   2^40 rows in all, and for a shard with rows but without destination unless `undispatched` is
///   keep.
[[nodiscard]] DispatchMetadata compute_metadata(IndexArray seq_len, IndexArray global_dispatch,
                                                bool return_intermediate = false,
                                                Undispatched undispatched = Undispatched::reject);

/// Which KV shards serve which queries, in DistCA's dense form. W = world_size, S = most
/// shards on a rank, C = most queries that a KV shard serves. All int64.
struct KvMapping {
  IndexArray kv_to_q_mapping;    ///< [W, S, C, 2]: (query rank, query shard); -1, -1 unused
  IndexArray kv_to_q_rank;       ///< [W, S, C]: place among the query's KV shards, -1 unused
  IndexArray kv_context_size;    ///< [W, S]: rows of the document before this KV shard
  IndexArray q_to_num_kv_seq;    ///< [W, S]: KV shards of the query
  IndexArray q_to_num_kv_token;  ///< [W, S]: their rows

  friend bool operator==(const KvMapping&, const KvMapping&) = default;
};

struct KvMetadata {
  Metadata fwd;
  Metadata rev;
  /// [W, S, C], on request: attention rank * R + place in its KV order, -1 unused; R is the most
  /// KV shards on a rank.
  std::optional<IndexArray> kv_dst_global_seq_id;
};

/// Routing of K and V when each query keeps a contiguous copy of its whole context.
///
/// A KV copy goes where its query goes. The destination buffer has one group per query, in the
/// global order of the queries; inside a group the KV shards are in document order. The reverse
/// metadata sends gradients back in that order, to `copy * T + begin` (see compute_metadata).
/// Counts are kept by the KV shard's own rank, which also holds when a document's shards and its
/// queries live on different ranks (DistCA attributes them to the query's rank).
///
/// Tables of any type of integers are taken; those of the result are int64.
/// @param seq_len [W, S]; @param num_seqs [W] or [W, 1]; @param q_dispatch [W, S], -1 none
/// @throws InvalidArgument for wrong shapes, ranks and query indices out of range, negative
///   values, a copy whose query has no destination, and for KV shards that do not tile the context
///   of their query without gap or overlap.
[[nodiscard]] KvMetadata compute_metadata_kv(const KvMapping& mapping, const IndexArray& seq_len,
                                             const IndexArray& num_seqs,
                                             const IndexArray& q_dispatch,
                                             bool return_intermediate = false);

/// Everything that one attention step needs, in the dense form.
struct E2eMetadata {
  Metadata fwd_q;
  Metadata rev_q;
  Metadata fwd_kv;
  Metadata rev_kv;
  AttnLayout attention;  ///< leading zero, ragged
  std::optional<DispatchIntermediates> q_intermediates;
  std::optional<IndexArray> kv_dst_global_seq_id;

  friend bool operator==(const E2eMetadata&, const E2eMetadata&) = default;
};

/// compute_metadata, compute_metadata_kv and compute_attn_layout_seqlens in one call.
/// Arguments and errors are theirs: `mlp_seq_len` [W, S], `mlp_num_seqs` [W],
/// `mlp_q_dispatch` [W, S].
[[nodiscard]] E2eMetadata compute_e2e_metadata(const IndexArray& mlp_seq_len,
                                               const IndexArray& mlp_num_seqs,
                                               const IndexArray& mlp_q_dispatch,
                                               const KvMapping& mapping,
                                               bool return_intermediate = false);

/// Arguments of variable-length attention (and rotary embedding) in the MLP layout of one rank,
/// where Q and KV have the same lengths.
struct PackedSeqParams {
  std::string_view qkv_format = "thd";  ///< tokens, heads, head size
  IndexArray cu_seqlens_q;              ///< [n + 1] int64, leading 0
  IndexArray cu_seqlens_kv;             ///< [n + 1]
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_kv = 0;
};

/// @param seq_lens [n], rows of the sequences on this rank; n = 0 gives cu_seqlens [0], maximum 0
/// @throws InvalidArgument unless 1-D without negative values.
[[nodiscard]] PackedSeqParams mlp_layout_packed_params(const IndexArray& seq_lens);

}  // namespace waybill
