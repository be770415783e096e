#pragma once

#include "even_experts_rule.h"

namespace waybill::cuda {

/// The ranks of a try. Lane l has the ranks l, l + 32, ..., `Own` of them.
template <class Warp, int Own>
struct EvenExpertsRanks {
  typename Warp::Int load[Own], free_slots[Own];
  typename Warp::Int top_rows[Own], top_expert[Own];  ///< largest expert of ranks above the limit
};

/// Gives rows of ranks above a limit to the emptiest ranks, by one warp. A step is a chain of
/// waits, so all that it asks of ranks is kept ready in keys that one reduction decides on; what a
/// rank would give is known to its lane before it is known which rank gives.
/// @tparam Number of 32 bits where keys fit, of 64 elsewhere
template <class Warp, int Own, class Number>
class EvenExpertsSettle {
 public:
  using Int = typename Warp::Int;
  using Mask = typename Warp::Mask;

  /// Whether keys for this limit fit into 32 bits.
  WAYBILL_HOST_DEVICE static bool fits_narrow(const EvenExpertsParams& p, int limit, int fullest) {
    // The largest order of a giver: weights that it sends * room of the taker + rows.
    const std::int64_t largest = std::int64_t{p.num_ranks} * p.spare * limit + fullest + 1;
    return largest * num_keys <= std::int64_t{0xFFFFFFFF} && limit < (1 << 24) &&
           p.homes <= num_keys;
  }

  WAYBILL_HOST_DEVICE EvenExpertsSettle(const EvenExpertsParams& p, const EvenExpertsMemory& m,
                                        const EvenExpertsWarp& own, int limit)
      : home_rows_(Warp::pin(own.home_rows)),
        copies_(Warp::pin(own.copies)),
        copy_rows_(Warp::pin(own.copy_rows)),
        present_(p.present == nullptr ? nullptr : m.present),
        homes_(Warp::keep(p.homes)),
        spare_(Warp::keep(p.spare)),
        min_rows_(Warp::keep(p.min_rows)),
        alignment_(Warp::keep(p.alignment)),
        limit_(limit) {}

  /// @param spread the rank gives next that will have sent most weights, else the fullest
  /// @param whole a rank with several free slots takes an expert that fits, else the largest
  /// @return false: a rank stays above the limit, or a lower try has succeeded meanwhile
  WAYBILL_HOST_DEVICE bool run(EvenExpertsRanks<Warp, Own>& ranks, bool spread, bool whole,
                               const int* best_try, int attempt) {
    begin(ranks);
    const bool is_settled =
        give_all(spread, whole, Warp::pin(best_try), attempt * EvenExpertsBlock::max_warps);
    for (int k = 0; k < Own; ++k) ranks.load[k] = excess_[k] + Int(limit_);
    return is_settled;
  }

 private:
  static constexpr bool is_narrow = sizeof(Warp::reduce_max(Number(0))) == 4;
  static constexpr int num_keys = 1 << EvenExpertsCopy::rank_bits;
  static constexpr int taker_bits = EvenExpertsCopy::rank_bits + 1;
  static constexpr int top_bits =
      is_narrow ? EvenExpertsCopy::rank_bits : EvenExpertsCopy::expert_bits;
  static constexpr int top_mask = (1 << top_bits) - 1;
  static_assert(Own * warp_lanes <= num_keys);

  WAYBILL_HOST_DEVICE Int rank_of(int k) const { return Warp::lane() + Int(k * warp_lanes); }

  WAYBILL_HOST_DEVICE void begin(const EvenExpertsRanks<Warp, Own>& ranks) {
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      excess_[k] = ranks.load[k] - Int(limit_);
      free_[k] = ranks.free_slots[k];
      sent_[k] = Number(0);
      const Int home = ranks.top_expert[k] - rank_of(k) * Int(homes_);
      top_[k] = Number(ranks.top_rows[k]) * Number(top_mask + 1) + Number(Int(top_mask) - home);
      set_keys(k);
    }
    changed_rows_ = home_rows_of_lanes(changed_rank_);
  }

  /// The lane's keys of its rank k. A rank below the limit with a free slot may take: (room, rank
  /// counted down, whether the slot is the last). One above it gives: (excess, rank counted down).
  WAYBILL_HOST_DEVICE void set_keys(int k) {
    const Int down = Int(num_keys - 1) - rank_of(k);
    const Mask takes = excess_[k] < Int(0) && free_[k] > Int(0);
    const Number taker = Number(Int(0) - excess_[k]) * Number(1 << taker_bits) +
                         Number(down + down + Warp::select(free_[k] == Int(1), Int(1), Int(0)));
    taker_[k] = Warp::select(takes, taker, Number(0));
    const Mask gives = excess_[k] > Int(0);
    const Number giver = Number(excess_[k]) * Number(num_keys) + Number(down);
    giver_[k] = Warp::select(gives, giver, Number(0));
    sent_[k] = Warp::select(gives, sent_[k], Number(0));
  }

  /// What one rank gives to another: rows of its largest expert, into a new copy, which it sends.
  struct Gift {
    int taker, giver, taker_free, rows;
    int home = 0;  ///< number of the expert in its rank
    int expert_rows = 0;
    int is_new = 1, is_sent = 1;
    int flag = 0;  ///< EvenExpertsCopy::is_present
  };

  /// The loop ends by what all lanes get of a reduction, so that they stay together.
  WAYBILL_HOST_DEVICE bool give_all(bool spread, bool whole, const int* best_try, int own_try) {
    const bool is_special = whole || present_ != nullptr || alignment_ > 1;
    for (;;) {
      const int best = Warp::read(best_try);
      const auto taker_key = next_taker();
      note_top();
      const int room = static_cast<int>(taker_key >> taker_bits);
      const bool is_last = (taker_key & 1) != 0;
      const auto giver_key = next_giver(spread ? room : 0);
      Int shares[Own];
      WAYBILL_UNROLL(4)
      for (int k = 0; k < Own; ++k) {
        const Mask fills = Mask(is_last) && free_[k] > Int(0);
        shares[k] = Warp::hold(share(Int(top_[k] >> top_bits), room, excess_[k], fills));
      }
      if (giver_key == 0) return true;
      if (taker_key == 0) return false;
      const int taker = num_keys - 1 - static_cast<int>(taker_key >> 1 & (num_keys - 1));
      const int giver = num_keys - 1 - static_cast<int>(giver_key & (num_keys - 1));
      Gift gift{taker, giver, of_rank(free_, taker), of_rank(shares, giver)};
      const auto top = of_rank(top_, giver);
      // Other warps may change the number meanwhile: all lanes go by the first.
      const bool is_beaten = Warp::broadcast(Int(best), 0) < own_try;
      gift.home = top_mask - static_cast<int>(top & top_mask);
      gift.expert_rows = static_cast<int>(top >> top_bits);
      if (is_special) refine(gift, whole && !is_last, room);
      give(gift);
      if (gift.rows == 0 || is_beaten) end();
    }
  }

  /// No rank takes any more.
  WAYBILL_HOST_DEVICE void end() {
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) taker_[k] = Number(0);
  }

  /// (room, rank counted down, last slot) of the emptiest rank that can take; 0: none.
  WAYBILL_HOST_DEVICE auto next_taker() const {
    Number best = taker_[0];
    WAYBILL_UNROLL(4)
    for (int k = 1; k < Own; ++k) best = Warp::larger(best, taker_[k]);
    return Warp::reduce_max(best);
  }

  /// (order, rank counted down) of the rank that gives next; 0: none is above the limit.
  WAYBILL_HOST_DEVICE auto next_giver(int weight) const {
    Number best = Number(0);
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) best = Warp::larger(best, sent_[k] * Number(weight) + giver_[k]);
    return Warp::reduce_max(best);
  }

  /// The lane's number that belongs to rank `rank`, which all lanes know.
  template <class Value>
  WAYBILL_HOST_DEVICE auto of_rank(const Value (&values)[Own], int rank) const {
    const auto place = static_cast<unsigned>(rank);
    Value value = values[0];
    WAYBILL_UNROLL(4)
    for (int k = 1; k < Own; ++k) {
      if (place / warp_lanes == static_cast<unsigned>(k)) value = values[k];
    }
    return Warp::broadcast(value, static_cast<int>(place % warp_lanes));
  }

  /// How many of an expert's rows a copy takes, before they are rounded; 0: none.
  /// @param fills the rank is filled to the brim
  WAYBILL_HOST_DEVICE Int share(const Int& rows, int room, const Int& excess,
                                const Mask& fills) const {
    const Int most = Warp::smaller(rows, Int(room));
    Int wanted = Warp::select(fills, most, Warp::smaller(most, excess));
    wanted = Warp::larger(wanted, Warp::smaller(Int(min_rows_), most));
    return Warp::select(wanted >= Int(min_rows_), wanted, Int(0));
  }

  /// What ways and options add to the common case.
  WAYBILL_HOST_DEVICE void refine(Gift& gift, bool whole, int room) const {
    if (whole) take_whole(gift, room);
    if (alignment_ > 1) gift.rows = aligned(gift.rows, gift.expert_rows, room);
    if (present_ == nullptr && alignment_ == 1) return;
    const int expert = gift.giver * homes_ + gift.home;
    if (add_to_copy(gift, expert)) gift.is_new = gift.is_sent = 0;
    if (present_ == nullptr || find(present_ + gift.taker * spare_, spare_, expert) < 0) return;
    gift.flag = EvenExpertsCopy::is_present;
    gift.is_sent = 0;
  }

  /// An expert that fits into the room, if the giver has more above the limit and such an expert.
  WAYBILL_HOST_DEVICE void take_whole(Gift& gift, int room) const {
    if (of_rank(excess_, gift.giver) <= room) return;
    const auto fitting = largest(gift.giver, home_rows_of_lanes(gift.giver), room);
    const auto rows = static_cast<int>(fitting >> top_bits);
    if (rows == 0) return;
    gift.home = top_mask - static_cast<int>(fitting & top_mask);
    gift.expert_rows = rows;
    gift.rows = rows >= min_rows_ ? rows : 0;
  }

  /// A share rounded to the alignment, up where there is room; an expert taken whole stays so.
  WAYBILL_HOST_DEVICE int aligned(int rows, int expert_rows, int room) const {
    if (rows >= expert_rows) return rows;
    const int most = expert_rows < room ? expert_rows : room;
    int rounded = rows / alignment_ * alignment_;
    if (rounded < rows && most - rounded >= alignment_) rounded += alignment_;
    return rounded >= min_rows_ ? rounded : 0;
  }

  /// Rows of the first 32 experts of a rank.
  WAYBILL_HOST_DEVICE Int home_rows_of_lanes(int rank) const {
    return Warp::gather(home_rows_ + rank * homes_, Warp::lane(), Warp::lane() < Int(homes_), 0);
  }

  /// (rows, number in the rank counted down) of a rank's largest expert, at most `max_rows`.
  /// @param rows those of its first 32
  WAYBILL_HOST_DEVICE auto largest(int rank, Int rows, int max_rows) const {
    Number best = top_key(Warp::lane(), rows, max_rows);
    WAYBILL_UNROLL(1)
    for (int h = warp_lanes; h < homes_; h += warp_lanes) {
      const Int home = Warp::lane() + Int(h);
      const Int more = Warp::gather(home_rows_ + rank * homes_, home, home < Int(homes_), 0);
      best = Warp::larger(best, top_key(home, more, max_rows));
    }
    return Warp::reduce_max(best);
  }

  WAYBILL_HOST_DEVICE static Number top_key(const Int& home, const Int& rows, int max_rows) {
    const Number key = Number(rows) * Number(top_mask + 1) + Number(Int(top_mask) - home);
    return Warp::select(rows > Int(0) && rows <= Int(max_rows), key, Number(0));
  }

  /// The largest expert of the rank that gave last. It is sought while the next taker is: nothing
  /// waits for it soon.
  WAYBILL_HOST_DEVICE void note_top() {
    const Number top = Number(largest(changed_rank_, changed_rows_, INT_MAX));
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k)
      top_[k] = Warp::select(rank_of(k) == Int(changed_rank_), top, top_[k]);
  }

  /// The place of a copy of `expert` among those that the rank has taken; -1: none.
  WAYBILL_HOST_DEVICE static int find(const int* copies, int count, int expert) {
    WAYBILL_UNROLL(1)
    for (int s = 0; s < count; s += warp_lanes) {
      const Int i = Warp::lane() + Int(s);
      const Mask there = i < Int(count);
      const Int copy = Warp::gather(copies, i, there, -1);
      const std::uint32_t lanes =
          Warp::ballot(there && EvenExpertsCopy::expert(copy) == Int(expert));
      if (lanes != 0) return s + Warp::lowest(lanes);
    }
    return -1;
  }

  /// Adds to a copy that the taker has already. Only possible where copies were present, or where
  /// shares are rounded: otherwise a copy takes an expert whole, or fills a rank, or settles one.
  /// @return whether there is one
  WAYBILL_HOST_DEVICE bool add_to_copy(const Gift& gift, int expert) const {
    const int first = gift.taker * spare_;
    const int old = find(copies_ + first, spare_ - gift.taker_free, expert);
    if (old < 0) return false;
    const Mask first_lane = Warp::lane() == Int(0);
    const Int before = Warp::gather(copy_rows_, Int(first + old), first_lane, 0);
    Warp::scatter(copy_rows_, Int(first + old), before + Int(gift.rows), first_lane);
    return true;
  }

  WAYBILL_HOST_DEVICE void give(const Gift& gift) {
    const int expert = gift.giver * homes_ + gift.home;
    const int copy = EvenExpertsCopy::pack(expert, gift.giver, gift.taker) | gift.flag;
    const int slot = (gift.taker + 1) * spare_ - gift.taker_free;
    Warp::put(home_rows_ + expert, gift.expert_rows - gift.rows);
    if (gift.is_new != 0) {
      Warp::put(copies_ + slot, copy);
      Warp::put(copy_rows_ + slot, gift.rows);
    }
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Mask takes = rank_of(k) == Int(gift.taker), gives = rank_of(k) == Int(gift.giver);
      free_[k] = free_[k] - Warp::select(takes, Int(gift.is_new), Int(0));
      excess_[k] = excess_[k] + Warp::select(takes, Int(gift.rows), Int(0)) -
                   Warp::select(gives, Int(gift.rows), Int(0));
      sent_[k] = sent_[k] + Warp::select(gives, Number(Int(gift.is_sent * num_keys)), Number(0));
      set_keys(k);
    }
    Warp::sync();
    changed_rank_ = gift.giver;
    changed_rows_ = home_rows_of_lanes(gift.giver);
  }

  int* const home_rows_;
  int* const copies_;
  int* const copy_rows_;
  const int* const present_;
  const int homes_, spare_, min_rows_, alignment_, limit_;  // in registers
  Int excess_[Own];                                         // rows above the limit
  Int free_[Own];                                           // free slots
  Number taker_[Own], giver_[Own], sent_[Own];              // keys; weights sent * num_keys
  Number top_[Own];                                         // the largest expert
  int changed_rank_ = 0;  // that gave last, and rows of its experts; see note_top
  Int changed_rows_;
};

}  // namespace waybill::cuda
