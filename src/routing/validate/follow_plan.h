#pragma once

#include "arrivals.h"
#include "plan_index.h"

namespace waybill::validation {

/// False, and a finding, unless the entries of a forward table are the shards of the plan: shard j
/// of a rank is its entry j, with the same length; further entries are padding.
[[nodiscard]] bool check_entries(const SendTable& table, const PlanIndex& index,
                                 Findings& findings);

/// Queries go where the plan says, and land in the global order. After check_lines and
/// check_tiling.
void check_queries(const SendTable& table, const Arrivals& arrivals, const PlanIndex& index,
                   Findings& findings);

/// Every query meets exactly the KV shards that its mask asks for, in document order, and no
/// buffer holds others. After check_lines.
void check_causality(const SendTable& table, const Arrivals& arrivals, const PlanIndex& index,
                     Findings& findings);

/// KvLayout::per_rank: the copies of a shard are numbered by the last query of the document on
/// the rank that holds them, last first. After check_lines.
void check_copy_order(const SendTable& table, const PlanIndex& index, Findings& findings);

/// The attention layout of a plan, sparse and dense.
void check_attention(const SparseAttnLayout& attention, const PlanIndex& index, Findings& findings);
void check_attention(const AttnLayout& attention, const PlanIndex& index, Findings& findings);

}  // namespace waybill::validation
