#pragma once

#include <cstdint>
#include <vector>

#include "home_layout.h"
#include "slab.h"

namespace waybill::detail {

/// Counts the rows of Q and KV in the buffers of each rank while queries move, never too low.
/// Without a limit it does nothing.
class Capacity {
 public:
  void reset(const HomeLayout& home, const SlabCosts& costs, std::int64_t limit);

  [[nodiscard]] bool limited() const { return limit_ > 0; }
  [[nodiscard]] bool exceeded(std::int32_t rank) const;
  [[nodiscard]] std::int64_t needed(std::int32_t rank) const;
  [[nodiscard]] std::int64_t limit() const { return limit_; }

  /// The part of `slab`, from its end, for which `rank` has room; empty where there is none.
  [[nodiscard]] Slab fitting(std::int32_t rank, std::int32_t doc, Slab slab) const;

  /// Rows of KV for which some rank has room.
  [[nodiscard]] std::int64_t most_kv_room() const;

  void give(std::int32_t rank, std::int32_t doc, Slab slab);
  void take(std::int32_t rank, Slab slab);  ///< queries leave; KV is counted on
  void take_piece(std::int32_t piece);      ///< a whole piece leaves its home, and its KV

 private:
  [[nodiscard]] Slab keys_of(Slab slab) const;
  [[nodiscard]] std::int64_t new_kv_rows(std::int32_t rank, std::int32_t doc, Slab slab) const;

  struct Held {
    Slab rows;
    std::int32_t doc = -1;
  };

  const HomeLayout* home_ = nullptr;
  const SlabCosts* costs_ = nullptr;
  std::int64_t limit_ = 0;
  std::vector<std::int64_t> q_rows_;   ///< [W]
  std::vector<std::int64_t> kv_rows_;  ///< [W]
  std::vector<Held> held_;             ///< [W] KV of the document that came last
};

}  // namespace waybill::detail
