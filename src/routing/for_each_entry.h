#pragma once

#include <cstdint>

#include "waybill/routing/sparse_metadata.h"

namespace waybill::detail {

/// Calls visit(home rank, first row there, entry) for all entries.
template <class Visit>
void for_each_entry(const SparseMetadata& metadata, const Visit& visit) {
  for (std::int32_t w = 0; w < metadata.world_size; ++w) {
    std::int64_t row = 0;
    for (auto j = metadata.rank_offsets[w]; j < metadata.rank_offsets[w + 1]; ++j) {
      visit(w, row, j);
      row += metadata.seq_len[j];
    }
  }
}

}  // namespace waybill::detail
