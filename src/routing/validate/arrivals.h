#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "send_table.h"

namespace waybill::validation {

/// A copy, seen from where it lands.
struct Arrival {
  std::int64_t row;    ///< first row in the destination's buffer
  std::int32_t entry;  ///< of the table
  std::int32_t slot;   ///< which copy of the entry
};

/// The copies of a table by destination, in the order of their rows there. At the same row, those
/// without rows come first; among these the order is the global one.
struct Arrivals {
  std::vector<std::int64_t> offsets;  ///< [W + 1]
  UninitializedVector<Arrival> list;  ///< [destinations]
  std::vector<std::int64_t> rows;     ///< [W]: sum of the lengths
  /// [W]: 1 where the rows are without gap or overlap. Before check_tiling only of those whose
  /// rows come in the global order.
  std::vector<std::uint8_t> tiled;

  [[nodiscard]] std::span<const Arrival> of(std::int32_t rank) const {
    return {list.data() + offsets[rank], list.data() + offsets[rank + 1]};
  }
};

/// Counting sort by rank. Where the global order is not the order of rows: a radix sort of that
/// rank's copies. Linear.
[[nodiscard]] Arrivals sort_arrivals(const SendTable& table);

/// Every buffer is written exactly once, from row 0 without gap or overlap.
void check_tiling(const SendTable& table, Arrivals& arrivals, Findings& findings);

/// No buffer is larger than `capacity` rows; -1: any.
void check_capacity(const SendTable& table, const Arrivals& arrivals, std::int64_t capacity,
                    Findings& findings);

/// The reverse table sends back what arrived, in the order of rows, to `copy * T + begin`.
void check_reverse(const SendTable& forward, const Arrivals& arrivals, const SendTable& reverse,
                   Findings& findings);

}  // namespace waybill::validation
