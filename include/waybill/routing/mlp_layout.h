#pragma once

#include <cstdint>
#include <string_view>

#include "waybill/core/index_array.h"

namespace waybill {

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
