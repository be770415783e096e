#pragma once

#include "waybill/routing/metadata.h"

namespace waybill::detail {

/// The metadata of all ranks again, from what get_slice gives for each: padded to the longest. Only
/// dst_rank, dst_offset and seq_len.
[[nodiscard]] Metadata stack_slices(const Metadata& metadata);

}  // namespace waybill::detail
