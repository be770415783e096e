#include "follow_plan.h"

namespace waybill::validation {
namespace {

/// One rank of check_lines, which found that something is wrong there.
void check_line(const SendTable& table, std::int64_t line, std::int64_t shard, const QkvPlan& plan,
                Findings& findings) {
  const std::int64_t len = table.lines[at(line)].len;
  if (shard >= 0 && len != plan.shard_len[at(shard)]) {
    findings.add(FindingKind::plan, table.name, "seq_len", table.place(line), len,
                 plan.shard_len[at(shard)]);
  }
  if (shard < 0 && (len != 0 || table.copy_begin(line) != table.copy_begin(line + 1))) {
    findings.add(FindingKind::padding, table.name, "seq_len", table.place(line),
                 concat(len, " rows and ", table.copy_begin(line + 1) - table.copy_begin(line),
                        " destinations"),
                 "none: the plan has no such shard");
  }
}

}  // namespace

bool check_lines(const SendTable& table, const PlanIndex& index, Findings& findings) {
  const QkvPlan& plan = *index.plan;
  if (table.world_size != plan.world_size) {
    findings.add(FindingKind::shape, table.name, "world_size", {}, table.world_size,
                 concat(plan.world_size, ", as the plan"));
    return false;
  }
  bool ok = true;
  for (std::int32_t r = 0; r < plan.world_size; ++r) {
    const std::int64_t first = plan.rank_shard_offsets[at(r)];
    const std::int64_t num_shards = plan.rank_shard_offsets[at(r + 1)] - first;
    const std::int64_t first_line = table.rank_offsets[at(r)];
    const std::int64_t num_lines = table.rank_offsets[at(r + 1)] - first_line;
    // The dense form pads all ranks to the same number.
    const bool padded = !table.own_copy_offsets.empty();
    if (num_lines < num_shards || (num_lines > num_shards && !padded)) {
      findings.add(FindingKind::shape, table.name, "seq_len", {.rank = r},
                   concat(num_lines, " shards"), concat(num_shards, ", as the plan"));
      ok = false;
      continue;
    }
    for (std::int64_t j = 0; j < num_lines; ++j) {
      check_line(table, first_line + j, j < num_shards ? first + j : -1, plan, findings);
    }
  }
  return ok;
}

void check_queries(const SendTable& table, const Arrivals& arrivals, const PlanIndex& index,
                   Findings& findings) {
  const QkvPlan& plan = *index.plan;
  std::vector<std::int64_t> filled(at(plan.world_size));
  for (std::int64_t s = 0; s < plan.num_shards(); ++s) {
    const std::int32_t home = index.home[at(s)];
    const std::int64_t line = table.rank_offsets[at(home)] + s - plan.rank_shard_offsets[at(home)];
    const std::int64_t copy = table.copy_begin(line);
    const std::int64_t num_copies = table.copy_begin(line + 1) - copy;
    const std::int32_t expected = plan.q_dst[at(s)];
    if (num_copies != 1) [[unlikely]] {
      findings.add(FindingKind::plan, table.name, "dst_rank", table.place(line),
                   concat(num_copies, " destinations"), concat("rank ", expected));
      continue;
    }
    const std::int32_t dst = table.dst_rank[at(copy)];
    if (dst != expected) [[unlikely]] {
      findings.add(FindingKind::plan, table.name, "dst_rank", table.place(line, 0), dst, expected);
    }
    std::int64_t& next = filled[at(dst)];
    if (table.dst_row[at(copy)] != next && arrivals.tiled[at(dst)] != 0) [[unlikely]] {
      findings.add(FindingKind::order, table.name, "dst_offset", table.place(line, 0),
                   table.dst_row[at(copy)], next);
    }
    next += table.lines[at(line)].len;
  }
}

}  // namespace waybill::validation
