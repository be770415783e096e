#pragma once

#include <cstdint>

#include "waybill/planner/attention_mask.h"
#include "waybill/planner/planner_options.h"

namespace waybill::detail {

/// Queries [begin, end) of a document.
struct Slab {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// What planning knows about work and bytes of slabs.
struct SlabCosts {
  AttentionMask mask;
  double q_row = 0;   ///< bytes
  double kv_row = 0;  ///< bytes, K and V
  std::int64_t block_tokens = 128;
  double fine_work = 0;  ///< a block with more work than this is cut finer

  SlabCosts() = default;
  SlabCosts(const PlannerOptions& options, double mean_work);

  [[nodiscard]] std::int64_t work(Slab slab) const { return mask.pairs(slab.begin, slab.end); }

  /// KV rows that a rank without any needs for the slab.
  [[nodiscard]] std::int64_t context(Slab slab) const {
    return slab.end - mask.first_key(slab.begin);
  }

  /// The grid on which a slab that ends near `position` is cut: a power of two times fewer tokens
  /// than a block where blocks weigh too much.
  [[nodiscard]] std::int64_t grid(std::int64_t position) const;

  /// The longest slab that ends at `end`, begins on the grid at `lowest` or later, and has at most
  /// `work`; it ends where it begins when not even one step fits.
  [[nodiscard]] Slab slab_down(std::int64_t lowest, std::int64_t end, std::int64_t work) const;

  /// The longest slab that begins at `begin`, ends on the grid at `highest` or earlier, and has at
  /// most `work`; it ends where it begins when not even one step fits.
  [[nodiscard]] Slab slab_up(std::int64_t begin, std::int64_t highest, std::int64_t work) const;

  /// A slab of `piece` with at least `work` (or the whole piece) that costs the ranks which take it
  /// few bytes, when one rank takes `slab_work` of it.
  [[nodiscard]] Slab cheapest_region(Slab piece, std::int64_t work, double slab_work) const;

  /// About the bytes in when ranks without any of its rows share a region, `slab_work` each.
  [[nodiscard]] double bytes_of(Slab region, double slab_work) const;

 private:
  [[nodiscard]] std::int64_t end_for(std::int64_t begin, double work) const;
};

}  // namespace waybill::detail
