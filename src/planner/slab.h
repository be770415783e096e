#pragma once

#include <cstdint>

#include "home_layout.h"
#include "waybill/planner/planner.h"

namespace waybill::detail {

/// Work and bytes of slabs.
struct SlabCosts {
  AttentionMask mask;
  double q_row = 0;   ///< bytes
  double kv_row = 0;  ///< bytes, K and V
  std::int64_t block_tokens = 128;
  double fine_work = 0;  ///< a block with more work than this is cut finer
  HardwareFacts facts;
  bool tails = false;

  SlabCosts() = default;
  explicit SlabCosts(const PlannerOptions& options);

  [[nodiscard]] std::int64_t work(Slab slab) const {
    return kernel_work(mask, facts, slab.begin, slab.end, slab.doc_len);
  }

  /// KV rows [begin, end) of the document that the slab needs.
  [[nodiscard]] Slab keys(Slab slab) const {
    if (mask.is_full()) return {0, slab.doc_len, slab.doc_len};
    return {mask.first_key(slab.begin), slab.end, slab.doc_len};
  }

  /// KV rows that a rank without any needs for the slab.
  [[nodiscard]] std::int64_t context(Slab slab) const { return keys(slab).rows(); }

  /// KV rows that a home lacks for the queries of its piece.
  [[nodiscard]] std::int64_t remote_context(Slab piece) const {
    return context(piece) - piece.rows();
  }

  /// The grid on which a slab of this document that ends near `position` is cut: a power of two
  /// times fewer tokens than a block where blocks weigh too much.
  [[nodiscard]] std::int64_t grid(std::int64_t position, std::int64_t doc_len) const;

  /// The longest part of `slab` that ends where it ends, begins on the grid, and has at most
  /// `work`; it ends where it begins when not even one step fits.
  [[nodiscard]] Slab slab_down(Slab slab, std::int64_t work) const;

  /// A slab of `piece` with at least `work` (or the whole piece) that costs the ranks which take it
  /// few bytes, when one rank takes `slab_work` of it.
  [[nodiscard]] Slab cheapest_region(Slab piece, std::int64_t work, double slab_work) const;

  /// About the bytes in when ranks without any of its rows share a region, `slab_work` each.
  [[nodiscard]] double bytes_of(Slab region, double slab_work) const;

 private:
  [[nodiscard]] std::int64_t end_for(std::int64_t begin, double work, std::int64_t doc_len) const;
};

}  // namespace waybill::detail
