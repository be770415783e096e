#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/generators.h"

namespace waybill::python {

namespace nb = nanobind;

/// The three arrays, or None.
[[nodiscard]] nb::object intermediate_tuple(std::optional<DispatchIntermediates>&& values);

/// (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, num_local_seqs_recv, kv_begin,
/// kv_len); lists of arrays where AttnLayout has vectors.
[[nodiscard]] nb::tuple layout_tuple(AttnLayout&& layout);

/// (fwd_q, rev_q, fwd_kv, rev_kv, layout, q intermediates or None, kv_dst_global_seq_id or None)
[[nodiscard]] nb::tuple e2e_tuple(E2eMetadata&& metadata);

/// The eight arrays of a plan in dense form, in the order in which DistCA returns them.
[[nodiscard]] nb::tuple raw_tuple(RawQkvDispatch&& raw);

}  // namespace waybill::python
