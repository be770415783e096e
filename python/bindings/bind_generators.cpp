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
#include "layout_tuples.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/routing/generators.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

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

}  // namespace

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

}  // namespace waybill::python
