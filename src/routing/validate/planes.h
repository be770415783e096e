#pragma once

#include "arrivals.h"

namespace waybill::validation {

/// The reverse of a table with copies, by itself: what arrives at a home rank is exactly the copies
/// that its seq_recv_mask names, each at `copy * T + begin`. After the table's load as reverse.
void check_planes(const Metadata& reverse, const SendTable& table, const Arrivals& arrivals,
                  Findings& findings);

}  // namespace waybill::validation
