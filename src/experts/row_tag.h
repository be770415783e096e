#pragma once

#include <cstdint>

namespace waybill {

/// Says where a received row comes from. It travels with the row, in one store of 16 bytes.
struct alignas(16) RowTag {
  std::int32_t source_rank;
  std::int32_t token;
  std::int32_t topk_slot;    ///< compact rows: the token's first topk slot on this rank
  std::int32_t primary_row;  ///< the token's first row on this rank; compact rows: the row itself
};
static_assert(sizeof(RowTag) == 16);

}  // namespace waybill
