#include <cstdint>
#include <utility>

#include "arrays.h"
#include "bindings.h"
#include "layout_tuples.h"
#include "metadata_fields.h"
#include "waybill/core/error.h"
#include "waybill/routing/compute_metadata.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

KvMapping mapping_from(const nb::tuple& arrays, const char* who) {
  require(arrays.size() == 5, who, ": got ", arrays.size(), " KV tables, expected 5");
  const auto field = [&](std::size_t i) { return index_array(nb::cast<ArrayArg>(arrays[i]), who); };
  return {field(0), field(1), field(2), field(3), field(4)};
}

/// With callers_seq_len and callers_dispatch the face puts the argument itself into the result.
nb::tuple compute_metadata_py(const ArrayArg& seq_len, const ArrayArg& dispatch, bool intermediate,
                              bool keep_undispatched, bool capsules, bool callers_seq_len,
                              bool callers_dispatch) {
  IndexArray lens = index_array(seq_len, "compute_metadata: seq_len");
  IndexArray dst = index_array(dispatch, "compute_metadata: global_dispatch");
  DispatchMetadata result = unlocked([&] {
    return compute_metadata(std::move(lens), std::move(dst), intermediate,
                            keep_undispatched ? Undispatched::keep : Undispatched::reject);
  });
  if (callers_seq_len) result.rev.recv_seq_lens.reset();
  return nb::make_tuple(fields_of(std::move(result.fwd), {.capsules = capsules,
                                                          .callers_dst_rank = callers_dispatch,
                                                          .callers_seq_len = callers_seq_len}),
                        fields_of(std::move(result.rev), {.capsules = capsules}),
                        intermediate_tuple(std::move(result.intermediates)));
}

nb::tuple compute_metadata_kv_py(const nb::tuple& tables, const ArrayArg& seq_len,
                                 const ArrayArg& num_seqs, const ArrayArg& q_dispatch,
                                 bool intermediate) {
  const KvMapping mapping = mapping_from(tables, "compute_metadata_kv");
  const IndexArray lens = index_array(seq_len, "compute_metadata_kv: seq_len");
  const IndexArray counts = index_array(num_seqs, "compute_metadata_kv: num_seqs");
  const IndexArray dst = index_array(q_dispatch, "compute_metadata_kv: q_dispatch");
  KvMetadata result =
      unlocked([&] { return compute_metadata_kv(mapping, lens, counts, dst, intermediate); });
  return nb::make_tuple(fields_of(std::move(result.fwd)), fields_of(std::move(result.rev)),
                        numpy_or_none(std::move(result.kv_dst_global_seq_id)));
}

nb::tuple compute_attn_layout_py(const ArrayArg& len, const ArrayArg& cumsum, const ArrayArg& dst,
                                 bool leading_zero, bool ragged) {
  const char* who = "compute_attn_layout_seqlens";
  return layout_tuple(compute_attn_layout_seqlens(index_array(len, who), index_array(cumsum, who),
                                                  index_array(dst, who), leading_zero, ragged));
}

nb::tuple compute_e2e_py(const ArrayArg& seq_len, const ArrayArg& num_seqs,
                         const ArrayArg& q_dispatch, const nb::tuple& tables, bool intermediate) {
  const char* who = "compute_e2e_metadata";
  const IndexArray lens = index_array(seq_len, who);
  const IndexArray counts = index_array(num_seqs, who);
  const IndexArray dst = index_array(q_dispatch, who);
  const KvMapping mapping = mapping_from(tables, who);
  return e2e_tuple(
      unlocked([&] { return compute_e2e_metadata(lens, counts, dst, mapping, intermediate); }));
}

}  // namespace

void bind_routing(nb::module_& m) {
  m.def("compute_metadata", compute_metadata_py, "seq_len"_a, "global_dispatch"_a,
        "return_intermediate"_a, "keep_undispatched"_a, "capsules"_a, "callers_seq_len"_a,
        "callers_dispatch"_a);
  m.def("compute_metadata_kv", compute_metadata_kv_py, "tables"_a, "seq_len"_a, "num_seqs"_a,
        "q_dispatch"_a, "return_intermediate"_a);
  m.def("compute_attn_layout_seqlens", compute_attn_layout_py, "seq_shard_len"_a,
        "seq_shard_cumsum"_a, "dispatch"_a, "prepend_zero"_a, "shard_to_tuple"_a);
  m.def("compute_e2e_metadata", compute_e2e_py, "mlp_seq_len"_a, "mlp_num_seqs"_a,
        "mlp_q_dispatch"_a, "tables"_a, "return_intermediate"_a);
  m.def(
      "mlp_layout_packed_params",
      [](const ArrayArg& seq_lens) {
        PackedSeqParams params =
            mlp_layout_packed_params(index_array(seq_lens, "mlp_layout_packed_params: seq_lens"));
        return nb::make_tuple(numpy_array(std::move(params.cu_seqlens_q)), params.max_seqlen_q);
      },
      "seq_lens"_a);
}

}  // namespace waybill::python
