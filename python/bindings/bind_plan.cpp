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
#include "layout_tuples.h"
#include "waybill/core/error.h"
#include "waybill/json/plan_json.h"
#include "waybill/report/html_report.h"
#include "waybill/report/plan_summary.h"
#include "waybill/routing/document_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

template <class Element>
void add_table(nb::class_<QkvPlan>& plan, const char* name, std::vector<Element> QkvPlan::*table) {
  plan.def_prop_ro(name, [table](nb::handle self) {
    return numpy_view(std::span<const Element>(nb::cast<const QkvPlan&>(self).*table), self);
  });
}

/// [W, W] wire rows of Q and of KV from the sparse counts, receiving rank first.
nb::tuple traffic(const QkvPlan& plan) {
  const auto dense = [&](const SparseMetadata& table) {
    const std::int64_t world = table.world_size;
    IndexArray rows({world, world});
    for (std::int64_t r = 0; r < world; ++r) {
      const auto begin = static_cast<std::size_t>(table.recv.offsets[static_cast<std::size_t>(r)]);
      const auto end =
          static_cast<std::size_t>(table.recv.offsets[static_cast<std::size_t>(r) + 1]);
      for (std::size_t i = begin; i < end; ++i) {
        rows.i64()[static_cast<std::size_t>(r * world + table.recv.src_rank[i])] =
            table.recv.tokens[i];
      }
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
    TextStyle style;
    style.unicode = unicode;
    style.gb_per_s = gb_per_s;
    return text_summary(plan, routing, summarize(plan, routing, {q_row_bytes, kv_row_bytes}),
                        style);
  });
}

std::string report_page(const QkvPlan& plan, std::int64_t q_row_bytes, std::int64_t kv_row_bytes,
                        double gb_per_s, const std::string& title) {
  return unlocked([&] {
    const QkvRouting routing = compute_qkv_routing(plan);
    ReportContext context;
    context.title = title;
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

}  // namespace

void bind_plan(nb::module_& m) {
  m.def("make_plan", make_plan);
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
  plan.def(
      "__eq__", [](const QkvPlan& a, const QkvPlan& b) { return a == b; }, nb::is_operator());
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
  m.def("plan_documents", [](const std::vector<std::int64_t>& lengths, std::int32_t world_size,
                             std::int64_t tokens_per_rank, std::int64_t shard_tokens,
                             std::string_view kv_layout, std::string_view mask) {
    const DocumentPlanOptions options{world_size, tokens_per_rank, shard_tokens,
                                      kv_layout_from_name("plan_documents", kv_layout),
                                      mask_from_name("plan_documents", mask)};
    return unlocked([&] { return plan_documents(lengths, options); });
  });
  m.def("plan_from_json", [](std::string_view text, std::string_view origin) {
    return unlocked([&] { return plan_from_json(text, origin); });
  });
}

}  // namespace waybill::python
