#include <nanobind/stl/vector.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "metadata_fields.h"
#include "waybill/core/error.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/routing/varlen_routing.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

template <class Owner, class Table>
void add_table(nb::class_<Owner>& type, const char* name, Table Owner::*table) {
  using Element = typename Table::value_type;
  type.def_prop_ro(name, [table](nb::handle self) {
    const Table& values = nb::cast<const Owner&>(self).*table;
    return numpy_view(std::span<const Element>(values.data(), values.size()), self);
  });
}

void bind_sparse_metadata(nb::module_& m) {
  nb::class_<SparseMetadata> sparse(m, "SparseMetadata");
  sparse.def_ro("world_size", &SparseMetadata::world_size);
  add_table(sparse, "rank_offsets", &SparseMetadata::rank_offsets);
  add_table(sparse, "seq_len", &SparseMetadata::seq_len);
  add_table(sparse, "copy_offsets", &SparseMetadata::copy_offsets);
  add_table(sparse, "dst_rank", &SparseMetadata::dst_rank);
  add_table(sparse, "dst_offset", &SparseMetadata::dst_offset);
  sparse.def_prop_ro("recv_total", [](nb::handle self) {
    return numpy_view(nb::cast<const SparseMetadata&>(self).recv.total, self);
  });
  sparse.def(
      "__eq__", [](const SparseMetadata& a, const SparseMetadata& b) { return a == b; },
      nb::is_operator());
  m.def("to_sparse", [](const Fields& fields) {
    const Metadata metadata = metadata_from(fields);
    return unlocked([&] { return to_sparse(metadata); });
  });
  m.def("to_dense",
        [](const SparseMetadata& sparse_form) { return fields_of(to_dense(sparse_form)); });
  m.def("to_dense_reverse", [](const SparseMetadata& reverse, const SparseMetadata& forward) {
    return fields_of(to_dense_reverse(reverse, forward));
  });
}

/// The lines of one rank: (shard, q_begin, q_len, kv_begin, kv_len), read-only views.
nb::tuple attention_of(nb::handle self, std::int32_t rank) {
  const SparseAttnLayout& layout = nb::cast<const QkvRouting&>(self).attention;
  const std::int64_t world = std::ssize(layout.rank_offsets) - 1;
  require(0 <= rank && rank < world, "QkvRouting.attention: rank = ", rank, ", expected 0..",
          world - 1);
  const auto first = static_cast<std::size_t>(layout.rank_offsets[static_cast<std::size_t>(rank)]);
  const auto last =
      static_cast<std::size_t>(layout.rank_offsets[static_cast<std::size_t>(rank) + 1]);
  const auto lines = [&](const auto& table) {
    return numpy_view(std::span(table.data(), table.size()).subspan(first, last - first), self);
  };
  return nb::make_tuple(lines(layout.shard), lines(layout.q_begin), lines(layout.q_len),
                        lines(layout.kv_begin), lines(layout.kv_len));
}

/// Ranges as a list of numbers, one after another.
std::vector<std::int64_t> flat(const std::vector<VarlenSequence>& sequences) {
  std::vector<std::int64_t> values;
  for (const VarlenSequence& s : sequences)
    values.insert(values.end(), {s.q_begin, s.q_len, s.kv_begin, s.kv_len});
  return values;
}

std::vector<std::int64_t> flat(const std::vector<RowRange>& ranges) {
  std::vector<std::int64_t> values;
  for (const RowRange& r : ranges) values.insert(values.end(), {r.begin, r.rows});
  return values;
}

/// (in_place, dispatched, q_rows, kv_rows) of one rank.
nb::tuple varlen_rank(const VarlenRouting& routing, std::int32_t rank) {
  const std::int64_t world = std::ssize(routing.ranks);
  require(0 <= rank && rank < world, "VarlenRouting.rank: rank = ", rank, ", expected 0..",
          world - 1);
  const VarlenRank& r = routing.ranks[static_cast<std::size_t>(rank)];
  return nb::make_tuple(numpy_array(flat(r.in_place)), numpy_array(flat(r.dispatched)),
                        numpy_array(flat(r.q_rows)), numpy_array(flat(r.kv_rows)));
}

/// The share of (query, key) pairs that are attended to in place.
double in_place_share(const VarlenRouting& routing) {
  const auto pairs = [](const std::vector<VarlenSequence>& sequences) {
    double sum = 0;
    for (const VarlenSequence& s : sequences) {
      const auto q = static_cast<double>(s.q_len);
      sum += q * (static_cast<double>(s.kv_len) - q / 2);
    }
    return sum;
  };
  double in_place = 0;
  double all = 0;
  for (const VarlenRank& rank : routing.ranks) {
    in_place += pairs(rank.in_place);
    all += pairs(rank.in_place) + pairs(rank.dispatched);
  }
  return all > 0 ? in_place / all : 1;
}

void bind_varlen(nb::module_& m) {
  nb::class_<VarlenRouting> routing(m, "VarlenRouting");
  routing.def_ro("fwd_q", &VarlenRouting::fwd_q);
  routing.def_ro("rev_q", &VarlenRouting::rev_q);
  routing.def_ro("fwd_kv", &VarlenRouting::fwd_kv);
  routing.def_ro("sum_kv", &VarlenRouting::sum_kv);
  routing.def("rank", &varlen_rank);
  routing.def("in_place_share", &in_place_share);
  m.def(
      "compute_varlen_routing",
      [](const QkvPlan& plan, bool in_place) {
        return unlocked([&] { return compute_varlen_routing(plan, in_place); });
      },
      "plan"_a, "in_place"_a);
}

}  // namespace

void bind_sparse(nb::module_& m) {
  bind_sparse_metadata(m);
  nb::class_<QkvRouting> routing(m, "Routing");
  routing.def_prop_ro("per_query",
                      [](const QkvRouting& r) { return r.kv_layout == KvLayout::per_query; });
  routing.def_ro("fwd_q", &QkvRouting::fwd_q);
  routing.def_ro("rev_q", &QkvRouting::rev_q);
  routing.def_ro("fwd_kv", &QkvRouting::fwd_kv);
  routing.def_ro("rev_kv", &QkvRouting::rev_kv);
  routing.def("attention_of", &attention_of);
  m.def("compute_qkv_routing", [](const QkvPlan& plan, int num_threads) {
    return unlocked([&] { return compute_qkv_routing(plan, num_threads); });
  });
  bind_varlen(m);
}

}  // namespace waybill::python
