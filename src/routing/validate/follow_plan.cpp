#include "follow_plan.h"

namespace waybill::validation {
namespace {

/// One rank of check_lines, which found that something is wrong there.
void check_entry(const SendTable& table, std::int64_t entry, std::int64_t shard,
                 const QkvPlan& plan, Findings& findings) {
  const std::int64_t len = table.entries[entry].len;
  if (shard >= 0 && len != plan.shard_len[shard]) {
    findings.add(FindingKind::plan, table.name, "seq_len", table.place(entry), len,
                 plan.shard_len[shard]);
  }
  if (shard < 0 &&
      (len != 0 || table.destination_begin(entry) != table.destination_begin(entry + 1))) {
    findings.add(FindingKind::padding, table.name, "seq_len", table.place(entry),
                 concat(len, " rows and ",
                        table.destination_begin(entry + 1) - table.destination_begin(entry),
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
    const std::int32_t home = index.home[s];
    const std::int64_t entry = table.rank_offsets[home] + s - plan.rank_shard_offsets[home];
    const std::int64_t copy = table.destination_begin(entry);
    const std::int64_t num_destinations = table.destination_begin(entry + 1) - copy;
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
