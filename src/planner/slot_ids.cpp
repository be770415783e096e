#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "waybill/core/error.h"
#include "waybill/planner/expert_balance.h"

namespace waybill {
namespace {

constexpr const char* who = "slot_ids";

/// Where the next rows of one rank go.
struct Cursor {
  std::int64_t local_slot = 0;  ///< the slot on this rank
  std::int64_t local_rows = 0;  ///< that the local slot still takes
  std::int64_t next_rest = 0;   ///< place of the next row in what the expert's slots leave
  std::int64_t taken = 0;       ///< rows of this rank so far
};

void check_tables(const EvenExperts& plan, std::span<const std::int64_t> rows,
                  std::int64_t num_experts, std::int32_t rank) {
  require(plan.num_ranks >= 1 && 0 <= rank && rank < plan.num_ranks, who, ": rank = ", rank,
          ", expected 0..", plan.num_ranks - 1);
  const std::int64_t num_slots = std::int64_t{plan.num_ranks} * plan.slots_per_rank;
  for (const std::int64_t size : {std::ssize(plan.slots), std::ssize(plan.quotas),
                                  std::ssize(plan.local_rows), std::ssize(plan.first_row)}) {
    require(size == num_slots, who, ": a table of the plan has ", size,
            " entries, expected one per rank and slot: ", num_slots);
  }
  std::vector<std::int64_t> left(num_experts);
  for (std::int64_t i = 0; i < std::ssize(rows); ++i) left[i % num_experts] += rows[i];
  for (std::int64_t i = 0; i < num_slots; ++i) {
    const std::int32_t expert = plan.slots[i];
    require(expert < num_experts, who, ": slots[", i / plan.slots_per_rank, "][",
            i % plan.slots_per_rank, "] = ", expert, ", expected -1 or an expert below ",
            num_experts);
    if (expert >= 0) left[expert] -= plan.quotas[i];
  }
  const auto odd = std::ranges::find_if(left, [](std::int64_t rest) { return rest != 0; });
  require(odd == left.end(), who, ": the plan is not one of these rows: expert ",
          odd - left.begin(), " has ", odd == left.end() ? 0 : *odd, " rows more than quotas");
}

/// Slots with rows of other ranks, by expert, in order of first_row; before them where those of
/// each expert begin, and end.
std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> sharing_slots(
    const EvenExperts& plan, std::int64_t num_experts) {
  std::vector<std::int64_t> begin(num_experts + 1);
  const auto shares = [&](std::int64_t i) {
    return plan.slots[i] >= 0 && plan.quotas[i] > plan.local_rows[i];
  };
  for (std::int64_t i = 0; i < std::ssize(plan.slots); ++i) {
    if (shares(i)) ++begin[plan.slots[i] + 1];
  }
  for (std::int64_t e = 0; e < num_experts; ++e) begin[e + 1] += begin[e];
  std::vector<std::int64_t> slots(begin[num_experts]);
  std::vector<std::int64_t> next = begin;
  for (std::int64_t i = 0; i < std::ssize(plan.slots); ++i) {
    if (shares(i)) slots[next[plan.slots[i]]++] = i;
  }
  return {std::move(begin), std::move(slots)};
}

/// For each expert, where the rows of `rank` begin.
std::vector<Cursor> first_cursors(const EvenExperts& plan, std::span<const std::int64_t> rows,
                                  std::int64_t num_experts, std::int32_t rank) {
  std::vector<Cursor> cursors(num_experts);
  for (std::int32_t r = 0; r <= rank; ++r) {
    if (r < rank) {
      for (std::int64_t e = 0; e < num_experts; ++e)
        cursors[e].next_rest += rows[r * num_experts + e];
    }
    for (std::int64_t i = std::int64_t{r} * plan.slots_per_rank;
         i < (r + std::int64_t{1}) * plan.slots_per_rank; ++i) {
      if (plan.slots[i] < 0 || plan.quotas[i] == 0) continue;
      Cursor& cursor = cursors[plan.slots[i]];
      if (r < rank) {
        cursor.next_rest -= plan.local_rows[i];
      } else {
        cursor.local_slot = i;
        cursor.local_rows = plan.local_rows[i];
      }
    }
  }
  return cursors;
}

}  // namespace

std::vector<std::int32_t> slot_ids(const EvenExperts& plan, std::span<const std::int64_t> rows,
                                   std::span<const std::int32_t> ids, std::int32_t rank) {
  require(plan.num_ranks >= 1 && std::ssize(rows) % plan.num_ranks == 0, who, ": rows has ",
          rows.size(), " numbers, expected [", plan.num_ranks, ", num_experts]");
  const std::int64_t num_experts = std::ssize(rows) / plan.num_ranks;
  check_tables(plan, rows, num_experts, rank);
  const auto [sharing_begin, sharing] = sharing_slots(plan, num_experts);
  std::vector<Cursor> cursors = first_cursors(plan, rows, num_experts, rank);
  std::vector<std::int32_t> result;
  result.reserve(ids.size());
  for (const std::int32_t id : ids) {
    if (id == -1 || id == num_experts) {  // dropped
      result.push_back(id < 0 ? id : static_cast<std::int32_t>(plan.slots.size()));
      continue;
    }
    require(0 <= id && id < num_experts, who, ": ids[", result.size(), "] = ", id, ", expected 0..",
            num_experts - 1, ", or ", num_experts, " or -1 for a dropped one");
    Cursor& cursor = cursors[id];
    require(cursor.taken++ < rows[rank * num_experts + id], who, ": ids have more than rows[", rank,
            "][", id, "] = ", rows[rank * num_experts + id], " of expert ", id);
    if (cursor.local_rows > 0) {
      --cursor.local_rows;
      result.push_back(static_cast<std::int32_t>(cursor.local_slot));
      continue;
    }
    const auto first = sharing.begin() + sharing_begin[id];
    const auto last = sharing.begin() + sharing_begin[id + 1];
    const auto after = std::upper_bound(
        first, last, cursor.next_rest++,
        [&](std::int64_t place, std::int64_t slot) { return place < plan.first_row[slot]; });
    require(after != first, who, ": first_row of expert ", id, " begins above 0");
    result.push_back(static_cast<std::int32_t>(*(after - 1)));
  }
  for (std::int64_t e = 0; e < num_experts; ++e) {
    require(cursors[e].taken == rows[rank * num_experts + e], who, ": ids have ", cursors[e].taken,
            " of expert ", e, ", expected rows[", rank, "][", e,
            "] = ", rows[rank * num_experts + e]);
  }
  return result;
}

}  // namespace waybill
