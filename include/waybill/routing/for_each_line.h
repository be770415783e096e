#pragma once

#include <cstdint>

#include "waybill/core/at.h"
#include "waybill/routing/sparse_metadata.h"

namespace waybill::detail {

/// Calls visit(home rank, first row there, line) for all lines.
template <class Visit>
void for_each_line(const SparseMetadata& metadata, const Visit& visit) {
  for (std::int32_t w = 0; w < metadata.world_size; ++w) {
    std::int64_t row = 0;
    for (auto j = metadata.rank_offsets[at(w)]; j < metadata.rank_offsets[at(w) + 1]; ++j) {
      visit(w, row, j);
      row += metadata.seq_len[at(j)];
    }
  }
}

}  // namespace waybill::detail
