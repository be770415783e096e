#pragma once

#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "validate_plans.h"
#include "waybill/core/error.h"
#include "waybill/routing/validate.h"

namespace waybill::test {

/// A finding that a damage must cause: one of these kinds, at this place. -1: any.
struct Symptom {
  std::vector<FindingKind> kinds;
  std::string table;
  std::string field;
  std::int64_t rank = -1;
  std::int64_t shard = -1;
  std::int64_t copy = -1;
};

[[nodiscard]] inline bool shows(const Finding& finding, const Symptom& symptom) {
  const auto fits = [](std::int64_t got, std::int64_t wanted) {
    return wanted < 0 || got == wanted;
  };
  return std::find(symptom.kinds.begin(), symptom.kinds.end(), finding.kind) !=
             symptom.kinds.end() &&
         finding.table == symptom.table && finding.field == symptom.field &&
         fits(finding.rank, symptom.rank) && fits(finding.shard, symptom.shard) &&
         fits(finding.copy, symptom.copy);
}

/// What gets damaged. What is checked depends on the damage: the plan by itself, or with the
/// sparse or the dense form.
struct Patient {
  QkvPlan plan;
  QkvRouting routing;
  E2eMetadata dense;
  ValidateOptions options;
};

enum class Form { plan, sparse, dense };

struct Damage {
  std::string name;
  Form form;
  /// Damages the patient. Nothing: there is no place for it in this plan.
  std::function<std::optional<Symptom>(Patient&, Random&)> plant;
};

[[nodiscard]] inline std::vector<Finding> examine(const Patient& patient, Form form) {
  switch (form) {
    case Form::plan:
      return validate(patient.plan, patient.options);
    case Form::sparse:
      return validate(patient.plan, patient.routing, patient.options);
    default:
      return validate(patient.plan, patient.dense, patient.options);
  }
}

/// For test reports.
inline void PrintTo(const Damage& damage, std::ostream* out) { *out << damage.name; }

/// A uniform choice among 0..count-1 of those that `fits`. -1: none.
template <class Fits>
[[nodiscard]] std::int64_t pick(Random& random, std::int64_t count, const Fits& fits) {
  std::vector<std::int64_t> candidates;
  for (std::int64_t i = 0; i < count; ++i) {
    if (fits(i)) candidates.push_back(i);
  }
  if (candidates.empty()) return -1;
  return candidates[random.below(std::ssize(candidates))];
}

/// The part of `offsets` that holds `idx`, and the place in it.
[[nodiscard]] inline std::pair<std::int64_t, std::int64_t> locate(
    const std::vector<std::int64_t>& offsets, std::int64_t idx) {
  const auto after = std::upper_bound(offsets.begin(), offsets.end(), idx);
  const std::int64_t part = after - offsets.begin() - 1;
  return {part, idx - offsets[part]};
}

/// One of the four tables of a routing, by its name in findings.
struct NamedTable {
  const char* name;
  SparseMetadata QkvRouting::*sparse;
  Metadata E2eMetadata::*dense;
  bool forward;
  bool kv;
};

inline const std::vector<NamedTable>& tables() {
  static const std::vector<NamedTable> all{
      {"fwd_q", &QkvRouting::fwd_q, &E2eMetadata::fwd_q, true, false},
      {"rev_q", &QkvRouting::rev_q, &E2eMetadata::rev_q, false, false},
      {"fwd_kv", &QkvRouting::fwd_kv, &E2eMetadata::fwd_kv, true, true},
      {"rev_kv", &QkvRouting::rev_kv, &E2eMetadata::rev_kv, false, true}};
  return all;
}

/// Where a copy of a sparse table stands.
struct CopyPlace {
  std::int64_t entry;
  std::int64_t rank;
  std::int64_t shard;
  std::int64_t slot;
};

[[nodiscard]] inline CopyPlace place_of_copy(const SparseMetadata& table, std::int64_t copy) {
  std::int64_t entry = copy;
  if (!table.copy_offsets.empty()) {
    entry = 0;
    while (table.destination_end(entry) <= copy) ++entry;
  }
  const auto [rank, shard] = locate(table.rank_offsets, entry);
  return {entry, rank, shard, copy - table.destination_begin(entry)};
}

[[nodiscard]] std::vector<Damage> plan_damages();
[[nodiscard]] std::vector<Damage> sparse_damages();
[[nodiscard]] std::vector<Damage> kv_damages();
[[nodiscard]] std::vector<Damage> dense_damages();

}  // namespace waybill::test
