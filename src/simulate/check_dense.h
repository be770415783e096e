#pragma once

#include "expected_layout.h"
#include "finding_list.h"
#include "waybill/routing/generators.h"

namespace waybill::detail {

/// The tables of a dense dispatch that the payload does not show: counts matrices, totals, numbers
/// of shards, seq_recv_mask, recv_seq_lens, attention layout.
void check_dense_tables(const QkvDispatch& dispatch, const ExpectedLayout& expected,
                        FindingList& findings);

}  // namespace waybill::detail
