#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "metadata_fields.h"
#include "waybill/core/error.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/compute_metadata_kv.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/index_ops.h"
#include "waybill/routing/mlp_layout.h"

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

using Draws = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

/// (eight arrays, seq_lens, plan)
nb::tuple raw_result(RawQkvDispatchWithLens&& result) {
  return nb::make_tuple(raw_tuple(std::move(result.raw)), numpy_array(std::move(result.seq_lens)),
                        std::move(result.plan));
}

/// (metadata, eight arrays, seq_lens, plan)
nb::tuple dispatch_result(QkvDispatch&& result) {
  return nb::make_tuple(e2e_tuple(std::move(result.metadata)), raw_tuple(std::move(result.raw)),
                        numpy_array(std::move(result.seq_lens)), std::move(result.plan));
}

void bind_lengths(nb::module_& m) {
  m.def(
      "gen_seq_lens",
      [](std::int64_t world_size, std::int64_t num_seqs, std::int64_t total_len,
         std::uint64_t seed) {
        return numpy_array(
            unlocked([&] { return gen_seq_lens(world_size, num_seqs, total_len, seed); }));
      },
      "world_size"_a, "num_seqs"_a, "total_len"_a, "seed"_a);
  m.def(
      "gen_seq_lens_from",
      [](std::int64_t world_size, std::int64_t num_seqs, std::int64_t total_len,
         const Draws& uniforms) {
        const std::span<const float> draws(uniforms.data(), uniforms.size());
        return numpy_array(
            unlocked([&] { return gen_seq_lens(world_size, num_seqs, total_len, draws); }));
      },
      "world_size"_a, "num_seqs"_a, "total_len"_a, "uniforms"_a);
  m.def("length_distributions", [] {
    std::vector<std::string> names;
    for (const LengthDistribution& d : builtin_length_distributions()) names.push_back(d.name);
    return names;
  });
  m.def(
      "sample_documents",
      [](std::string_view name, std::int64_t num_tokens, std::uint64_t seed) {
        return numpy_array(unlocked(
            [&] { return sample_documents(length_distribution(name), num_tokens, seed); }));
      },
      "distribution"_a, "num_tokens"_a, "seed"_a);
}

void bind_index_ops(nb::module_& m) {
  m.def(
      "exclusive_cumsum",
      [](const ArrayArg& array, std::int64_t dim) {
        return numpy_array(exclusive_cumsum(index_array(array, "exclusive_cumsum: array"), dim));
      },
      "array"_a, "dim"_a);
  m.def(
      "prepend_zero",
      [](const ArrayArg& array, std::int64_t dim) {
        return numpy_array(prepend_zero(index_array(array, "prepend_zero: array"), dim));
      },
      "array"_a, "dim"_a);
  m.def(
      "mask_by_neg",
      [](const ArrayArg& array, const ArrayArg& mask) {
        return numpy_array(mask_by_neg(index_array(array, "mask_by_neg: array"),
                                       index_array(mask, "mask_by_neg: mask")));
      },
      "array"_a, "mask"_a);
  m.def(
      "index_put_with_neg_padding_1d",
      [](const ArrayArg& array, const ArrayArg& src, const ArrayArg& index) {
        return numpy_array(index_put_with_neg_padding_1d(
            index_array(array, "index_put_with_neg_padding_1d: array"),
            index_array(src, "index_put_with_neg_padding_1d: src"),
            index_array(index, "index_put_with_neg_padding_1d: index")));
      },
      "array"_a, "src"_a, "index"_a);
}

void bind_generators(nb::module_& m) {
  bind_lengths(m);
  m.def(
      "create_raw_qkv_dispatch",
      [](std::int64_t world_size, std::int64_t total_seq_len, std::int64_t num_seqs,
         std::int64_t max_cp_degree, std::uint64_t seed) {
        return raw_result(unlocked([&] {
          return create_raw_qkv_dispatch(world_size, total_seq_len, num_seqs, max_cp_degree, seed);
        }));
      },
      "world_size"_a, "total_seq_len"_a, "num_seqs"_a, "max_cp_degree"_a, "seed"_a);
  m.def(
      "create_raw_qkv_dispatch_from",
      [](const ArrayArg& seq_lens, const ArrayArg& cp_num, const ArrayArg& cp_dst) {
        return raw_result(
            create_raw_qkv_dispatch(index_array(seq_lens, "create_raw_qkv_dispatch: seq_lens"),
                                    index_array(cp_num, "create_raw_qkv_dispatch: cp_num"),
                                    index_array(cp_dst, "create_raw_qkv_dispatch: cp_dst")));
      },
      "seq_lens"_a, "cp_num"_a, "cp_dst"_a);
  m.def(
      "create_qkv_dispatch",
      [](std::int64_t world_size, std::int64_t total_seq_len, std::int64_t num_seqs,
         std::int64_t max_cp_degree, std::uint64_t seed, bool intermediate) {
        return dispatch_result(unlocked([&] {
          return create_qkv_dispatch(world_size, total_seq_len, num_seqs, max_cp_degree, seed,
                                     intermediate);
        }));
      },
      "world_size"_a, "total_seq_len"_a, "num_seqs"_a, "max_cp_degree"_a, "seed"_a,
      "return_intermediate"_a);
  m.def(
      "create_qkv_dispatch_with_custom_mapping",
      [](std::int64_t world_size, const ArrayArg& seq_lens, const ArrayArg& cp_num,
         const ArrayArg& cp_dst, const ArrayArg& seq_shard_lens, bool intermediate) {
        const char* who = "create_qkv_dispatch_with_custom_mapping";
        const IndexArray lens = index_array(seq_lens, who);
        const IndexArray num = index_array(cp_num, who);
        const IndexArray dst = index_array(cp_dst, who);
        const IndexArray shards = index_array(seq_shard_lens, who);
        return dispatch_result(unlocked([&] {
          return create_qkv_dispatch_with_custom_mapping(world_size, lens, num, dst, shards,
                                                         intermediate);
        }));
      },
      "world_size"_a, "seq_lens"_a, "cp_num"_a, "cp_dst"_a, "seq_shard_lens"_a,
      "return_intermediate"_a);
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
  bind_index_ops(m);
  bind_generators(m);
}

}  // namespace waybill::python
