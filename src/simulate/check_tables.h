#pragma once

#include "expected_layout.h"
#include "finding_list.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::detail {

/// The attention layout against the plan. Returns whether its tables are long enough to be read.
bool check_attention(const QkvPlan& plan, const ExpectedLayout& expected,
                     const SparseAttnLayout& attention, FindingList& findings);

/// Counts of received rows against the entries of a table that simulate_dispatch took.
void check_counts(const char* table, const SparseMetadata& metadata, FindingList& findings);

/// The entries of forward KV are the plan's shards, with as many copies as they need. Returns
/// whether they are the shards.
bool check_copies(const QkvPlan& plan, const ExpectedLayout& expected, const SparseMetadata& fwd_kv,
                  FindingList& findings);

/// Rows of a table that leave their rank.
[[nodiscard]] std::int64_t rows_over_the_wire(const SparseMetadata& metadata);

}  // namespace waybill::detail
