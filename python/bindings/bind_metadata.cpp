#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "metadata_casters.h"
#include "moe/option_names.h"
#include "waybill/core/error.h"
#include "waybill/json/plan_json.h"
#include "waybill/simulate/check.h"
#include "waybill/simulate/orchestrate.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

IndexArray array_field(nb::handle value, const char* name) {
  require(!value.is_none(), "Metadata: ", name, " is missing, expected an array");
  IndexArray array;
  require(nb::try_cast(value, array), "Metadata: ", name, " is no array of indices");
  return array;
}

std::optional<IndexArray> optional_array(nb::handle value, const char* name) {
  if (value.is_none()) return std::nullopt;
  return array_field(value, name);
}

std::vector<std::int64_t> totals_field(nb::handle value) {
  if (value.is_none()) return {};
  if (nb::isinstance<nb::int_>(value)) return {nb::cast<std::int64_t>(value)};
  std::vector<std::int64_t> totals;
  for (const nb::handle total : value) totals.push_back(nb::cast<std::int64_t>(total));
  return totals;
}

nb::object int_list(const std::vector<std::int64_t>& values) {
  nb::object list = nb::steal(PyList_New(std::ssize(values)));
  if (!list) throw nb::python_error();
  for (std::size_t i = 0; i < values.size(); ++i) {
    PyList_SetItem(list.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(values[i]));
  }
  return list;
}

ValidateOptions validate_options(const nb::tuple& values) {
  return {nb::cast<std::int64_t>(values[0]), nb::cast<std::int64_t>(values[1]),
          nb::cast<std::int64_t>(values[2])};
}

/// The findings of `objects` with the options, looked for without the interpreter's lock.
template <class... Objects>
nb::list findings_of(const nb::tuple& options, const Objects&... objects) {
  const ValidateOptions o = validate_options(options);
  return finding_tuples(unlocked([&] { return validate(objects..., o); }));
}

/// The fields of an AttnLayout, in its order.
using LayoutArg =
    std::tuple<std::vector<IndexArray>, std::vector<IndexArray>, IndexArray, IndexArray, IndexArray,
               std::vector<IndexArray>, std::vector<IndexArray>>;

SimulateOptions simulate_options(const std::string& who, std::string_view overlap,
                                 int num_threads = 0) {
  static constexpr std::array<std::string_view, 2> names{"reject", "last_wins"};
  return {detail::option_of<Overlap>(names, overlap, (who + ": overlap").c_str()), num_threads};
}

}  // namespace

Metadata metadata_from(const nb::tuple& fields) {
  require(fields.size() == 10, "Metadata: got ", fields.size(), " fields, expected 10");
  Metadata result;
  result.dst_rank = array_field(fields[0], "dst_rank");
  result.dst_offset = array_field(fields[1], "dst_offset");
  result.seq_len = array_field(fields[2], "seq_len");
  if (!fields[3].is_none()) result.num_recv_tokens = array_field(fields[3], "num_recv_tokens");
  result.seq_recv_mask = optional_array(fields[4], "seq_recv_mask");
  result.recv_seq_lens = optional_array(fields[5], "recv_seq_lens");
  result.num_seqs = optional_array(fields[6], "num_seqs");
  if (!fields[7].is_none()) result.world_size = nb::cast<std::int64_t>(fields[7]);
  result.normalized = nb::cast<bool>(fields[8]);
  result.num_total_recv_tokens = totals_field(fields[9]);
  return result;
}

nb::tuple fields_of(Metadata&& metadata, bool capsules, bool callers_dst_rank,
                    bool callers_seq_len) {
  nb::object totals = nb::none();
  if (metadata.is_slice() && metadata.num_total_recv_tokens.size() == 1) {
    totals = nb::int_(metadata.num_total_recv_tokens[0]);
  } else if (!metadata.num_total_recv_tokens.empty()) {
    totals = int_list(metadata.num_total_recv_tokens);
  }
  nb::object world = nb::none();
  if (metadata.world_size) world = nb::int_(*metadata.world_size);
  const auto unless = [&](bool missing, IndexArray& array) {
    if (missing) return nb::object(nb::none());
    return capsules ? dlpack_capsule(std::move(array)) : numpy_array(std::move(array));
  };
  const auto shown = [&](std::optional<IndexArray>& array) {
    return array ? unless(false, *array) : nb::none();
  };
  const bool has_counts = metadata.has_counts();
  return nb::make_tuple(
      unless(callers_dst_rank, metadata.dst_rank), unless(false, metadata.dst_offset),
      unless(callers_seq_len, metadata.seq_len), unless(!has_counts, metadata.num_recv_tokens),
      shown(metadata.seq_recv_mask), shown(metadata.recv_seq_lens), shown(metadata.num_seqs), world,
      metadata.normalized, totals);
}

nb::tuple to_tuple(Metadata&& metadata) { return fields_of(std::move(metadata), false); }

nb::list finding_tuples(const std::vector<Finding>& findings) {
  nb::list result;
  for (const Finding& f : findings) {
    result.append(nb::make_tuple(to_string(f.kind), f.table, f.field, f.rank, f.shard, f.copy,
                                 f.got, f.expected, to_string(f)));
  }
  return result;
}

void bind_metadata(nb::module_& m) {
  m.def(
      "get_slice",
      [](const Metadata& metadata, std::int32_t rank) { return metadata.get_slice(Rank{rank}); },
      "fields"_a, "rank"_a);
  m.def(
      "normalize_dtype", [](const Metadata& metadata) { return metadata.normalize_dtype(); },
      "fields"_a);
  m.def(
      "metadata_text", [](const Metadata& metadata) { return to_string(metadata); }, "fields"_a);
  m.def(
      "metadata_to_json",
      [](const Metadata& metadata, bool compact) { return to_json(metadata, json_style(compact)); },
      "fields"_a, "compact"_a, pure_call);
  m.def(
      "metadata_from_json",
      [](std::string_view text, std::string_view origin) {
        return metadata_from_json(text, origin);
      },
      "text"_a, "origin"_a, pure_call);
  m.def(
      "validate_metadata",
      [](const Metadata& metadata, const nb::tuple& options) {
        return findings_of(options, metadata);
      },
      "fields"_a, "options"_a);
  m.def(
      "validate_pair",
      [](const Metadata& fwd, const Metadata& rev, const nb::tuple& options) {
        return findings_of(options, fwd, rev);
      },
      "fwd"_a, "rev"_a, "options"_a);
  m.def(
      "validate_plan",
      [](const QkvPlan& plan, const nb::tuple& options) { return findings_of(options, plan); },
      "plan"_a, "options"_a);
  m.def(
      "validate_all",
      [](const QkvPlan& plan, Metadata fwd_q, Metadata rev_q, Metadata fwd_kv, Metadata rev_kv,
         LayoutArg layout, const nb::tuple& options) {
        const E2eMetadata metadata{std::move(fwd_q),
                                   std::move(rev_q),
                                   std::move(fwd_kv),
                                   std::move(rev_kv),
                                   std::make_from_tuple<AttnLayout>(std::move(layout)),
                                   std::nullopt,
                                   std::nullopt};
        return findings_of(options, plan, metadata);
      },
      "plan"_a, "fwd_q"_a, "rev_q"_a, "fwd_kv"_a, "rev_kv"_a, "layout"_a, "options"_a);
}

void bind_simulate(nb::module_& m) {
  m.def(
      "orchestrate_simulate",
      [](const PayloadArg& tensor, std::string_view tensor_dtype, const OutputArg& output,
         std::string_view output_dtype, const Metadata& fields, std::string_view overlap,
         int num_threads) {
        orchestrate_simulate(tensor_view(tensor, tensor_dtype), tensor_view(output, output_dtype),
                             fields,
                             simulate_options("orchestrate_simulate", overlap, num_threads));
      },
      "tensor"_a, "tensor_dtype"_a, "output"_a, "output_dtype"_a, "fields"_a, "overlap"_a,
      "num_threads"_a, pure_call);
  m.def(
      "simulate_communication",
      [](const std::vector<PayloadArg>& tensors, std::string_view dtype, const Metadata& fields,
         std::string_view overlap, int num_threads) {
        std::vector<ConstTensorView> views;
        for (const PayloadArg& tensor : tensors) views.push_back(tensor_view(tensor, dtype));
        const SimulateOptions options =
            simulate_options("simulate_communication", overlap, num_threads);
        return numpy_arrays(
            unlocked([&] { return simulate_communication(views, fields, options); }));
      },
      "tensors"_a, "dtype"_a, "fields"_a, "overlap"_a, "num_threads"_a);
  m.def(
      "source_rows",
      [](const std::vector<std::int64_t>& tensor_shape,
         const std::vector<std::int64_t>& output_shape, const Metadata& fields,
         std::string_view overlap) {
        const SimulateOptions options = simulate_options("orchestrate_simulate", overlap);
        const Shape from(tensor_shape.begin(), tensor_shape.end());
        const Shape to(output_shape.begin(), output_shape.end());
        return numpy_array(unlocked([&] { return source_rows(from, to, fields, options); }));
      },
      "tensor_shape"_a, "output_shape"_a, "fields"_a, "overlap"_a);
  m.def(
      "sum_kv_copies",
      [](const PayloadArg& planes, std::string_view planes_dtype, const OutputArg& output,
         std::string_view output_dtype, const Metadata& rev_kv, std::int32_t rank,
         int num_threads) {
        sum_kv_copies(tensor_view(planes, planes_dtype), tensor_view(output, output_dtype), rev_kv,
                      Rank{rank}, num_threads);
      },
      "planes"_a, "planes_dtype"_a, "output"_a, "output_dtype"_a, "rev_kv"_a, "rank"_a,
      "num_threads"_a, pure_call);
  m.def(
      "test_qkv_dispatch",
      [](std::int64_t world_size, std::int64_t total_seq_len, std::int64_t num_seqs,
         std::int64_t max_cp_degree, std::int64_t hidden_q, std::int64_t hidden_k,
         std::uint64_t seed) {
        const QkvDispatchTest result = unlocked([&] {
          return test_qkv_dispatch({.world_size = world_size,
                                    .total_seq_len = total_seq_len,
                                    .num_seqs = num_seqs,
                                    .max_cp_degree = max_cp_degree,
                                    .hidden_q = hidden_q,
                                    .hidden_k = hidden_k,
                                    .seed = seed});
        });
        return nb::make_tuple(finding_tuples(result.findings), result.elements_compared);
      },
      "world_size"_a, "total_seq_len"_a, "num_seqs"_a, "max_cp_degree"_a, "hidden_q"_a,
      "hidden_k"_a, "seed"_a);
}

}  // namespace waybill::python
