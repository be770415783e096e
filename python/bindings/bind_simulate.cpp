#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "metadata_fields.h"
#include "moe/option_names.h"
#include "waybill/core/error.h"
#include "waybill/simulate/check.h"
#include "waybill/simulate/orchestrate.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

constexpr std::array<std::string_view, 2> overlap_names{"reject", "last_wins"};

SimulateOptions simulate_options(const std::string& who, std::string_view overlap,
                                 int num_threads) {
  return {detail::option_of<Overlap>(overlap_names, overlap, (who + ": overlap").c_str()),
          num_threads};
}

void orchestrate_py(const PayloadArg& tensor, std::string_view tensor_dtype,
                    const OutputArg& output, std::string_view output_dtype, const Fields& fields,
                    std::string_view overlap, int num_threads) {
  const Metadata metadata = metadata_from(fields);
  const ConstTensorView from = tensor_view(tensor, tensor_dtype);
  const TensorView to = tensor_view(output, output_dtype);
  const SimulateOptions options = simulate_options("orchestrate_simulate", overlap, num_threads);
  unlocked([&] { orchestrate_simulate(from, to, metadata, options); });
}

nb::list communicate_py(const std::vector<PayloadArg>& tensors, std::string_view dtype,
                        const Fields& fields, std::string_view overlap, int num_threads) {
  const Metadata metadata = metadata_from(fields);
  std::vector<ConstTensorView> views;
  for (const PayloadArg& tensor : tensors) views.push_back(tensor_view(tensor, dtype));
  const SimulateOptions options = simulate_options("simulate_communication", overlap, num_threads);
  return numpy_arrays(unlocked([&] { return simulate_communication(views, metadata, options); }));
}

nb::tuple test_qkv_dispatch_py(std::int64_t world_size, std::int64_t total_seq_len,
                               std::int64_t num_seqs, std::int64_t max_cp_degree,
                               std::int64_t hidden_q, std::int64_t hidden_k, std::uint64_t seed) {
  QkvDispatchTestOptions options;
  options.world_size = world_size;
  options.total_seq_len = total_seq_len;
  options.num_seqs = num_seqs;
  options.max_cp_degree = max_cp_degree;
  options.hidden_q = hidden_q;
  options.hidden_k = hidden_k;
  options.seed = seed;
  const QkvDispatchTest result = unlocked([&] { return test_qkv_dispatch(options); });
  return nb::make_tuple(finding_tuples(result.findings), result.elements_compared);
}

}  // namespace

void bind_simulate(nb::module_& m) {
  m.def("orchestrate_simulate", orchestrate_py, "tensor"_a, "tensor_dtype"_a, "output"_a,
        "output_dtype"_a, "fields"_a, "overlap"_a, "num_threads"_a);
  m.def("simulate_communication", communicate_py, "tensors"_a, "dtype"_a, "fields"_a, "overlap"_a,
        "num_threads"_a);
  m.def(
      "source_rows",
      [](const std::vector<std::int64_t>& tensor_shape,
         const std::vector<std::int64_t>& output_shape, const Fields& fields,
         std::string_view overlap) {
        const Metadata metadata = metadata_from(fields);
        const SimulateOptions options = simulate_options("orchestrate_simulate", overlap, 0);
        const Shape from(tensor_shape.begin(), tensor_shape.end());
        const Shape to(output_shape.begin(), output_shape.end());
        return numpy_array(unlocked([&] { return source_rows(from, to, metadata, options); }));
      },
      "tensor_shape"_a, "output_shape"_a, "fields"_a, "overlap"_a);
  m.def(
      "sum_kv_copies",
      [](const PayloadArg& planes, std::string_view planes_dtype, const OutputArg& output,
         std::string_view output_dtype, const Fields& rev_kv, std::int32_t rank, int num_threads) {
        const Metadata metadata = metadata_from(rev_kv);
        const ConstTensorView from = tensor_view(planes, planes_dtype);
        const TensorView to = tensor_view(output, output_dtype);
        unlocked([&] { sum_kv_copies(from, to, metadata, Rank{rank}, num_threads); });
      },
      "planes"_a, "planes_dtype"_a, "output"_a, "output_dtype"_a, "rev_kv"_a, "rank"_a,
      "num_threads"_a);
  m.def("test_qkv_dispatch", test_qkv_dispatch_py, "world_size"_a, "total_seq_len"_a, "num_seqs"_a,
        "max_cp_degree"_a, "hidden_q"_a, "hidden_k"_a, "seed"_a);
}

}  // namespace waybill::python
