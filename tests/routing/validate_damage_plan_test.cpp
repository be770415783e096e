#include "validate_damage.h"

// Damage to the plan itself. Run by validate_damage_test.cpp.

namespace waybill::test {
namespace {

using enum FindingKind;
using Result = std::optional<Symptom>;

std::int64_t pick_shard(const Patient& patient, Random& random) {
  return pick(random, patient.plan.num_shards(), [](std::int64_t) { return true; });
}

std::int64_t home_of(const QkvPlan& plan, std::int64_t shard) {
  return locate(plan.rank_shard_offsets, shard).first;
}

Result world_size_zero(Patient& patient, Random&) {
  patient.plan.world_size = 0;
  return Symptom{{shape}, "plan", "world_size"};
}

Result offsets_too_short(Patient& patient, Random&) {
  patient.plan.rank_shard_offsets.pop_back();
  return Symptom{{shape}, "plan", "rank_shard_offsets"};
}

Result offsets_fall(Patient& patient, Random& random) {
  auto& offsets = patient.plan.doc_shard_offsets;
  const std::int64_t d = pick(random, std::ssize(offsets) - 1, [](std::int64_t) { return true; });
  if (d < 0) return {};
  offsets[d] = offsets[d + 1] + 1;
  return Symptom{{shape}, "plan", "doc_shard_offsets"};
}

Result destinations_missing(Patient& patient, Random&) {
  if (patient.plan.q_dst.empty()) return {};
  patient.plan.q_dst.pop_back();
  return Symptom{{shape}, "plan", "q_dst"};
}

Damage length_becomes(std::string name, std::int64_t len, FindingKind kind) {
  return {std::move(name), Form::plan, [=](Patient& patient, Random& random) -> Result {
            const std::int64_t s = pick_shard(patient, random);
            if (s < 0) return {};
            patient.plan.shard_len[s] = len;
            // A sum is exceeded where it is added up, so not before this shard.
            if (kind == bounds) return Symptom{{kind}, "plan", "shard_len"};
            return Symptom{{kind}, "plan", "shard_len", home_of(patient.plan, s), s};
          }};
}

Damage destination_becomes(std::string name, std::int32_t rank) {
  return {std::move(name), Form::plan, [=](Patient& patient, Random& random) -> Result {
            const std::int64_t s = pick_shard(patient, random);
            if (s < 0) return {};
            patient.plan.q_dst[s] = rank == 0 ? patient.plan.world_size : rank;
            return Symptom{{rank_range}, "plan", "q_dst", home_of(patient.plan, s), s};
          }};
}

Result shard_in_two_documents(Patient& patient, Random& random) {
  auto& shards = patient.plan.doc_shards;
  if (shards.size() < 2) return {};
  const std::int64_t place = 1 + random.below(std::ssize(shards) - 1);
  shards[place] = shards[0];
  return Symptom{{document}, "plan", "doc_shards", -1, shards[0]};
}

Result shard_in_no_document(Patient& patient, Random& random) {
  auto& shards = patient.plan.doc_shards;
  if (shards.size() < 2) return {};
  const std::int64_t place = 1 + random.below(std::ssize(shards) - 1);
  const std::int64_t lost = std::exchange(shards[place], shards[0]);
  return Symptom{{document}, "plan", "doc_shards", -1, lost};
}

Result shard_unknown(Patient& patient, Random& random) {
  const std::int64_t place = pick_shard(patient, random);
  if (place < 0) return {};
  patient.plan.doc_shards[place] = static_cast<std::int32_t>(patient.plan.num_shards());
  return Symptom{{document}, "plan", "doc_shards"};
}

/// A window that begins after its own query.
Result window_beyond_query(Patient& patient, Random& random) {
  QkvPlan& plan = patient.plan;
  const std::int64_t place = pick_shard(patient, random);
  if (place < 0) return {};
  plan.kv_begin.resize(plan.shard_len.size());
  const std::int32_t shard = plan.doc_shards[place];
  const auto [document, position] = locate(plan.doc_shard_offsets, place);
  plan.kv_begin[shard] = static_cast<std::int32_t>(position + 1);
  return Symptom{{causality}, "plan", "kv_begin", -1, shard};
}

/// A range that ends before its own query.
Result range_ends_before_query(Patient& patient, Random& random) {
  QkvPlan& plan = patient.plan;
  const std::int64_t place = pick_shard(patient, random);
  if (place < 0) return {};
  if (plan.kv_end.empty()) plan.need_whole_documents();
  const std::int32_t shard = plan.doc_shards[place];
  const auto [document, position] = locate(plan.doc_shard_offsets, place);
  plan.kv_end[shard] = position == 0 ? -1 : static_cast<std::int32_t>(position);
  return Symptom{{causality}, "plan", "kv_end", -1, shard};
}

Result window_moves_back(Patient& patient, Random& random) {
  QkvPlan& plan = patient.plan;
  if (plan.kv_begin.empty()) return {};
  const auto begin = [&](std::int64_t p) -> std::int32_t& {
    return plan.kv_begin[plan.doc_shards[p]];
  };
  const std::int64_t place = pick(random, plan.num_shards(), [&](std::int64_t p) {
    return locate(plan.doc_shard_offsets, p).second > 0 && begin(p - 1) > 0;
  });
  if (place < 0) return {};
  begin(place) = begin(place - 1) - 1;
  return Symptom{{causality}, "plan", "kv_begin", -1, plan.doc_shards[place]};
}

Result q_buffer_too_small(Patient& patient, Random&) {
  std::vector<std::int64_t> rows(patient.plan.world_size);
  for (std::int64_t s = 0; s < patient.plan.num_shards(); ++s) {
    rows[patient.plan.q_dst[s]] += patient.plan.shard_len[s];
  }
  const auto most = std::max_element(rows.begin(), rows.end());
  if (*most == 0) return {};
  patient.options.q_capacity = *most - 1;
  return Symptom{{capacity}, "plan", "q_dst", most - rows.begin()};
}

Result kv_buffer_too_small(Patient& patient, Random&) {
  const auto& rows = patient.routing.fwd_kv.recv.total;
  const auto most = std::max_element(rows.begin(), rows.end());
  if (*most == 0) return {};
  patient.options.kv_capacity = *most - 1;
  return Symptom{{capacity}, "plan", "q_dst", most - rows.begin()};
}

}  // namespace

std::vector<Damage> plan_damages() {
  return {
      {"plan_world_size_zero", Form::plan, world_size_zero},
      {"plan_offsets_too_short", Form::plan, offsets_too_short},
      {"plan_offsets_fall", Form::plan, offsets_fall},
      {"plan_destinations_missing", Form::plan, destinations_missing},
      length_becomes("plan_length_negative", -1, negative),
      length_becomes("plan_length_smallest", INT64_MIN, negative),
      length_becomes("plan_length_huge", INT64_MAX, bounds),
      destination_becomes("plan_destination_is_world_size", 0),
      destination_becomes("plan_destination_minus_1", -1),
      destination_becomes("plan_destination_smallest", INT32_MIN),
      {"plan_shard_in_two_documents", Form::plan, shard_in_two_documents},
      {"plan_shard_in_no_document", Form::plan, shard_in_no_document},
      {"plan_shard_unknown", Form::plan, shard_unknown},
      {"plan_window_beyond_query", Form::plan, window_beyond_query},
      {"plan_range_ends_before_query", Form::plan, range_ends_before_query},
      {"plan_window_moves_back", Form::plan, window_moves_back},
      {"plan_q_buffer_too_small", Form::plan, q_buffer_too_small},
      {"plan_kv_buffer_too_small", Form::plan, kv_buffer_too_small},
  };
}

}  // namespace waybill::test
