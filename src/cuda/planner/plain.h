#pragma once

#include "rule.h"

namespace waybill::cuda {

/// A try in which no copy was present, no rank takes near, no share is rounded and no expert is
/// sought that fits. A step then is one reduction and one exchange, one after the other: a rank's
/// lane has its experts in order and works out what the rank would give while all seek the giver,
/// and the emptiest rank but the taker is known before it is known what the taker takes. Gifts
/// are a list; tables are written when a try has succeeded.
template <class Warp, int Own>
class EvenExpertsPlain {
 public:
  using Int = typename Warp::Int;
  using Key = typename Warp::Unsigned;
  using Mask = typename Warp::Mask;
  static constexpr int homes =
      Own == 1 ? EvenExpertsMemory::max_listed_homes : 4;  ///< experts of a rank at most

  WAYBILL_HOST_DEVICE static bool fits(const EvenExpertsParams& p, int limit, int fullest) {
    // The largest order of a giver: weights that it sends * room of the taker + rows.
    const std::int64_t largest = std::int64_t{p.num_ranks} * p.spare * limit + fullest + 1;
    return p.homes <= homes && p.spare <= EvenExpertsMemory::max_listed_spare && p.alignment == 1 &&
           p.present == nullptr && limit < 1 << (32 - taker_bits) &&
           largest * num_keys <= std::int64_t{0xFFFFFFFF};
  }

  WAYBILL_HOST_DEVICE EvenExpertsPlain(const EvenExpertsParams& p, const EvenExpertsMemory& m,
                                       const EvenExpertsWarp& own, int limit)
      : gifts_(Warp::pin(own.gifts)), min_rows_(Warp::keep(p.min_rows)) {
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) begin(p, m, limit, k);
  }

  /// @param spread the rank gives next that will have sent most weights, else the fullest
  /// @return the number of gifts; -1: a rank stays above the limit, or a lower try has succeeded
  WAYBILL_HOST_DEVICE int run(bool spread, const int* best_try, int own_try) {
    const int* const best_of_all = Warp::pin(best_try);
    const Key a_weight = Key(static_cast<std::uint32_t>(Warp::keep(spread ? num_keys : 0)));
    int* gift = gifts_;
    std::uint32_t taker = next_taker(0), failed = 0;
    for (int count = 0;; ++count, gift += 4) {
      const int best = Warp::read(best_of_all);
      const int room = static_cast<int>(taker >> taker_bits);
      const bool is_last = (taker & max_free) == 1;
      Key order[Own];
      WAYBILL_UNROLL(4)
      for (int k = 0; k < Own; ++k)
        order[k] = sent_[k] * Key(static_cast<std::uint32_t>(room)) + giver_[k];
      // The lane's rank that would give.
      Key most = order[0], of = giver_[0], sent = sent_[0], top = rows_[0][0], base = base_;
      WAYBILL_UNROLL(4)
      for (int k = 1; k < Own; ++k) {
        const Mask better = order[k] > most;
        most = Warp::larger(most, order[k]);
        of = Warp::select(better, giver_[k], of);
        sent = Warp::select(better, sent_[k], sent);
        top = Warp::select(better, rows_[k][0], top);
        base = Warp::select(better, base_ - Key(static_cast<std::uint32_t>(k * lanes_down)), base);
      }
      const std::uint32_t giver = Warp::reduce_max(most);
      const std::uint32_t other = next_taker(taker);
      const Int excess = Int(of >> EvenExpertsCopy::rank_bits);
      const Int share = rows_given(Int(top >> EvenExpertsCopy::rank_bits), room, excess, is_last);
      const Int left = excess - share;
      const Mask gives_on = left > Int(0);
      const Key given = Key(share) * Key(num_keys);
      const Key new_giver = Warp::select(gives_on, of - given, Key(0));
      const Key new_sent = Warp::select(gives_on, sent + a_weight, Key(0));
      const Key falls =
          Warp::select(left < Int(0), base + Key(Int(0) - left) * Key(1U << taker_bits), Key(0));
      const Mask gives = most == Key(giver);
      const auto lane = static_cast<int>(~giver & (warp_lanes - 1));
      const int rows = Warp::broadcast(share, lane);
      const std::uint32_t fallen = Warp::broadcast(falls, lane);
      Warp::put_four(gift, Int(Key(taker)), Int(of), Int(top), share, gives);
      // The taker has a slot less, and may take again.
      const bool takes_again = (taker & max_free) > 1 && rows < room;
      const std::uint32_t again =
          takes_again ? taker - 1 - (static_cast<std::uint32_t>(rows) << taker_bits) : 0;
      WAYBILL_UNROLL(4)
      for (int k = 0; k < Own; ++k) {
        const Mask gives_k = order[k] == Key(giver);
        taker_[k] = Warp::select(taker_[k] == Key(taker), Key(again), taker_[k]);
        taker_[k] = Warp::select(gives_k, falls, taker_[k]);
        giver_[k] = Warp::select(gives_k, new_giver, giver_[k]);
        sent_[k] = Warp::select(gives_k, new_sent, sent_[k]);
        lower_top(k, Warp::select(gives_k, given, Key(0)));
      }
      taker = other > again ? other : again;
      taker = fallen > taker ? fallen : taker;
      // Whether a step has failed is asked a step later: the answer takes long. What the last step
      // changed no one reads any more.
      if (giver == 0 || failed != 0) return failed == 0 ? count : -1;
      failed = Warp::ballot(Mask(rows == 0 || best < own_try));
    }
  }

  /// Writes the tables of a try that has succeeded.
  WAYBILL_HOST_DEVICE static void write(const EvenExpertsParams& p, const EvenExpertsMemory& m,
                                        const EvenExpertsWarp& own, int gifts) {
    copy(m.expert_rows, own.home_rows, p.num_experts);
    copy(m.rank_rows, own.load, p.num_ranks);
    WAYBILL_UNROLL(4)
    for (int i = 0; i < p.num_ranks * p.spare; i += warp_lanes) {
      const Int slot = Warp::lane() + Int(i);
      Warp::scatter(own.copy_rows, slot, Int(0), slot < Int(p.num_ranks * p.spare));
    }
    Warp::sync();
    WAYBILL_UNROLL(2)
    for (int i = 0; i < gifts; i += warp_lanes) {
      const Int gift = Warp::lane() + Int(i);
      const Mask there = gift < Int(gifts);
      const Int at = gift * Int(4);
      const Int taker = Warp::gather(own.gifts, at, there, 0);
      const Int rows = Warp::gather(own.gifts, at + Int(3), there, 0);
      const Int last = Int(num_keys - 1);
      const Int giver = last - (Warp::gather(own.gifts, at + Int(1), there, 0) & last);
      const Int home = last - (Warp::gather(own.gifts, at + Int(2), there, 0) & last);
      const Int rank = last - (taker >> free_bits & last);
      const Int expert = giver * Int(p.homes) + home;
      const Int slot = (rank + Int(1)) * Int(p.spare) - (taker & Int(max_free));
      const Int packed =
          expert * Int(1 << (2 * EvenExpertsCopy::rank_bits)) + giver * Int(num_keys) + rank;
      Warp::scatter(own.copies, slot, packed, there);
      Warp::scatter(own.copy_rows, slot, rows, there);
      Warp::add(own.home_rows, expert, Int(0) - rows, there);
      Warp::add(own.load, giver, Int(0) - rows, there);
      Warp::add(own.load, rank, rows, there);
    }
    Warp::sync();
  }

 private:
  static constexpr int num_keys = 1 << EvenExpertsCopy::rank_bits;
  static constexpr int max_free = EvenExpertsMemory::max_listed_spare;
  static constexpr int free_bits = 3;
  static constexpr int taker_bits = EvenExpertsCopy::rank_bits + free_bits;
  static constexpr int lanes_down = warp_lanes << free_bits;  ///< between ranks of a lane
  static_assert(max_free == (1 << free_bits) - 1 && Own * warp_lanes <= num_keys);

  /// Keys of ranks. One below the limit may take: (room, rank counted down, free slots). One above
  /// it gives: (excess, rank counted down). Its experts: (rows, number counted down), in order.
  WAYBILL_HOST_DEVICE void begin(const EvenExpertsParams& p, const EvenExpertsMemory& m, int limit,
                                 int k) {
    const Int rank = Warp::lane() + Int(k * warp_lanes);
    const Mask is_rank = rank < Int(p.num_ranks);
    const Int excess = Warp::gather(m.rank_rows, rank, is_rank, limit) - Int(limit);
    const Key down = Key(Int(num_keys - 1) - rank);
    const Key base = down * Key(1U << free_bits) + Key(static_cast<std::uint32_t>(p.spare));
    if (k == 0) base_ = base;
    const Mask takes = excess < Int(0) && Int(p.spare) > Int(0);
    taker_[k] = Warp::select(takes, Key(Int(0) - excess) * Key(1U << taker_bits) + base, Key(0));
    giver_[k] = Warp::select(excess > Int(0), Key(excess) * Key(num_keys) + down, Key(0));
    sent_[k] = Key(0);
    WAYBILL_UNROLL(8)
    for (int h = 0; h < homes; ++h) {
      const Mask there = is_rank && Int(h) < Int(p.homes);
      const Int rows = Warp::gather(m.expert_rows, rank * Int(p.homes) + Int(h), there, 0);
      Key key = Warp::select(
          there, Key(rows) * Key(num_keys) + Key(static_cast<std::uint32_t>(num_keys - 1 - h)),
          Key(0));
      WAYBILL_UNROLL(8)
      for (int i = 0; i < h; ++i) {
        const Key more = Warp::larger(rows_[k][i], key);
        key = Warp::smaller(rows_[k][i], key);
        rows_[k][i] = more;
      }
      rows_[k][h] = key;
    }
  }

  /// The emptiest rank that can take, but for `taker`; 0: none.
  WAYBILL_HOST_DEVICE std::uint32_t next_taker(std::uint32_t taker) const {
    Key best = Key(0);
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k)
      best = Warp::larger(best, Warp::select(taker_[k] == Key(taker), Key(0), taker_[k]));
    return Warp::reduce_max(best);
  }

  /// A copy takes so many of an expert's rows; 0: none. Who gives has all its slots free, so a last
  /// slot is filled to the brim.
  WAYBILL_HOST_DEVICE Int rows_given(const Int& rows, int room, const Int& excess,
                                     bool is_last) const {
    const Int most = Warp::smaller(rows, Int(room));
    const Int wanted = Warp::smaller(most, Warp::select(Mask(is_last), most, excess));
    return Warp::select(most >= Int(min_rows_), Warp::larger(wanted, Int(min_rows_)), Int(0));
  }

  /// Takes rows from a rank's largest expert, which then finds its place.
  WAYBILL_HOST_DEVICE void lower_top(int k, const Key& given) {
    Key key = rows_[k][0] - given;
    WAYBILL_UNROLL(8)
    for (int h = 1; h < homes; ++h) {
      const Key less = Warp::smaller(rows_[k][h], key);
      rows_[k][h - 1] = Warp::larger(rows_[k][h], key);
      key = less;
    }
    rows_[k][homes - 1] = key;
  }

  WAYBILL_HOST_DEVICE static void copy(const int* from, int* to, int count) {
    WAYBILL_UNROLL(4)
    for (int i = 0; i < count; i += warp_lanes) {
      const Int at = Warp::lane() + Int(i);
      Warp::scatter(to, at, Warp::gather(from, at, at < Int(count), 0), at < Int(count));
    }
  }

  int* const gifts_;
  const int min_rows_;
  Key base_;  ///< taker's key of the lane's first rank without room
  Key taker_[Own], giver_[Own], sent_[Own];
  Key rows_[Own][homes];
};

}  // namespace waybill::cuda
