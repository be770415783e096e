#include "metadata_fields.h"

#include <optional>
#include <utility>

#include "arrays.h"
#include "waybill/core/error.h"

namespace waybill::python {
namespace {

IndexArray array_field(nb::handle value, const char* name) {
  require(!value.is_none(), "Metadata: ", name, " is missing, expected an array");
  return index_array(nb::cast<ArrayArg>(value), name);
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

Fields fields_of(Metadata&& metadata) {
  nb::object totals = nb::none();
  if (metadata.is_slice() && metadata.num_total_recv_tokens.size() == 1) {
    totals = nb::int_(metadata.num_total_recv_tokens[0]);
  } else if (!metadata.num_total_recv_tokens.empty()) {
    nb::list list;
    for (const std::int64_t total : metadata.num_total_recv_tokens) list.append(total);
    totals = std::move(list);
  }
  nb::object world = nb::none();
  if (metadata.world_size) world = nb::int_(*metadata.world_size);
  nb::object counts = nb::none();
  if (metadata.has_counts()) counts = numpy_array(std::move(metadata.num_recv_tokens));
  return nb::make_tuple(
      numpy_array(std::move(metadata.dst_rank)), numpy_array(std::move(metadata.dst_offset)),
      numpy_array(std::move(metadata.seq_len)), counts,
      numpy_or_none(std::move(metadata.seq_recv_mask)),
      numpy_or_none(std::move(metadata.recv_seq_lens)), numpy_or_none(std::move(metadata.num_seqs)),
      world, metadata.normalized, totals);
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

}  // namespace waybill::python
