#pragma once

#include "plain.h"

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
/// @tparam Nodes whether ranks may take near, on nodes that have the expert
/// @tparam Number of 32 bits where keys fit, of 64 elsewhere
template <class Warp, int Own, bool Nodes, class Number>
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
        copy_nodes_(Nodes ? Warp::pin(own.copy_nodes) : nullptr),
        present_(p.present == nullptr ? nullptr : m.present),
        homes_(Warp::keep(p.homes)),
        spare_(Warp::keep(p.spare)),
        min_rows_(Warp::keep(p.min_rows)),
        alignment_(Warp::keep(p.alignment)),
        node_ranks_(Nodes ? Warp::keep(p.node_ranks()) : 0),
        limit_(limit) {}

  /// @param spread the rank gives next that will have sent most weights, else the fullest
  /// @param whole a rank with several free slots takes an expert that fits, else the largest
  /// @param near a rank takes on a node that has the expert, if one there has room enough
  /// @return false: a rank stays above the limit, or a lower try has succeeded meanwhile
  WAYBILL_HOST_DEVICE bool run(EvenExpertsRanks<Warp, Own>& ranks, bool spread, bool whole,
                               bool near, const int* best_try, int attempt) {
    begin(ranks);
    const bool is_settled =
        give_all(spread, whole, near, Warp::pin(best_try), attempt * EvenExpertsBlock::max_warps);
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

  /// One rank gives another rows of an expert: mostly its largest, into a new copy, which it sends.
  struct Gift {
    int taker, giver, taker_free, rows;
    int home = 0;  ///< number of the expert in its rank
    int expert_rows = 0;
    int is_new = 1, is_sent = 1;
    int flag = 0;  ///< EvenExpertsCopy::is_present
  };

  /// The loop ends by what all lanes get of a reduction, so that they stay together.
  WAYBILL_HOST_DEVICE bool give_all(bool spread, bool whole, bool near, const int* best_try,
                                    int own_try) {
    const bool is_special = whole || (Nodes && near) || present_ != nullptr || alignment_ > 1;
    for (;;) {
      const int best = Warp::read(best_try);
      const auto taker_key = next_taker();
      note_top();
      const auto giver_key = next_giver(spread ? room_of(taker_key) : 0);
      Int shares[Own];
      get_shares(taker_key, shares);
      if (giver_key == 0) return true;
      if (taker_key == 0) return false;
      const int taker = rank_of_taker(taker_key);
      const int giver = num_keys - 1 - static_cast<int>(giver_key & (num_keys - 1));
      Gift gift{taker, giver, of_rank(free_, taker), of_rank(shares, giver)};
      const auto top = of_rank(top_, giver);
      // Other warps may change the number meanwhile: all lanes go by the first.
      const bool is_beaten = Warp::broadcast(Int(best), 0) < own_try;
      gift.home = top_mask - static_cast<int>(top & top_mask);
      gift.expert_rows = static_cast<int>(top >> top_bits);
      if (is_special) refine(gift, whole, near, taker_key);
      give(gift);
      if (gift.rows == 0 || is_beaten) end();
    }
  }

  /// No rank takes any more.
  WAYBILL_HOST_DEVICE void end() {
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) taker_[k] = Number(0);
  }

  using Key = decltype(Warp::reduce_max(Number(0)));  // the same in all lanes

  WAYBILL_HOST_DEVICE static int room_of(Key taker) {
    return static_cast<int>(taker >> taker_bits);
  }
  WAYBILL_HOST_DEVICE static bool is_last(Key taker) { return (taker & 1) != 0; }
  WAYBILL_HOST_DEVICE static int rank_of_taker(Key taker) {
    return num_keys - 1 - static_cast<int>(taker >> 1 & (num_keys - 1));
  }

  /// Rows that each rank would give of its largest expert.
  WAYBILL_HOST_DEVICE void get_shares(Key taker, Int (&shares)[Own]) const {
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Mask fills = Mask(is_last(taker)) && free_[k] > Int(0);
      shares[k] = Warp::hold(share(Int(top_[k] >> top_bits), room_of(taker), excess_[k], fills));
    }
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

  /// A copy takes so many of an expert's rows, before they are rounded; 0: none.
  /// @param fills the rank is filled to the brim
  WAYBILL_HOST_DEVICE Int share(const Int& rows, int room, const Int& excess,
                                const Mask& fills) const {
    const Int most = Warp::smaller(rows, Int(room));
    Int wanted = Warp::select(fills, most, Warp::smaller(most, excess));
    wanted = Warp::larger(wanted, Warp::smaller(Int(min_rows_), most));
    return Warp::select(wanted >= Int(min_rows_), wanted, Int(0));
  }

  /// Ways and options change the common case.
  WAYBILL_HOST_DEVICE void refine(Gift& gift, bool whole, bool near, Key taker) const {
    if (Nodes && near) taker = take_near(gift, taker);
    const int room = room_of(taker);
    if (whole && !is_last(taker)) take_whole(gift, room);
    if (alignment_ > 1) gift.rows = aligned(gift.rows, gift.expert_rows, room);
    const int expert = gift.giver * homes_ + gift.home;
    if (Nodes && near) Warp::put(copy_nodes_ + expert, nodes_of(expert, gift.taker));
    if (present_ == nullptr && alignment_ == 1) return;
    if (add_to_copy(gift, expert)) gift.is_new = gift.is_sent = 0;
    if (present_ == nullptr || find(present_ + gift.taker * spare_, spare_, expert) < 0) return;
    gift.flag = EvenExpertsCopy::is_present;
    gift.is_sent = 0;
  }

  /// The nodes that have a copy of an expert, and that of a rank: a bit each.
  WAYBILL_HOST_DEVICE int nodes_of(int expert, int rank) const {
    return Warp::read(copy_nodes_ + expert) | static_cast<int>(1U << node_of(rank));
  }
  WAYBILL_HOST_DEVICE unsigned node_of(int rank) const {
    return static_cast<unsigned>(rank) / static_cast<unsigned>(node_ranks_);
  }

  /// The emptiest rank of the nodes that have the expert takes, if it has room for seven eighths of
  /// what the emptiest of all would take.
  /// @return its key, or `taker`
  WAYBILL_HOST_DEVICE Key take_near(Gift& gift, Key taker) const {
    const Int nodes = Int(nodes_of(gift.giver * homes_ + gift.home, gift.giver));
    Number best = Number(0);
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Int node = rank_of(k) / Int(node_ranks_) & Int(31);  // lanes without a rank, too
      const Mask is_near = (nodes >> node & Int(1)) == Int(1);
      best = Warp::larger(best, Warp::select(is_near, taker_[k], Number(0)));
    }
    const Key near = Warp::reduce_max(best);
    const int excess = of_rank(excess_, gift.giver), room = room_of(taker);
    int rows = gift.expert_rows < room ? gift.expert_rows : room;
    if (excess < rows) rows = excess;
    if (near == 0 || room_of(near) < rows - rows / 8) return taker;
    gift.taker = rank_of_taker(near);
    gift.taker_free = of_rank(free_, gift.taker);
    const bool fills = is_last(near) && of_rank(free_, gift.giver) > 0;
    const Int given = share(Int(gift.expert_rows), room_of(near), Int(excess), Mask(fills));
    gift.rows = Warp::broadcast(given, 0);
    return near;
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
  int* const copy_nodes_;
  const int* const present_;
  const int homes_, spare_, min_rows_, alignment_, node_ranks_, limit_;  // in registers
  Int excess_[Own];                                                      // rows above the limit
  Int free_[Own];                                                        // free slots
  Number taker_[Own], giver_[Own], sent_[Own];  // keys; weights sent * num_keys
  Number top_[Own];                             // the largest expert
  int changed_rank_ = 0;  // that gave last, and rows of its experts; see note_top
  Int changed_rows_;
};

/// One try to bring every rank down to a limit, by one warp.
template <class Warp, int Own, bool Nodes>
class EvenExpertsPass {
 public:
  static constexpr int tries = Nodes ? 2 * even_ways : even_ways;  ///< per rung, near first
  using Int = typename Warp::Int;
  using Mask = typename Warp::Mask;

  WAYBILL_HOST_DEVICE EvenExpertsPass(const EvenExpertsParams& p, const EvenExpertsMemory& m,
                                      const EvenExpertsWarp& own)
      : p_(p), m_(m), own_(own), num_copies_(p.num_ranks * p.spare) {}

  /// @return whether no rank is above the limit now
  WAYBILL_HOST_DEVICE bool run(int attempt, int limit) {
    attempt_ = attempt;
    limit_ = limit;
    const bool near = Nodes && attempt % 2 == 0;
    const int way = attempt % tries / (tries / even_ways);
    if constexpr (!Nodes) {
      gifts_ = -1;
      using Plain = EvenExpertsPlain<Warp, Own>;
      if ((way == 1 || way == 2) && Plain::fits(p_, limit, m_.block->fullest)) {
        Plain plain(p_, m_, own_, limit);
        gifts_ = plain.run(way == 1, &m_.block->best_try, attempt * EvenExpertsBlock::max_warps);
        return gifts_ >= 0;
      }
    }
    begin();
    if (way == 0) reuse_present();
    using Narrow = EvenExpertsSettle<Warp, Own, Nodes, typename Warp::Unsigned>;
    using Wide = EvenExpertsSettle<Warp, Own, Nodes, typename Warp::Wide>;
    const int* const best_try = &m_.block->best_try;
    return Narrow::fits_narrow(p_, limit, m_.block->fullest)
               ? Narrow(p_, m_, own_, limit)
                     .run(ranks_, way <= 1, way == 3, near, best_try, attempt)
               : Wide(p_, m_, own_, limit).run(ranks_, way <= 1, way == 3, near, best_try, attempt);
  }

  /// After a try that has succeeded: copies go home while home has room, new ones before present
  /// ones, smallest first.
  WAYBILL_HOST_DEVICE void send_home() {
    if (!Nodes && gifts_ >= 0) {
      EvenExpertsPlain<Warp, Own>::write(p_, m_, own_, gifts_);
    } else {
      write_ranks();
    }
    Key last = 0;  // below all: a copy has rows
    for (;;) {
      KeyOfLanes best = KeyOfLanes(~Key{0});
      WAYBILL_UNROLL(4)
      for (int i = 0; i < num_copies_; i += warp_lanes) {
        const Int slot = Warp::lane() + Int(i);
        const Int rows = Warp::gather(own_.copy_rows, slot, slot < Int(num_copies_), 0);
        const Mask there = rows > Int(0);
        const Int copy = Warp::gather(own_.copies, slot, there, 0);
        const Int load = Warp::gather(own_.load, EvenExpertsCopy::home(copy), there, INT_MAX);
        const KeyOfLanes key = homeward_key(copy, rows);
        const Mask goes = there && rows <= Int(limit_) - load && key > KeyOfLanes(last);
        best = Warp::select(goes && key < best, key, best);
      }
      last = Warp::reduce_min(best);
      if (last == ~Key{0}) return;
      take_home(static_cast<int>(last & INT_MAX), static_cast<int>(last >> 32U & INT_MAX));
    }
  }

 private:
  using KeyOfLanes = typename Warp::Wide;
  using Key = std::uint64_t;

  WAYBILL_HOST_DEVICE void begin() {
    Warp::sync();  // lanes may still read what the last pass wrote
    WAYBILL_UNROLL(4)
    for (int e = 0; e < p_.num_experts; e += warp_lanes) {
      const Int expert = Warp::lane() + Int(e);
      const Mask is_expert = expert < Int(p_.num_experts);
      Warp::scatter(own_.home_rows, expert, Warp::gather(m_.expert_rows, expert, is_expert, 0),
                    is_expert);
      if constexpr (Nodes) Warp::scatter(own_.copy_nodes, expert, Int(0), is_expert);
    }
    WAYBILL_UNROLL(4)
    for (int i = 0; i < num_copies_; i += warp_lanes) {
      const Int slot = Warp::lane() + Int(i);
      Warp::scatter(own_.copy_rows, slot, Int(0), slot < Int(num_copies_));
    }
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Int rank = Warp::lane() + Int(k * warp_lanes);
      const Mask is_rank = rank < Int(p_.num_ranks);
      ranks_.load[k] = Warp::gather(m_.rank_rows, rank, is_rank, 0);
      ranks_.free_slots[k] = Warp::select(is_rank, Int(p_.spare), Int(0));
      ranks_.top_rows[k] = Warp::gather(m_.top_rows, rank, is_rank, 0);
      ranks_.top_expert[k] = Warp::gather(m_.top_expert, rank, is_rank, 0);
    }
    Warp::sync();
  }

  WAYBILL_HOST_DEVICE void write_ranks() {
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Int rank = Warp::lane() + Int(k * warp_lanes);
      const Mask is_rank = rank < Int(p_.num_ranks);
      Warp::scatter(own_.load, rank, ranks_.load[k], is_rank);
      Warp::scatter(own_.free_slots, rank, ranks_.free_slots[k], is_rank);
    }
    Warp::sync();
  }

  /// (was present, rows, expert, rank)
  WAYBILL_HOST_DEVICE static KeyOfLanes homeward_key(const Int& copy, const Int& rows) {
    const Int present = Warp::select(copy < Int(0), Int(EvenExpertsCopy::is_present), Int(0));
    return KeyOfLanes(typename Warp::Unsigned(rows | present)) * KeyOfLanes(Key{1} << 32U) +
           KeyOfLanes(copy & Int(INT_MAX));
  }

  WAYBILL_HOST_DEVICE void take_home(int copy, int rows) {
    const int home = EvenExpertsCopy::home(copy), rank = EvenExpertsCopy::rank(copy);
    const int expert = EvenExpertsCopy::expert(copy);
    const int home_load = Warp::read(own_.load + home) + rows;
    const int rank_load = Warp::read(own_.load + rank) - rows;
    const int at_home = Warp::read(own_.home_rows + expert) + rows;
    const Mask first_lane = Warp::lane() == Int(0);
    Warp::sync();
    Warp::scatter(own_.load, Int(home), Int(home_load), first_lane);
    Warp::scatter(own_.load, Int(rank), Int(rank_load), first_lane);
    Warp::scatter(own_.home_rows, Int(expert), Int(at_home), first_lane);
    for (int s = 0; s < p_.spare; s += warp_lanes) {
      const Int slot = Warp::lane() + Int(s);
      const Mask there = slot < Int(p_.spare);
      const Int at = slot + Int(rank * p_.spare);
      const Mask taken = there && Warp::gather(own_.copy_rows, at, there, 0) > Int(0);
      const Mask is_copy = (Warp::gather(own_.copies, at, taken, 0) & Int(INT_MAX)) == Int(copy);
      Warp::scatter(own_.copy_rows, at, Int(0), taken && is_copy);
    }
    Warp::sync();
  }

  /// Rows that a present copy takes now; 0: none. The last slot of a rank is used only if that
  /// fills the rank. An only slot takes more than home has too much, while home's is free.
  struct Reuse {
    Int rows, room, excess;
  };
  WAYBILL_HOST_DEVICE Reuse reusable(const Int& copy, const Mask& there) const {
    const Int rank = EvenExpertsCopy::rank(copy);
    const Int at_home = Warp::gather(own_.home_rows, EvenExpertsCopy::expert(copy), there, 0);
    const Int room = Int(limit_) - Warp::gather(own_.load, rank, there, 0);
    const Int home = EvenExpertsCopy::home(copy);
    const Int excess = Warp::gather(own_.load, home, there, 0) - Int(limit_);
    const Mask fills = Mask(p_.spare == 1) && excess > Int(0) &&
                       Warp::gather(own_.free_slots, home, there, 0) > Int(0);
    const Int rows = Warp::smaller(Warp::smaller(at_home, room), Warp::select(fills, room, excess));
    const Mask ok = there && rows > Int(0) && rows >= Int(p_.min_rows) &&
                    (Warp::gather(own_.free_slots, rank, there, 0) > Int(1) || rows == room);
    return {Warp::select(ok, rows, Int(0)), room, excess};
  }

  /// Fills copies that are present: first those that settle a rank with no other such copy.
  WAYBILL_HOST_DEVICE void reuse_present() {
    write_ranks();
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Int rank = Warp::lane() + Int(k * warp_lanes);
      Warp::scatter(own_.of_home, rank, Int(0), rank < Int(p_.num_ranks));
      Warp::scatter(own_.of_rank, rank, Int(0), rank < Int(p_.num_ranks));
    }
    Warp::sync();
    note_reusable(true);
    while (reuse_next()) {
      if (Warp::look(&m_.block->best_try) < attempt_ * EvenExpertsBlock::max_warps) break;
      note_reusable(false);
    }
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Int rank = Warp::lane() + Int(k * warp_lanes);
      const Mask is_rank = rank < Int(p_.num_ranks);
      ranks_.load[k] = Warp::gather(own_.load, rank, is_rank, 0);
      ranks_.free_slots[k] = Warp::gather(own_.free_slots, rank, is_rank, 0);
      find_top(rank, is_rank && ranks_.load[k] > Int(limit_), k);
    }
    Warp::sync();
  }

  /// Rows of each present copy, -1: it is used; and how many copies that take rows a home and a
  /// rank have.
  WAYBILL_HOST_DEVICE void note_reusable(bool is_first) {
    WAYBILL_UNROLL(4)
    for (int i = 0; i < num_copies_; i += warp_lanes) {
      const Int slot = Warp::lane() + Int(i);
      const Mask is_slot = slot < Int(num_copies_);
      const Int copy = Warp::gather(m_.present_copy, slot, is_slot, -1);
      const Int before = is_first ? Int(0) : Warp::gather(own_.present_rows, slot, is_slot, -1);
      const Mask there = copy >= Int(0) && before >= Int(0);
      const Int rows = reusable(copy, there).rows;
      const Int home = EvenExpertsCopy::home(copy), rank = EvenExpertsCopy::rank(copy);
      Warp::scatter(own_.present_rows, slot, rows, is_first ? is_slot : there);
      const Mask begins = rows > Int(0) && before == Int(0);
      const Mask ends = rows == Int(0) && before > Int(0);
      Warp::add(own_.of_home, home, 1, begins);
      Warp::add(own_.of_rank, rank, 1, begins);
      Warp::add(own_.of_home, home, -1, ends);
      Warp::add(own_.of_rank, rank, -1, ends);
    }
    Warp::sync();
  }

  /// False: no present copy takes rows.
  WAYBILL_HOST_DEVICE bool reuse_next() {
    Int best_rows = Int(0), best_settles = Int(0), best = Int(INT_MAX);
    WAYBILL_UNROLL(4)
    for (int i = 0; i < num_copies_; i += warp_lanes) {
      const Int slot = Warp::lane() + Int(i);
      const Int rows = Warp::gather(own_.present_rows, slot, slot < Int(num_copies_), 0);
      const Mask takes = rows > Int(0);
      const Int copy = Warp::gather(m_.present_copy, slot, takes, 0);
      const Int home = EvenExpertsCopy::home(copy), rank = EvenExpertsCopy::rank(copy);
      const Int room = Int(limit_) - Warp::gather(own_.load, rank, takes, 0);
      const Int excess = Warp::gather(own_.load, home, takes, 0) - Int(limit_);
      const Mask settles =
          takes && ((Warp::gather(own_.of_rank, rank, takes, 0) == Int(1) && rows == room) ||
                    (Warp::gather(own_.of_home, home, takes, 0) == Int(1) && rows == excess));
      const Int settling = Warp::select(settles, Int(1), Int(0));
      const Mask better = settling > best_settles || (settling == best_settles && rows > best_rows);
      best = Warp::select(better, slot, best);
      best_rows = Warp::select(better, rows, best_rows);
      best_settles = Warp::select(better, settling, best_settles);
    }
    const Int key = best_rows | Warp::select(best_settles > Int(0), Int(INT_MIN), Int(0));
    const std::uint32_t most = Warp::reduce_max(typename Warp::Unsigned(key));
    if (most == 0) return false;
    const Mask is_best = typename Warp::Unsigned(key) == typename Warp::Unsigned(most);
    fill_present(Warp::reduce_min(Warp::select(is_best, best, Int(INT_MAX))),
                 static_cast<int>(most & INT_MAX));
    return true;
  }

  WAYBILL_HOST_DEVICE void fill_present(int slot, int rows) {
    const int copy = Warp::read(m_.present_copy + slot);
    const int rank = EvenExpertsCopy::rank(copy), home = EvenExpertsCopy::home(copy);
    const int expert = EvenExpertsCopy::expert(copy);
    const int free_slots = Warp::read(own_.free_slots + rank);
    const int rank_load = Warp::read(own_.load + rank), home_load = Warp::read(own_.load + home);
    const int at_home = Warp::read(own_.home_rows + expert);
    const int of_home = Warp::read(own_.of_home + home), of_rank = Warp::read(own_.of_rank + rank);
    const int at = rank * p_.spare + p_.spare - free_slots;
    const int nodes = Nodes ? Warp::read(own_.copy_nodes + expert) : 0;
    Warp::sync();
    const Mask first_lane = Warp::lane() == Int(0);
    if constexpr (Nodes) {
      const auto node = static_cast<unsigned>(rank) / static_cast<unsigned>(p_.node_ranks());
      Warp::scatter(own_.copy_nodes, Int(expert), Int(nodes | static_cast<int>(1U << node)),
                    first_lane);
    }
    Warp::scatter(own_.present_rows, Int(slot), Int(-1), first_lane);
    Warp::scatter(own_.of_home, Int(home), Int(of_home - 1), first_lane);
    Warp::scatter(own_.of_rank, Int(rank), Int(of_rank - 1), first_lane);
    Warp::scatter(own_.home_rows, Int(expert), Int(at_home - rows), first_lane);
    Warp::scatter(own_.load, Int(home), Int(home_load - rows), first_lane);
    Warp::scatter(own_.load, Int(rank), Int(rank_load + rows), first_lane);
    Warp::scatter(own_.free_slots, Int(rank), Int(free_slots - 1), first_lane);
    Warp::scatter(own_.copies, Int(at), Int(copy | EvenExpertsCopy::is_present), first_lane);
    Warp::scatter(own_.copy_rows, Int(at), Int(rows), first_lane);
    Warp::sync();
  }

  /// The largest experts of the lanes' ranks, one after the other.
  WAYBILL_HOST_DEVICE void find_top(const Int& rank, const Mask& wanted, int k) {
    Int most = Int(0), expert = rank * Int(p_.homes);
    if (Warp::ballot(wanted) != 0) {
      WAYBILL_UNROLL(4)
      for (int h = 0; h < p_.homes; ++h) {
        const Int e = rank * Int(p_.homes) + Int(h);
        const Int rows = Warp::gather(own_.home_rows, e, wanted, 0);
        expert = Warp::select(rows > most, e, expert);
        most = Warp::larger(rows, most);
      }
    }
    ranks_.top_rows[k] = most;
    ranks_.top_expert[k] = expert;
  }

  const EvenExpertsParams& p_;
  const EvenExpertsMemory& m_;
  const EvenExpertsWarp own_;
  const int num_copies_;
  int attempt_ = 0, limit_ = 0;
  int gifts_ = -1;  ///< how many EvenExpertsPlain gave; -1: it did not run, or failed
  EvenExpertsRanks<Warp, Own> ranks_;
};

}  // namespace waybill::cuda
