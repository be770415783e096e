#include <nanobind/operators.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "metadata_fields.h"
#include "waybill/core/error.h"
#include "waybill/json/plan_json.h"
#include "waybill/report/html_report.h"
#include "waybill/report/plan_summary.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

/// [W, W] wire rows of Q and of KV from the sparse counts, receiving rank first.
nb::tuple traffic(const QkvPlan& plan) {
  const auto dense = [&](const SparseMetadata& table) {
    const std::int64_t world = table.world_size;
    IndexArray rows({world, world});
    for (std::int64_t r = 0; r < world; ++r) {
      for (auto i = table.recv.offsets[r]; i < table.recv.offsets[r + 1]; ++i)
        rows.i64()[r * world + table.recv.src_rank[i]] = table.recv.tokens[i];
    }
    return rows;
  };
  auto [q, kv] = unlocked([&] {
    const QkvRouting routing = compute_qkv_routing(plan);
    return std::pair(dense(routing.fwd_q), dense(routing.fwd_kv));
  });
  return nb::make_tuple(numpy_array(std::move(q)), numpy_array(std::move(kv)));
}

std::string summary_text(const QkvPlan& plan, std::int64_t q_row_bytes, std::int64_t kv_row_bytes,
                         double gb_per_s, bool unicode) {
  return unlocked([&] {
    const QkvRouting routing = compute_qkv_routing(plan);
    return text_summary(plan, routing, summarize(plan, routing, {q_row_bytes, kv_row_bytes}),
                        {.unicode = unicode, .gb_per_s = gb_per_s});
  });
}

std::string report_page(const QkvPlan& plan, std::int64_t q_row_bytes, std::int64_t kv_row_bytes,
                        double gb_per_s, const std::string& title) {
  return unlocked([&] {
    const QkvRouting routing = compute_qkv_routing(plan);
    ReportContext context{.title = title};
    context.gb_per_s = gb_per_s;
    return html_report(plan, routing, summarize(plan, routing, {q_row_bytes, kv_row_bytes}),
                       context);
  });
}

QkvPlan make_plan(std::int32_t world_size, std::vector<std::int64_t> rank_shard_offsets,
                  std::vector<std::int64_t> shard_len, std::vector<std::int32_t> q_dst,
                  std::vector<std::int64_t> doc_shard_offsets, std::vector<std::int32_t> doc_shards,
                  std::vector<std::int32_t> kv_begin, std::string_view kv_layout,
                  std::string_view mask) {
  QkvPlan plan{world_size,
               kv_layout_from_name("QkvPlan", kv_layout),
               std::move(rank_shard_offsets),
               std::move(shard_len),
               std::move(q_dst),
               std::move(doc_shard_offsets),
               std::move(doc_shards),
               std::move(kv_begin),
               mask_from_name("QkvPlan", mask)};
  plan.check("QkvPlan");
  return plan;
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
  sparse.def(nb::self == nb::self);
  m.def("to_sparse", [](const Fields& fields) {
    const Metadata metadata = metadata_from(fields);
    return unlocked([&] { return to_sparse(metadata); });
  });
  m.def("to_dense", [](const SparseMetadata& s) { return fields_of(to_dense(s)); });
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
  const std::int64_t first = layout.rank_offsets[rank];
  const std::int64_t count = layout.rank_offsets[rank + 1] - first;
  const auto lines = [&](const auto& table) {
    return numpy_view(std::span(table.data(), table.size()).subspan(first, count), self);
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
  const VarlenRank& r = routing.ranks[rank];
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
  m.def(
      "compute_qkv_routing",
      [](const QkvPlan& plan, int num_threads) {
        return unlocked([&] { return compute_qkv_routing(plan, num_threads); });
      },
      "plan"_a, "num_threads"_a);
  bind_varlen(m);
}

}  // namespace

void bind_plan(nb::module_& m) {
  m.def("make_plan", make_plan, "world_size"_a, "rank_shard_offsets"_a, "shard_len"_a, "q_dst"_a,
        "doc_shard_offsets"_a, "doc_shards"_a, "kv_begin"_a, "kv_layout"_a, "mask"_a);
  nb::class_<QkvPlan> plan(m, "Plan");
  plan.def_ro("world_size", &QkvPlan::world_size);
  plan.def_prop_ro("kv_layout",
                   [](const QkvPlan& p) { return std::string(to_string(p.kv_layout)); });
  plan.def_prop_ro("mask", [](const QkvPlan& p) { return std::string(to_string(p.mask)); });
  add_table(plan, "rank_shard_offsets", &QkvPlan::rank_shard_offsets);
  add_table(plan, "shard_len", &QkvPlan::shard_len);
  add_table(plan, "q_dst", &QkvPlan::q_dst);
  add_table(plan, "doc_shard_offsets", &QkvPlan::doc_shard_offsets);
  add_table(plan, "doc_shards", &QkvPlan::doc_shards);
  add_table(plan, "kv_begin", &QkvPlan::kv_begin);
  plan.def(nb::self == nb::self);
  plan.def("to_json", [](const QkvPlan& p, bool compact) {
    return to_json(p, compact ? JsonStyle::compact : JsonStyle::readable);
  });
  plan.def(
      "to_metadata",
      [](const QkvPlan& p, int num_threads) {
        return e2e_tuple(unlocked([&] { return to_dense(compute_qkv_routing(p, num_threads)); }));
      },
      "num_threads"_a);
  plan.def(
      "to_raw_dispatch",
      [](const QkvPlan& p, std::int64_t max_cp_degree) {
        return raw_tuple(unlocked([&] { return to_raw_dispatch(p, max_cp_degree); }));
      },
      "max_cp_degree"_a);
  plan.def("shard_work", [](const QkvPlan& p) { return numpy_array(shard_work(p)); });
  plan.def("rank_work", [](const QkvPlan& p) { return numpy_array(rank_work(p)); });
  plan.def("traffic", &traffic);
  plan.def("summary_text", &summary_text, "q_row_bytes"_a, "kv_row_bytes"_a, "gb_per_s"_a,
           "unicode"_a);
  plan.def("report_page", &report_page, "q_row_bytes"_a, "kv_row_bytes"_a, "gb_per_s"_a, "title"_a);
  m.def(
      "plan_from_json",
      [](std::string_view text, std::string_view origin) {
        return unlocked([&] { return plan_from_json(text, origin); });
      },
      "text"_a, "origin"_a);
  bind_sparse(m);
}

}  // namespace waybill::python
