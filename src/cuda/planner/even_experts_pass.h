#pragma once

#include "even_experts_settle.h"

namespace waybill::cuda {

/// One try to bring every rank down to a limit, by one warp.
template <class Warp, int Own>
class EvenExpertsPass {
 public:
  using Int = typename Warp::Int;
  using Mask = typename Warp::Mask;

  WAYBILL_HOST_DEVICE EvenExpertsPass(const EvenExpertsParams& p, const EvenExpertsMemory& m,
                                      const EvenExpertsWarp& own)
      : p_(p), m_(m), own_(own), num_copies_(p.num_ranks * p.spare) {}

  /// @return whether no rank is above the limit now
  WAYBILL_HOST_DEVICE bool run(int attempt, int limit) {
    attempt_ = attempt;
    limit_ = limit;
    const int way = attempt % even_ways;
    begin();
    if (way == 0) reuse_present();
    using Narrow = EvenExpertsSettle<Warp, Own, typename Warp::Unsigned>;
    using Wide = EvenExpertsSettle<Warp, Own, typename Warp::Wide>;
    const int* const best_try = &m_.block->best_try;
    return Narrow::fits_narrow(p_, limit, m_.block->fullest)
               ? Narrow(p_, m_, own_, limit).run(ranks_, way <= 1, way == 3, best_try, attempt)
               : Wide(p_, m_, own_, limit).run(ranks_, way <= 1, way == 3, best_try, attempt);
  }

  /// After a try that has succeeded: copies go home while home has room, new ones before present
  /// ones, smallest first.
  WAYBILL_HOST_DEVICE void send_home() {
    write_ranks();
    Key last = 0;  // of no copy: a copy has rows
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
  /// fills the rank.
  struct Reuse {
    Int rows, room, excess;
  };
  WAYBILL_HOST_DEVICE Reuse reusable(const Int& copy, const Mask& there) const {
    const Int rank = EvenExpertsCopy::rank(copy);
    const Int at_home = Warp::gather(own_.home_rows, EvenExpertsCopy::expert(copy), there, 0);
    const Int room = Int(limit_) - Warp::gather(own_.load, rank, there, 0);
    const Int excess = Warp::gather(own_.load, EvenExpertsCopy::home(copy), there, 0) - Int(limit_);
    const Int rows = Warp::smaller(Warp::smaller(at_home, room), excess);
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

  /// Rows of each present copy, and how many copies that take rows a home and a rank have. Both
  /// only shrink, so after the first time those are looked at that have rows.
  WAYBILL_HOST_DEVICE void note_reusable(bool is_first) {
    WAYBILL_UNROLL(4)
    for (int i = 0; i < num_copies_; i += warp_lanes) {
      const Int slot = Warp::lane() + Int(i);
      const Mask is_slot = slot < Int(num_copies_);
      const Int copy = Warp::gather(m_.present_copy, slot, is_slot, -1);
      Mask there = copy >= Int(0);
      if (!is_first) there = there && Warp::gather(own_.present_rows, slot, there, 0) > Int(0);
      const Int rows = reusable(copy, there).rows;
      const Int home = EvenExpertsCopy::home(copy), rank = EvenExpertsCopy::rank(copy);
      Warp::scatter(own_.present_rows, slot, rows, is_first ? is_slot : there);
      const Mask changes = is_first ? rows > Int(0) : there && rows == Int(0);
      Warp::add(own_.of_home, home, is_first ? 1 : -1, changes);
      Warp::add(own_.of_rank, rank, is_first ? 1 : -1, changes);
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
    Warp::sync();
    const Mask first_lane = Warp::lane() == Int(0);
    Warp::scatter(own_.present_rows, Int(slot), Int(0), first_lane);
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
  EvenExpertsRanks<Warp, Own> ranks_;
};

}  // namespace waybill::cuda
