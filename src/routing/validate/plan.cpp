#include "checks.h"
#include "routing/homes.h"

namespace waybill::validation {
namespace {

constexpr const char* plan_table = "plan";

bool check_sizes(const QkvPlan& plan, Findings& findings) {
  const std::int64_t num_shards = plan.num_shards();
  if (!check_extents(plan_table, plan.world_size, "shard_len", num_shards, "shards", findings))
    return false;
  bool ok = check_offsets(plan_table, "rank_shard_offsets", plan.rank_shard_offsets,
                          plan.world_size, num_shards, findings);
  const auto check = [&](const char* field, const std::vector<std::int32_t>& values) {
    ok &=
        check_size(plan_table, field, std::ssize(values), num_shards, findings, ", one per shard");
  };
  check("q_dst", plan.q_dst);
  check("doc_shards", plan.doc_shards);
  if (!plan.kv_begin.empty()) check("kv_begin", plan.kv_begin);
  if (!plan.kv_end.empty()) check("kv_end", plan.kv_end);
  return check_offsets(plan_table, "doc_shard_offsets", plan.doc_shard_offsets,
                       plan.num_documents(), num_shards, findings) &&
         ok;
}

/// To the end also when no more findings are taken: the result says whether the plan can be
/// indexed.
bool check_shards(const QkvPlan& plan, Findings& findings) {
  bool ok = true;
  std::int64_t total = 0;
  for (std::int32_t r = 0; r < plan.world_size; ++r) {
    for (std::int64_t s = plan.rank_shard_offsets[r]; s < plan.rank_shard_offsets[r + 1]; ++s) {
      const Place place{.rank = r, .shard = s};
      const std::int64_t len = plan.shard_len[s];
      if (len < 0) {
        findings.add(FindingKind::negative, plan_table, "shard_len", place, len, "0 or more");
        ok = false;
      } else {
        const std::int64_t before = total;
        total = add_rows(total, len);
        if (total > max_total_rows && before <= max_total_rows) {
          findings.add(FindingKind::bounds, plan_table, "shard_len", place,
                       concat(len, ", ", total, " tokens up to here"),
                       concat("at most ", max_total_rows, " in all"));
          ok = false;
        }
      }
      if (plan.q_dst[s] < 0 || plan.q_dst[s] >= plan.world_size) {
        findings.add(FindingKind::rank_range, plan_table, "q_dst", place, plan.q_dst[s],
                     concat("0..", plan.world_size - 1));
        ok = false;
      }
    }
  }
  return ok;
}

bool check_documents(const QkvPlan& plan, Findings& findings) {
  const std::int64_t num_shards = plan.num_shards();
  std::vector<std::uint8_t> held(num_shards);
  bool ok = true;
  for (std::int64_t place = 0; place < num_shards; ++place) {
    const std::int64_t shard = plan.doc_shards[place];
    if (shard < 0 || shard >= num_shards) {
      findings.add(FindingKind::document, plan_table, "doc_shards", {},
                   concat(shard, " at ", place), concat("0..", num_shards - 1));
      ok = false;
    } else if (held[shard]++ != 0) {
      findings.add(FindingKind::document, plan_table, "doc_shards", {.shard = shard},
                   concat("this shard again at ", place), "each shard once");
      held[shard] = 1;
      ok = false;
    }
  }
  for (std::int64_t shard = 0; !ok && shard < num_shards && !findings.full(); ++shard) {
    if (held[shard] != 0) continue;
    findings.add(FindingKind::document, plan_table, "doc_shards", {.shard = shard},
                 "this shard in no document", "each shard once");
  }
  return ok;
}

/// One bound of the ranges, for position p of n: a begin in [0, p], or an end in [p + 1, n], of
/// which 0 stands for p + 1; never less than at the position before.
bool check_bound(const QkvPlan& plan, const char* field, const std::vector<std::int32_t>& bound,
                 bool is_end, Findings& findings) {
  if (bound.empty()) return true;
  bool ok = true;
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const std::int64_t first = plan.doc_shard_offsets[d];
    const std::int64_t num = plan.doc_shard_offsets[d + 1] - first;
    std::int64_t before = 0;
    for (std::int64_t p = 0; p < num; ++p) {
      const std::int32_t shard = plan.doc_shards[first + p];
      const std::int64_t value = is_end && bound[shard] == 0 ? p + 1 : bound[shard];
      const std::int64_t low = is_end ? std::max(before, p + 1) : before;
      const std::int64_t high = is_end ? num : p;
      if (low <= value && value <= high) [[likely]] {
        before = value;
        continue;
      }
      findings.add(FindingKind::causality, plan_table, field, {.shard = shard}, bound[shard],
                   concat(low, "..", high, " at position ", p, " of document ", d));
      ok = false;
    }
  }
  return ok;
}

}  // namespace

bool check_plan(const QkvPlan& plan, Findings& findings) {
  if (!check_sizes(plan, findings)) return false;
  const bool shards_ok = check_shards(plan, findings);
  if (!check_documents(plan, findings)) return false;
  const bool begins_ok = check_bound(plan, "kv_begin", plan.kv_begin, false, findings);
  return check_bound(plan, "kv_end", plan.kv_end, true, findings) && begins_ok && shards_ok;
}

PlanIndex index_plan(const QkvPlan& plan) {
  const std::size_t num_shards = plan.shard_len.size();
  PlanIndex index;
  index.plan = &plan;
  index.document.resize(num_shards);
  index.kv_first.resize(num_shards);
  index.kv_last.resize(num_shards);
  index.first_query.resize(num_shards);
  index.rows_before.resize(num_shards + 1);
  index.queries.resize(num_shards);
  index.rows_before[0] = 0;
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const auto first = static_cast<std::int32_t>(plan.doc_shard_offsets[d]);
    for (std::int64_t place = first; place < plan.doc_shard_offsets[d + 1]; ++place) {
      const std::int32_t shard = plan.doc_shards[place];
      index.document[place] = static_cast<std::int32_t>(d);
      index.kv_first[place] = first + plan.first_needed(shard);
      const std::int32_t end = plan.end_needed(shard, static_cast<std::int32_t>(place - first));
      index.kv_last[place] = first + end - 1;
      index.rows_before[place + 1] = index.rows_before[place] + plan.shard_len[shard];
    }
    std::int32_t query = first;
    for (std::int32_t place = first; place < plan.doc_shard_offsets[d + 1]; ++place) {
      while (index.kv_last[query] < place) ++query;
      index.first_query[place] = query;
    }
  }
  index.home = detail::homes_of(plan.rank_shard_offsets);
  detail::offsets_by(plan.q_dst, plan.world_size, index.rank_offsets);
  std::vector<std::int64_t> next(index.rank_offsets.begin(), index.rank_offsets.end() - 1);
  const auto append = [&](std::int32_t shard, std::int32_t place) {
    index.queries[next[plan.q_dst[shard]]++] = place;
  };
  const auto last = static_cast<std::int32_t>(num_shards);
  if (plan.kv_layout == KvLayout::per_rank) {  // a group per document
    for (std::int32_t place = 0; place < last; ++place) append(index.shard(place), place);
  } else {  // a group per query, in the global order
    UninitializedVector<std::int32_t> place_of(num_shards);
    for (std::int32_t place = 0; place < last; ++place) place_of[index.shard(place)] = place;
    for (std::int32_t shard = 0; shard < last; ++shard) append(shard, place_of[shard]);
  }
  return index;
}

std::string PlanIndex::describe(std::int64_t place) const {
  const std::int32_t number = shard(place);
  const std::int32_t rank = home[number];
  return concat("shard ", number - plan->rank_shard_offsets[rank], " of rank ", rank);
}

void check_plan_capacity(const PlanIndex& index, const ValidateOptions& options,
                         Findings& findings) {
  if (options.q_capacity < 0 && options.kv_capacity < 0) return;
  for (std::int32_t r = 0; r < index.plan->world_size && !findings.full(); ++r) {
    std::int64_t q_rows = 0;
    const std::int64_t kv_rows = walk_kv(
        index, r, [&](const KvStep& step) { q_rows += index.rows(step.query, step.query); });
    const auto check = [&](std::int64_t rows, const char* what, std::int64_t capacity) {
      if (capacity < 0 || rows <= capacity) return;
      findings.add(FindingKind::capacity, plan_table, "q_dst", {.rank = r}, concat(rows, what),
                   concat("at most ", capacity, ", the capacity"));
    };
    check(q_rows, " Q rows", options.q_capacity);
    check(kv_rows, " KV rows", options.kv_capacity);
  }
}

namespace {

/// One rank of check_lines, which found that something is wrong there.
void check_entry(const SendTable& table, std::int64_t entry, std::int64_t shard,
                 const QkvPlan& plan, Findings& findings) {
  const std::int64_t len = table.entries[entry].len;
  if (shard >= 0 && len != plan.shard_len[shard]) {
    findings.add(FindingKind::plan, table.name, "seq_len", table.place(entry), len,
                 plan.shard_len[shard]);
  }
  if (shard < 0 && (len != 0 || table.destination_begin(entry) != table.destination_end(entry))) {
    findings.add(
        FindingKind::padding, table.name, "seq_len", table.place(entry),
        concat(len, " rows and ", table.destination_end(entry) - table.destination_begin(entry),
               " destinations"),
        "none: the plan has no such shard");
  }
}

}  // namespace

bool check_entries(const SendTable& table, const PlanIndex& index, Findings& findings) {
  const QkvPlan& plan = *index.plan;
  if (table.world_size != plan.world_size) {
    findings.add(FindingKind::shape, table.name, "world_size", {}, table.world_size,
                 concat(plan.world_size, ", as the plan"));
    return false;
  }
  bool ok = true;
  for (std::int32_t r = 0; r < plan.world_size; ++r) {
    const std::int64_t first = plan.rank_shard_offsets[r];
    const std::int64_t num_shards = plan.rank_shard_offsets[r + 1] - first;
    const std::int64_t first_entry = table.rank_offsets[r];
    const std::int64_t num_entries = table.rank_offsets[r + 1] - first_entry;
    // The dense form pads all ranks to the same number.
    const bool padded = !table.own_copy_offsets.empty();
    if (num_entries < num_shards || (num_entries > num_shards && !padded)) {
      findings.add(FindingKind::shape, table.name, "seq_len", {.rank = r},
                   concat(num_entries, " shards"), concat(num_shards, ", as the plan"));
      ok = false;
      continue;
    }
    for (std::int64_t j = 0; j < num_entries; ++j) {
      check_entry(table, first_entry + j, j < num_shards ? first + j : -1, plan, findings);
    }
  }
  return ok;
}

void check_queries(const SendTable& table, const Arrivals& arrivals, const PlanIndex& index,
                   Findings& findings) {
  const QkvPlan& plan = *index.plan;
  std::vector<std::int64_t> filled(plan.world_size);
  for (std::int64_t s = 0; s < plan.num_shards(); ++s) {
    const std::int64_t entry = index.entry_of(s, table);
    const std::int64_t copy = table.destination_begin(entry);
    const std::int64_t num_destinations = table.destination_end(entry) - copy;
    const std::int32_t expected = plan.q_dst[s];
    if (num_destinations != 1) [[unlikely]] {
      findings.add(FindingKind::plan, table.name, "dst_rank", table.place(entry),
                   concat(num_destinations, " destinations"), concat("rank ", expected));
      continue;
    }
    const std::int32_t dst = table.dst_rank[copy];
    if (dst != expected) [[unlikely]] {
      findings.add(FindingKind::plan, table.name, "dst_rank", table.place(entry, 0), dst, expected);
    }
    std::int64_t& next = filled[dst];
    if (table.dst_row[copy] != next && arrivals.tiled[dst] != 0) [[unlikely]] {
      findings.add(FindingKind::order, table.name, "dst_offset", table.place(entry, 0),
                   table.dst_row[copy], next);
    }
    next += table.entries[entry].len;
  }
}

}  // namespace waybill::validation

void waybill::QkvPlan::check(const char* who) const {
  validation::Findings findings(1);
  if (validation::check_plan(*this, findings)) return;
  throw_invalid(who, ": ", to_string(std::move(findings).take().front()));
}
