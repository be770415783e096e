#pragma once

#include "waybill/moe/simulate.h"

namespace waybill::detail {

/// The descriptors of all ranks, from ids, dst_row, rows and origins.
void fill_layouts(ExpertDispatch& dispatch, bool positions_given);

/// What crosses which link, from ids.
void fill_traffic(ExpertDispatch& dispatch);

}  // namespace waybill::detail
