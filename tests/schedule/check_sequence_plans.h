#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "schedule/sequence_plan.h"

namespace waybill::test {

/// Checks the plans of all ranks for one call against the metadata that they were compiled from, by
/// carrying them out on names of rows instead of rows. It knows the tables alone and shares nothing
/// with what compiles them. Time and memory linear in rows.
///
/// dispatch: every row of every window is written once and is the row that the metadata say; rows
/// that are forwarded have been waited for. kv_gradient: every row of the outputs is written once
/// and has each copy of the row in it once; what is read has been waited for and is on the reader's
/// node. Both: slots have one batch that raises them, nothing lies over anything else, and nobody
/// waits for ever.
/// @param plans [W], plan r of rank r
/// @param ranks_per_node 0: all ranks on one node
/// @return what is wrong, up to max_findings; empty: nothing
[[nodiscard]] std::vector<std::string> check_sequence_plans(std::span<const SequencePlan> plans,
                                                            std::span<const SequencePart> parts,
                                                            std::int32_t ranks_per_node = 0,
                                                            std::size_t max_findings = 20);

}  // namespace waybill::test
