#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "metadata_casters.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/routing/index_ops.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

/// The three arrays, or None.
nb::object intermediate_tuple(std::optional<DispatchIntermediates>&& values) {
  if (!values) return nb::none();
  return nb::make_tuple(numpy_array(std::move(values->tokens_to_dst_per_dispatch)),
                        numpy_array(std::move(values->seq_to_dst)),
                        numpy_array(std::move(values->num_received_seqs)));
}

/// With callers_seq_len and callers_dispatch the face puts the argument itself into the result.
nb::tuple compute_metadata_py(IndexArray&& seq_len, IndexArray&& dispatch, bool intermediate,
                              bool keep_undispatched, bool capsules, bool callers_seq_len,
                              bool callers_dispatch) {
  DispatchMetadata result = unlocked([&] {
    return compute_metadata(std::move(seq_len), std::move(dispatch), intermediate,
                            keep_undispatched ? Undispatched::keep : Undispatched::reject);
  });
  if (callers_seq_len) result.rev.recv_seq_lens.reset();
  return nb::make_tuple(
      fields_of(std::move(result.fwd), capsules, callers_dispatch, callers_seq_len),
      fields_of(std::move(result.rev), capsules),
      intermediate_tuple(std::move(result.intermediates)));
}

/// The five tables of a KvMapping, in its order.
using TablesArg = std::tuple<IndexArray, IndexArray, IndexArray, IndexArray, IndexArray>;

KvMetadata compute_metadata_kv_py(TablesArg tables, const IndexArray& seq_len,
                                  const IndexArray& num_seqs, const IndexArray& q_dispatch,
                                  bool intermediate) {
  return compute_metadata_kv(std::make_from_tuple<KvMapping>(std::move(tables)), seq_len, num_seqs,
                             q_dispatch, intermediate);
}

E2eMetadata compute_e2e_py(const IndexArray& seq_len, const IndexArray& num_seqs,
                           const IndexArray& q_dispatch, TablesArg tables, bool intermediate) {
  return compute_e2e_metadata(seq_len, num_seqs, q_dispatch,
                              std::make_from_tuple<KvMapping>(std::move(tables)), intermediate);
}

using Draws = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

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

void bind_generators(nb::module_& m) {
  bind_lengths(m);
  m.def(
      "create_raw_qkv_dispatch",
      [](std::int64_t world_size, std::int64_t total_seq_len, std::int64_t num_seqs,
         std::int64_t max_cp_degree, std::uint64_t seed) {
        return create_raw_qkv_dispatch(world_size, total_seq_len, num_seqs, max_cp_degree, seed);
      },
      "world_size"_a, "total_seq_len"_a, "num_seqs"_a, "max_cp_degree"_a, "seed"_a, pure_call);
  m.def(
      "create_raw_qkv_dispatch_from",
      [](const IndexArray& seq_lens, const IndexArray& cp_num, const IndexArray& cp_dst) {
        return create_raw_qkv_dispatch(seq_lens, cp_num, cp_dst);
      },
      "seq_lens"_a, "cp_num"_a, "cp_dst"_a);
  m.def("create_qkv_dispatch", create_qkv_dispatch, "world_size"_a, "total_seq_len"_a, "num_seqs"_a,
        "max_cp_degree"_a, "seed"_a, "return_intermediate"_a, pure_call);
  m.def("create_qkv_dispatch_with_custom_mapping", create_qkv_dispatch_with_custom_mapping,
        "world_size"_a, "seq_lens"_a, "cp_num"_a, "cp_dst"_a, "seq_shard_lens"_a,
        "return_intermediate"_a, pure_call);
}

}  // namespace

nb::tuple to_tuple(KvMetadata&& metadata) {
  return nb::make_tuple(to_tuple(std::move(metadata.fwd)), to_tuple(std::move(metadata.rev)),
                        numpy_or_none(std::move(metadata.kv_dst_global_seq_id)));
}

nb::tuple to_tuple(AttnLayout&& layout) {
  return nb::make_tuple(
      numpy_arrays(std::move(layout.cu_seqlens_q)), numpy_arrays(std::move(layout.cu_seqlens_kv)),
      numpy_array(std::move(layout.max_seqlen_q)), numpy_array(std::move(layout.max_seqlen_kv)),
      numpy_array(std::move(layout.num_local_seqs_recv)), numpy_arrays(std::move(layout.kv_row)),
      numpy_arrays(std::move(layout.kv_len)));
}

nb::tuple to_tuple(E2eMetadata&& metadata) {
  return nb::make_tuple(to_tuple(std::move(metadata.fwd_q)), to_tuple(std::move(metadata.rev_q)),
                        to_tuple(std::move(metadata.fwd_kv)), to_tuple(std::move(metadata.rev_kv)),
                        to_tuple(std::move(metadata.attention)),
                        intermediate_tuple(std::move(metadata.q_intermediates)),
                        numpy_or_none(std::move(metadata.kv_dst_global_seq_id)));
}

nb::tuple to_tuple(RawQkvDispatch&& raw) {
  return nb::make_tuple(
      numpy_array(std::move(raw.cp_seq_lens)), numpy_array(std::move(raw.num_cp_shards)),
      numpy_array(std::move(raw.cp_query_dst)), numpy_array(std::move(raw.kv.kv_to_q_mapping)),
      numpy_array(std::move(raw.kv.kv_to_q_rank)), numpy_array(std::move(raw.kv.kv_context_size)),
      numpy_array(std::move(raw.kv.q_to_num_kv_seq)),
      numpy_array(std::move(raw.kv.q_to_num_kv_token)));
}

nb::tuple to_tuple(RawQkvDispatchWithLens&& result) {
  return nb::make_tuple(to_tuple(std::move(result.raw)), numpy_array(std::move(result.seq_lens)),
                        std::move(result.plan));
}

nb::tuple to_tuple(QkvDispatch&& result) {
  return nb::make_tuple(to_tuple(std::move(result.metadata)), to_tuple(std::move(result.raw)),
                        numpy_array(std::move(result.seq_lens)), std::move(result.plan));
}

void bind_routing(nb::module_& m) {
  m.def("compute_metadata", compute_metadata_py, "seq_len"_a, "global_dispatch"_a,
        "return_intermediate"_a, "keep_undispatched"_a, "capsules"_a, "callers_seq_len"_a,
        "callers_dispatch"_a);
  m.def("compute_metadata_kv", compute_metadata_kv_py, "tables"_a, "seq_len"_a, "num_seqs"_a,
        "q_dispatch"_a, "return_intermediate"_a, pure_call);
  m.def("compute_attn_layout_seqlens", compute_attn_layout_seqlens, "seq_shard_len"_a,
        "seq_shard_cumsum"_a, "dispatch"_a, "prepend_zero"_a, "shard_to_tuple"_a);
  m.def("compute_e2e_metadata", compute_e2e_py, "mlp_seq_len"_a, "mlp_num_seqs"_a,
        "mlp_q_dispatch"_a, "tables"_a, "return_intermediate"_a, pure_call);
  m.def(
      "mlp_layout_packed_params",
      [](const IndexArray& seq_lens) {
        PackedSeqParams params = mlp_layout_packed_params(seq_lens);
        return nb::make_tuple(numpy_array(std::move(params.cu_seqlens_q)), params.max_seqlen_q);
      },
      "seq_lens"_a);
  m.def("exclusive_cumsum", exclusive_cumsum, "array"_a, "dim"_a);
  m.def("prepend_zero", prepend_zero, "array"_a, "dim"_a);
  m.def("mask_by_neg", mask_by_neg, "array"_a, "mask"_a);
  m.def("index_put_with_neg_padding_1d", index_put_with_neg_padding_1d, "array"_a, "src"_a,
        "index"_a);
  bind_generators(m);
}

}  // namespace waybill::python
