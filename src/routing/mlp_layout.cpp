#include "waybill/routing/mlp_layout.h"

#include <algorithm>

#include "dense_checks.h"
#include "waybill/core/error.h"

namespace waybill {

PackedSeqParams mlp_layout_packed_params(const IndexArray& seq_lens) {
  constexpr const char* who = "mlp_layout_packed_params";
  require(seq_lens.ndim() == 1, who, ": seq_lens has shape ", to_string(seq_lens.shape()),
          ", expected [n]");
  const detail::Int64Table lens(who, "seq_lens", seq_lens);
  detail::check_lengths(who, "seq_lens", *lens);
  PackedSeqParams params;
  params.cu_seqlens_q = IndexArray({lens->size() + 1});
  std::int64_t end = 0;
  for (std::int64_t i = 0; i < lens->size(); ++i) {
    end += lens->flat_at(i);
    params.cu_seqlens_q.i64()[static_cast<std::size_t>(i + 1)] = end;
    params.max_seqlen_q = std::max(params.max_seqlen_q, lens->flat_at(i));
  }
  params.cu_seqlens_kv = params.cu_seqlens_q;
  params.max_seqlen_kv = params.max_seqlen_q;
  return params;
}

}  // namespace waybill
