#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/validate.h"

namespace waybill::python {

namespace nb = nanobind;

/// The ten fields of Metadata in the order of its declaration: arrays or None, world_size, the
/// flag, and the totals as a list, one number (a slice) or None. The Python class is made of them.
using Fields = nb::tuple;

/// @throws InvalidArgument naming the field.
[[nodiscard]] Metadata metadata_from(const Fields& fields);

/// How a face takes the fields.
struct FieldsForm {
  bool capsules = false;          ///< DLPack capsules instead of numpy arrays
  bool callers_dst_rank = false;  ///< None stands there: the caller has it
  bool callers_seq_len = false;
};

[[nodiscard]] Fields fields_of(Metadata&& metadata, FieldsForm form = {});

/// (kind, table, field, rank, shard, copy, got, expected, text) of each.
[[nodiscard]] nb::list finding_tuples(const std::vector<Finding>& findings);

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
