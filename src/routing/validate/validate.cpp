#include "waybill/routing/validate.h"

#include <array>
#include <optional>
#include <ostream>
#include <utility>

#include "checks.h"

namespace waybill {

std::string_view to_string(FindingKind kind) {
  constexpr std::array<std::string_view, 19> names = {
      "shape",    "padding",      "rank_range", "negative", "bounds",       "capacity", "overlap",
      "coverage", "undispatched", "order",      "count",    "transpose",    "identity", "plan",
      "document", "causality",    "attention",  "mask",     "normalization"};
  static_assert(names.size() == static_cast<std::size_t>(FindingKind::normalization) + 1);
  const auto idx = static_cast<std::size_t>(kind);
  return idx < names.size() ? names[idx] : "unknown";
}

std::string to_string(const Finding& finding) {
  std::string place;
  const auto append = [&](const char* what, std::int64_t idx) {
    if (idx >= 0) place += concat(place.empty() ? " " : ", ", what, " ", idx);
  };
  append("rank", finding.rank);
  append("shard", finding.shard);
  append("copy", finding.copy);
  if (!place.empty()) place += ":";
  return concat(finding.table, ".", finding.field, ":", place, " got ", finding.got, ", expected ",
                finding.expected, " (", to_string(finding.kind), ")");
}

std::ostream& operator<<(std::ostream& out, const Finding& finding) {
  return out << to_string(finding);
}

namespace {

using namespace validation;

/// A forward table that is sound in itself, with what lands where.
using Checked = std::pair<SendTable, Arrivals>;

bool has_copies(const Metadata& metadata) { return metadata.has_copies(); }
bool has_copies(const SparseMetadata& metadata) { return !metadata.copy_offsets.empty(); }

/// Forward and reverse of one tensor, dense or sparse. Nothing when forward is not sound.
template <class Table>
std::optional<Checked> check_pair(const Table& fwd, const Table& rev, const char* fwd_name,
                                  const char* rev_name, Findings& findings) {
  std::optional<SendTable> forward = load(fwd, fwd_name, false, findings);
  const std::optional<SendTable> reverse = load(rev, rev_name, true, findings);
  if (reverse)
    check_counts(rev, *reverse, received_rows(*reverse), nullptr, has_copies(fwd), findings);
  if (!forward) return std::nullopt;
  Arrivals arrivals = sort_arrivals(*forward);
  check_tiling(*forward, arrivals, findings);
  check_counts(fwd, *forward, arrivals.rows, &arrivals, has_copies(fwd), findings);
  check_masks(fwd, rev, *forward, rev_name, findings);
  if (reverse && reverse->world_size == forward->world_size) {
    check_reverse(*forward, arrivals, *reverse, findings);
  } else if (reverse) {
    findings.add(FindingKind::shape, rev_name, "world_size", {}, reverse->world_size,
                 concat(forward->world_size, ", as ", fwd_name));
  }
  return Checked(*std::move(forward), std::move(arrivals));
}

template <class Table>
std::vector<Finding> validate_pair(const Table& fwd, const Table& rev,
                                   const ValidateOptions& options) {
  Findings findings(options.max_findings);
  const std::optional<Checked> checked = check_pair(fwd, rev, "fwd", "rev", findings);
  if (checked) {
    const bool is_q = checked->first.one_copy;
    check_capacity(checked->first, checked->second, is_q ? options.q_capacity : options.kv_capacity,
                   findings);
  }
  return std::move(findings).take();
}

/// QkvRouting and E2eMetadata name their tables alike.
template <class Routing>
std::vector<Finding> validate_routing(const QkvPlan& plan, const Routing& routing,
                                      const ValidateOptions& options, Findings findings) {
  if (!check_plan(plan, findings)) return std::move(findings).take();
  const PlanIndex index = index_plan(plan);
  if (const auto q = check_pair(routing.fwd_q, routing.rev_q, "fwd_q", "rev_q", findings)) {
    check_capacity(q->first, q->second, options.q_capacity, findings);
    if (check_entries(q->first, index, findings)) {
      check_queries(q->first, q->second, index, findings);
    }
  }
  if (const auto kv = check_pair(routing.fwd_kv, routing.rev_kv, "fwd_kv", "rev_kv", findings)) {
    check_capacity(kv->first, kv->second, options.kv_capacity, findings);
    if (check_entries(kv->first, index, findings)) {
      check_causality(kv->first, kv->second, index, findings);
      if (plan.kv_layout == KvLayout::per_rank) check_copy_order(kv->first, index, findings);
    }
  }
  check_attention(routing.attention, index, findings);
  return std::move(findings).take();
}

}  // namespace

std::vector<Finding> validate(const QkvPlan& plan, const ValidateOptions& options) {
  Findings findings(options.max_findings);
  if (check_plan(plan, findings)) check_plan_capacity(index_plan(plan), options, findings);
  return std::move(findings).take();
}

std::vector<Finding> validate(const Metadata& metadata, const ValidateOptions& options) {
  Findings findings(options.max_findings);
  const bool planes = metadata.seq_recv_mask.has_value();
  const auto table = load(metadata, "metadata", planes, findings);
  if (!table) return std::move(findings).take();
  Arrivals arrivals = sort_arrivals(*table);
  if (planes) {
    check_planes(metadata, *table, arrivals, findings);
  } else {
    check_tiling(*table, arrivals, findings);
    check_capacity(*table, arrivals, table->one_copy ? options.q_capacity : options.kv_capacity,
                   findings);
  }
  check_counts(metadata, *table, arrivals.rows, &arrivals, planes || !table->one_copy, findings);
  return std::move(findings).take();
}

std::vector<Finding> validate(const Metadata& fwd, const Metadata& rev,
                              const ValidateOptions& options) {
  return validate_pair(fwd, rev, options);
}

std::vector<Finding> validate(const SparseMetadata& fwd, const SparseMetadata& rev,
                              const ValidateOptions& options) {
  return validate_pair(fwd, rev, options);
}

std::vector<Finding> validate(const QkvPlan& plan, const QkvRouting& routing,
                              const ValidateOptions& options) {
  Findings findings(options.max_findings);
  if (routing.kv_layout != plan.kv_layout) {
    findings.add(FindingKind::plan, "attention", "kv_layout", {}, to_string(routing.kv_layout),
                 concat(to_string(plan.kv_layout), ", as the plan"));
  }
  return validate_routing(plan, routing, options, std::move(findings));
}

std::vector<Finding> validate(const QkvPlan& plan, const E2eMetadata& metadata,
                              const ValidateOptions& options) {
  return validate_routing(plan, metadata, options, Findings(options.max_findings));
}

}  // namespace waybill
