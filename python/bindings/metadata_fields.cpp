#include "metadata_fields.h"

#include <optional>
#include <utility>

#include "arrays.h"
#include "waybill/core/error.h"

namespace waybill::python {

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

}  // namespace

Metadata metadata_from(const Fields& fields) {
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

Fields fields_of(Metadata&& metadata, FieldsForm form) {
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
    return form.capsules ? dlpack_capsule(std::move(array)) : numpy_array(std::move(array));
  };
  const auto shown = [&](std::optional<IndexArray>& array) {
    return array ? unless(false, *array) : nb::none();
  };
  const bool has_counts = metadata.has_counts();
  return nb::make_tuple(
      unless(form.callers_dst_rank, metadata.dst_rank), unless(false, metadata.dst_offset),
      unless(form.callers_seq_len, metadata.seq_len), unless(!has_counts, metadata.num_recv_tokens),
      shown(metadata.seq_recv_mask), shown(metadata.recv_seq_lens), shown(metadata.num_seqs), world,
      metadata.normalized, totals);
}

nb::list finding_tuples(const std::vector<Finding>& findings) {
  nb::list result;
  for (const Finding& f : findings) {
    const std::string_view kind = to_string(f.kind);
    result.append(nb::make_tuple(nb::str(kind.data(), kind.size()), f.table.c_str(),
                                 f.field.c_str(), f.rank, f.shard, f.copy, f.got.c_str(),
                                 f.expected.c_str(), to_string(f).c_str()));
  }
  return result;
}

nb::object intermediate_tuple(std::optional<DispatchIntermediates>&& values) {
  if (!values) return nb::none();
  return nb::make_tuple(numpy_array(std::move(values->tokens_to_dst_per_dispatch)),
                        numpy_array(std::move(values->seq_to_dst)),
                        numpy_array(std::move(values->num_received_seqs)));
}

nb::tuple layout_tuple(AttnLayout&& layout) {
  return nb::make_tuple(
      numpy_arrays(std::move(layout.cu_seqlens_q)), numpy_arrays(std::move(layout.cu_seqlens_kv)),
      numpy_array(std::move(layout.max_seqlen_q)), numpy_array(std::move(layout.max_seqlen_kv)),
      numpy_array(std::move(layout.num_local_seqs_recv)), numpy_arrays(std::move(layout.kv_begin)),
      numpy_arrays(std::move(layout.kv_len)));
}

nb::tuple e2e_tuple(E2eMetadata&& metadata) {
  return nb::make_tuple(fields_of(std::move(metadata.fwd_q)), fields_of(std::move(metadata.rev_q)),
                        fields_of(std::move(metadata.fwd_kv)),
                        fields_of(std::move(metadata.rev_kv)),
                        layout_tuple(std::move(metadata.attention)),
                        intermediate_tuple(std::move(metadata.q_intermediates)),
                        numpy_or_none(std::move(metadata.kv_dst_global_seq_id)));
}

nb::tuple raw_tuple(RawQkvDispatch&& raw) {
  return nb::make_tuple(
      numpy_array(std::move(raw.cp_seq_lens)), numpy_array(std::move(raw.num_cp_shards)),
      numpy_array(std::move(raw.cp_query_dst)), numpy_array(std::move(raw.kv.kv_to_q_mapping)),
      numpy_array(std::move(raw.kv.kv_to_q_rank)), numpy_array(std::move(raw.kv.kv_context_size)),
      numpy_array(std::move(raw.kv.q_to_num_kv_seq)),
      numpy_array(std::move(raw.kv.q_to_num_kv_token)));
}

}  // namespace waybill::python
