#pragma once

#include <optional>

#include "waybill/routing/attention_layout.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/compute_metadata_kv.h"

namespace waybill {

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

}  // namespace waybill
