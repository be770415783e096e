#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "metadata_fields.h"
#include "waybill/core/error.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/index_ops.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

/// With callers_seq_len and callers_dispatch the face puts the argument itself into the result.
nb::tuple compute_metadata_py(IndexArray&& seq_len, IndexArray&& dispatch, bool intermediate,
                              bool keep_undispatched, bool capsules, bool callers_seq_len,
                              bool callers_dispatch) {
  DispatchMetadata result = unlocked([&] {
    return compute_metadata(std::move(seq_len), std::move(dispatch), intermediate,
                            keep_undispatched ? Undispatched::keep : Undispatched::reject);
  });
  if (callers_seq_len) result.rev.recv_seq_lens.reset();
  return nb::make_tuple(fields_of(std::move(result.fwd), {.capsules = capsules,
                                                          .callers_dst_rank = callers_dispatch,
                                                          .callers_seq_len = callers_seq_len}),
                        fields_of(std::move(result.rev), {.capsules = capsules}),
                        intermediate_tuple(std::move(result.intermediates)));
}

/// The five tables of a KvMapping, in its order.
using TablesArg = std::tuple<IndexArray, IndexArray, IndexArray, IndexArray, IndexArray>;

KvMapping mapping_from(TablesArg&& tables) {
  return std::make_from_tuple<KvMapping>(std::move(tables));
}

nb::tuple compute_metadata_kv_py(TablesArg tables, const IndexArray& seq_len,
                                 const IndexArray& num_seqs, const IndexArray& q_dispatch,
                                 bool intermediate) {
  const KvMapping mapping = mapping_from(std::move(tables));
  KvMetadata result = unlocked(
      [&] { return compute_metadata_kv(mapping, seq_len, num_seqs, q_dispatch, intermediate); });
  return nb::make_tuple(fields_of(std::move(result.fwd)), fields_of(std::move(result.rev)),
                        numpy_or_none(std::move(result.kv_dst_global_seq_id)));
}

nb::tuple compute_attn_layout_py(const IndexArray& len, const IndexArray& cumsum,
                                 const IndexArray& dst, bool leading_zero, bool ragged) {
  return layout_tuple(compute_attn_layout_seqlens(len, cumsum, dst, leading_zero, ragged));
}

nb::tuple compute_e2e_py(const IndexArray& seq_len, const IndexArray& num_seqs,
                         const IndexArray& q_dispatch, TablesArg tables, bool intermediate) {
  const KvMapping mapping = mapping_from(std::move(tables));
  return e2e_tuple(unlocked(
      [&] { return compute_e2e_metadata(seq_len, num_seqs, q_dispatch, mapping, intermediate); }));
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
  m.def("exclusive_cumsum", exclusive_cumsum, "array"_a, "dim"_a);
  m.def("prepend_zero", prepend_zero, "array"_a, "dim"_a);
  m.def("mask_by_neg", mask_by_neg, "array"_a, "mask"_a);
  m.def("index_put_with_neg_padding_1d", index_put_with_neg_padding_1d, "array"_a, "src"_a,
        "index"_a);
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
      [](const IndexArray& seq_lens, const IndexArray& cp_num, const IndexArray& cp_dst) {
        return raw_result(create_raw_qkv_dispatch(seq_lens, cp_num, cp_dst));
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
      [](std::int64_t world_size, const IndexArray& seq_lens, const IndexArray& cp_num,
         const IndexArray& cp_dst, const IndexArray& seq_shard_lens, bool intermediate) {
        return dispatch_result(unlocked([&] {
          return create_qkv_dispatch_with_custom_mapping(world_size, seq_lens, cp_num, cp_dst,
                                                         seq_shard_lens, intermediate);
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
      [](const IndexArray& seq_lens) {
        PackedSeqParams params = mlp_layout_packed_params(seq_lens);
        return nb::make_tuple(numpy_array(std::move(params.cu_seqlens_q)), params.max_seqlen_q);
      },
      "seq_lens"_a);
  bind_index_ops(m);
  bind_generators(m);
}

}  // namespace waybill::python
