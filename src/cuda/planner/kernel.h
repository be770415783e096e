#pragma once

#include "pass.h"

namespace waybill::cuda {

/// The phases of a call. All threads call each; a barrier of the block follows unless a phase says
/// otherwise. Some take the number of the warp.
template <class Warp, int Own, bool Nodes>
class EvenExpertsPhases {
 public:
  using Int = typename Warp::Int;
  using Unsigned = typename Warp::Unsigned;
  using Wide = typename Warp::Wide;
  using Mask = typename Warp::Mask;

  WAYBILL_HOST_DEVICE EvenExpertsPhases(const EvenExpertsParams& p, const EvenExpertsMemory& m,
                                        int thread, int threads)
      : p_(p),
        m_(m),
        thread_(thread),
        threads_(threads),
        copies_(p.num_ranks * p.spare),
        slots_per_rank_(p.homes + p.spare),
        groups_(EvenExpertsMemory::partial_sums(p, threads)) {}

  /// In one phase with sum_some_ranks.
  WAYBILL_HOST_DEVICE void clear() {
    if (thread_ == 0) {
      *m_.block = {};
      m_.block->best_try = INT_MAX;
      m_.block->next_try = p_.pass_warps;
    }
    WAYBILL_UNROLL(1)
    for (int r = thread_; r < p_.num_ranks; r += threads_) m_.weights_out[r] = m_.weights_in[r] = 0;
    WAYBILL_UNROLL(1)
    for (int i = thread_; i < copies_; i += threads_) {
      m_.final_copy[i] = -1;
      m_.final_quota[i] = m_.final_rest[i] = 0;
    }
    WAYBILL_UNROLL(1)
    for (int e = thread_; e < p_.num_experts; e += threads_) {
      m_.first_copy[e] = -1;
      m_.ties[e] = 0;
    }
    const int after = p_.num_experts + thread_;
    if (after < EvenExpertsMemory::experts_in_fours(p_)) m_.expert_rows[after] = 0;
  }

  /// Each thread sums the rows of four experts, or of one, over some ranks.
  WAYBILL_HOST_DEVICE void sum_some_ranks() {
    if (EvenExpertsMemory::sum_width(p_) == 4) {
      sum_of_width<4>();
    } else {
      sum_of_width<1>();
    }
    sort_present();
  }

  /// Tells errors of the phase that cleared. In one phase with sum_ranks.
  WAYBILL_HOST_DEVICE void note_status() {
    if (status_ != EvenExpertsStatus::good) fail(status_);
  }

  /// Warps: sums of experts, then of ranks, and the largest expert of each rank. A rank has a lane
  /// for each home, rounded up to a power of two.
  WAYBILL_HOST_DEVICE void sum_ranks(int warp, int warps) {
    const int bits = home_bits(), width = 1 << bits, ranks = warp_lanes >> bits;
    const Int home_of_lane = Warp::lane() & Int(width - 1);
    for (int first = warp * ranks; first < p_.num_ranks; first += warps * ranks) {
      const Int rank = Int(first) + (Warp::lane() >> bits);
      Unsigned sum = Unsigned(0), any = Unsigned(0);  // the high bit of any tells of too many
      Int most = Int(0), largest = rank * Int(p_.homes);
      WAYBILL_UNROLL(1)
      for (int h = 0; h < p_.homes; h += width) {
        const Int home = home_of_lane + Int(h), expert = rank * Int(p_.homes) + home;
        const Mask is_home = rank < Int(p_.num_ranks) && home < Int(p_.homes);
        Unsigned rows = Unsigned(0);
        WAYBILL_UNROLL(8)
        for (int g = 0; g < groups_; ++g) {
          const Int part = Warp::gather(m_.warps + g * p_.num_experts, expert, is_home, 0);
          rows = rows + Unsigned(part);
          any = any | rows;
        }
        Warp::scatter(m_.expert_rows, expert, Int(rows), is_home);
        largest = Warp::select(Int(rows) > most, expert, largest);
        most = Warp::larger(Int(rows), most);
        sum = sum + rows;
        any = any | sum;
      }
      WAYBILL_UNROLL(1)
      for (int step = width / 2; step > 0; step /= 2) {
        sum = sum + Warp::exchange(sum, step);
        any = any | sum;
        const Int other_most = Warp::exchange(most, step), other = Warp::exchange(largest, step);
        const Mask better = other_most > most || (other_most == most && other < largest);
        most = Warp::select(better, other_most, most);
        largest = Warp::select(better, other, largest);
      }
      const Mask writes = rank < Int(p_.num_ranks) && home_of_lane == Int(0);
      Warp::scatter(m_.rank_rows, rank, Int(sum), writes);
      Warp::scatter(m_.top_rows, rank, most, writes);
      Warp::scatter(m_.top_expert, rank, largest, writes);
      if (Warp::ballot(Int(any) < Int(0)) != 0) fail(EvenExpertsStatus::too_many_rows);
    }
  }

  /// Warps: places of ranks, fullest first; of equals the lower rank. All rows.
  WAYBILL_HOST_DEVICE void order_ranks(int warp, int warps) {
    Int rows[Own];
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) rows[k] = of_rank(m_.rank_rows, k, INT_MIN);
    WAYBILL_UNROLL(2)
    for (int r = warp; r < p_.num_ranks; r += warps) {
      const int own = Warp::read(m_.rank_rows + r);
      int position = 0;
      WAYBILL_UNROLL(4)
      for (int k = 0; k < Own; ++k) {
        const Mask before = rows[k] > Int(own) || (rows[k] == Int(own) && rank_of(k) < Int(r));
        position += Warp::count(Warp::ballot(before));
      }
      const Mask first_lane = Warp::lane() == Int(0);
      Warp::scatter(m_.position, Int(r), Int(position), first_lane);
      Warp::scatter(m_.sorted_rows, Int(position), Int(own), first_lane);
    }
    if (warp == warps - 1) note_total(rows);
  }

  /// All rows, for warps that try limits: they do not wait for the order of ranks.
  /// @return false: the rows or present copies are wrong
  WAYBILL_HOST_DEVICE bool note_sums() {
    Int rows[Own];
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) rows[k] = of_rank(m_.rank_rows, k, INT_MIN);
    note_total(rows);
    Warp::sync();
    return is_good();
  }
  /// Whether rows and present copies are right.
  WAYBILL_HOST_DEVICE bool is_good() const {
    return Warp::read(&m_.block->status) == static_cast<int>(EvenExpertsStatus::good);
  }

  /// The k fullest ranks are a bound for those k where it can be above the mean: the largest
  /// experts are at least average, so most k need no sum. No barrier follows.
  /// @return whether there are such k; all threads get the same
  WAYBILL_HOST_DEVICE bool choose_sums() {
    std::uint32_t any = 0;
    int before = 0;  // rows of the ranks of lower k
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Int held = Warp::scan(of_rank(m_.sorted_rows, k, 0)) + Int(before);
      before = Warp::broadcast(held, warp_lanes - 1);
      const Int ranks = rank_of(k) + Int(1);
      const Int room = Int(p_.spare) * (Int(p_.num_ranks) - ranks);
      const Int experts = ranks * Int(p_.homes);
      const Mask can_be = ranks < Int(p_.num_ranks) && room < experts;
      // Whole numbers up to 2^31 * E: E is far below 2^32.
      const Wide kept = Wide(held) * Wide(experts - room);
      const Wide mean = Wide(Int(m_.block->mean)) * Wide(ranks) * Wide(experts);
      needed_[k] = Warp::ballot(can_be && kept > mean);
      any |= needed_[k];
    }
    return any != 0;
  }

  /// Places of experts, those of most rows first, and the places of their homes.
  WAYBILL_HOST_DEVICE void sort_experts(int thread, int threads) {
    WAYBILL_UNROLL(1)
    for (int e = thread; e < p_.num_experts; e += threads) {
      const int own = m_.expert_rows[e];
      int larger = 0;
      WAYBILL_UNROLL(4)
      for (int i = 0; i < p_.num_experts; i += 4) {
        const typename Warp::Four rows = Warp::read_four(m_.expert_rows + i);
        larger += (rows.x > own ? 1 : 0) + (rows.y > own ? 1 : 0);
        larger += (rows.z > own ? 1 : 0) + (rows.w > own ? 1 : 0);
      }
      // Equal ones take places in any order: only sums are asked of them.
      const int place = larger + Warp::block_add(m_.ties + larger, 1);
      m_.sorted_expert_rows[place] = own;
      m_.sorted_position[place] = m_.position[e / p_.homes];
    }
  }

  /// Warps: the rows that the k fullest ranks keep if the others take their largest experts, over
  /// k. Where that is above the mean, tries of the mean that run meanwhile end.
  WAYBILL_HOST_DEVICE void find_bound(int warp, int warps) {
    for (int k = warp + 1; k < p_.num_ranks; k += warps) {
      if ((needed_of(k - 1) >> ((k - 1) % warp_lanes) & 1U) == 0) continue;
      const auto kept = static_cast<unsigned>(kept_by_fullest(k, p_.spare * (p_.num_ranks - k)));
      const auto ranks = static_cast<unsigned>(k);
      const auto bound = static_cast<int>((kept + ranks - 1) / ranks);
      if (bound <= m_.block->mean) continue;
      Warp::block_max(&m_.block->found, bound);
      Warp::block_min(&m_.block->best_try, -1);  // below all tries
    }
  }

  /// Whether the bound is above the mean, so that tries of the mean were in vain.
  WAYBILL_HOST_DEVICE bool was_vain() const { return m_.block->found > 0; }
  /// Before tries begin again.
  WAYBILL_HOST_DEVICE void take_bound() {
    if (thread_ > 0) return;
    m_.block->bound = m_.block->found;
    m_.block->best_try = INT_MAX;
    m_.block->next_try = p_.pass_warps;
  }

  /// Warps take tries in order until one has succeeded; the lowest wins, and its copies go home.
  WAYBILL_HOST_DEVICE void try_limits(int warp) {
    const EvenExpertsWarp own = m_.warp(p_, warp);
    Pass pass(p_, m_, own);
    for (int number = warp;; number = Warp::take_next(&m_.block->next_try)) {
      const int attempt = attempt_of(number);
      if (attempt >= even_rungs * Pass::tries) return;
      if (Warp::look(&m_.block->best_try) < attempt * EvenExpertsBlock::max_warps) return;
      if (!pass.run(attempt, limit_of(attempt / Pass::tries))) continue;
      Warp::block_min(&m_.block->best_try, attempt * EvenExpertsBlock::max_warps + warp);
      pass.send_home();
      return;
    }
  }

  /// A present copy keeps its slot, and stays there unused until a new copy needs the slot. New
  /// copies, by expert, take empty slots first.
  WAYBILL_HOST_DEVICE void fill_slots() {
    const EvenExpertsWarp own = winner();
    if (p_.present == nullptr) {
      WAYBILL_UNROLL(1)
      for (int i = thread_; i < copies_; i += threads_) place_copy(own, i);
    } else {
      WAYBILL_UNROLL(1)
      for (int r = thread_; r < p_.num_ranks; r += threads_) place_among_present(own, r);
    }
  }

  /// Warps: slots of homes, in one phase with fill_slots.
  WAYBILL_HOST_DEVICE void write_homes(int warp, int warps) {
    const EvenExpertsWarp own = winner();
    const int bits = home_bits(), width = 1 << bits, ranks = warp_lanes >> bits;
    const Int home_of_lane = Warp::lane() & Int(width - 1);
    for (int first = warp * ranks; first < p_.num_ranks; first += warps * ranks) {
      const Int rank = Int(first) + (Warp::lane() >> bits);
      WAYBILL_UNROLL(1)
      for (int h = 0; h < p_.homes; h += width) {
        const Int home = home_of_lane + Int(h), expert = rank * Int(p_.homes) + home;
        const Mask is_home = rank < Int(p_.num_ranks) && home < Int(p_.homes);
        const Int quota = Warp::gather(own.home_rows, expert, is_home, 0);
        const Int of_rank = Warp::gather(p_.rows, rank * Int(p_.num_experts) + expert, is_home, 0);
        const Int local = Warp::smaller(of_rank, quota);
        const Int slot = rank * Int(slots_per_rank_) + home;
        Warp::scatter(m_.home_rest, expert, quota - local, is_home);
        Warp::scatter(p_.slots, slot, expert, is_home);
        Warp::scatter(p_.quotas, slot, quota, is_home);
        Warp::scatter(p_.local_rows, slot, local, is_home);
        Warp::scatter(p_.first_row, slot, Int(0), is_home);
      }
    }
  }

  /// Warps: copies, and where their other rows and those of their homes begin. A lane per copy
  /// follows the list of its expert's copies.
  WAYBILL_HOST_DEVICE void write_copies(int warp, int warps) {
    const EvenExpertsWarp own = winner();
    for (int i = warp * warp_lanes; i < copies_; i += warps * warp_lanes) {
      const Int place = Warp::lane() + Int(i);
      const Mask there = place < Int(copies_);
      const Int copy = Warp::gather(m_.final_copy, place, there, -1);
      const Int quota = Warp::gather(m_.final_quota, place, there, 0);
      const Int rest = Warp::gather(m_.final_rest, place, there, 0);
      const Mask takes = quota > Int(0);
      const Int expert = EvenExpertsCopy::expert(copy), home = EvenExpertsCopy::home(copy);
      const Int rank = place / Int(p_.spare);
      const Int begin = rank * Int(p_.spare), begin_home = home * Int(p_.spare);
      Int first = Warp::gather(m_.home_rest, expert, takes && home < rank, 0), first_home = Int(0);
      Int other = Warp::gather(m_.first_copy, expert, takes, -1);
      while (Warp::ballot(other >= Int(0)) != 0) {
        const Mask is_copy = other >= Int(0);
        const Int more = Warp::gather(m_.final_rest, other, is_copy, 0);
        first = first + Warp::select(other < begin, more, Int(0));
        first_home = first_home + Warp::select(other < begin_home, more, Int(0));
        other = Warp::gather(m_.next_copy, other, is_copy, -1);
      }
      const Mask home_takes = takes && Warp::gather(own.home_rows, expert, takes, 0) > Int(0);
      Warp::scatter(p_.first_row, home * Int(slots_per_rank_) + expert - home * Int(p_.homes),
                    first_home, home_takes);
      const Int slot = place + (rank + Int(1)) * Int(p_.homes);
      Warp::scatter(p_.slots, slot, Warp::select(copy < Int(0), Int(-1), expert), there);
      Warp::scatter(p_.quotas, slot, quota, there);
      Warp::scatter(p_.local_rows, slot, quota - rest, there);
      Warp::scatter(p_.first_row, slot, first, there);
    }
    if (warp == warps - 1) write_figures(own);
  }

  /// Only where the rows or the present copies are wrong.
  WAYBILL_HOST_DEVICE void write_failure() {
    if (thread_ == 0) p_.figures[figure_status] = m_.block->status;
  }

 private:
  using Pass = EvenExpertsPass<Warp, Own, Nodes>;

  WAYBILL_HOST_DEVICE void fail(EvenExpertsStatus status) {
    Warp::block_max(&m_.block->status, static_cast<int>(status));
  }

  WAYBILL_HOST_DEVICE void fail_later(EvenExpertsStatus status) {
    if (status > status_) status_ = status;
  }

  WAYBILL_HOST_DEVICE static Int rank_of(int k) { return Warp::lane() + Int(k * warp_lanes); }
  WAYBILL_HOST_DEVICE Int of_rank(const int* numbers, int k, int otherwise) const {
    return Warp::gather(numbers, rank_of(k), rank_of(k) < Int(p_.num_ranks), otherwise);
  }

  /// When a warp looks at homes, a rank has 2 to this power lanes.
  WAYBILL_HOST_DEVICE int home_bits() const {
    const int bits = Warp::bit_width(static_cast<unsigned>(p_.homes - 1));
    return bits < 5 ? bits : 5;
  }

  template <int Width>
  WAYBILL_HOST_DEVICE void sum_of_width() {
    const int columns = p_.num_experts / Width;
    WAYBILL_UNROLL(1)
    for (int i = thread_; i < groups_ * columns; i += threads_) {
      const int first = static_cast<int>(static_cast<unsigned>(i) / static_cast<unsigned>(columns));
      const int expert = (i - first * columns) * Width;
      const std::int32_t* from = p_.rows + std::int64_t{first} * p_.num_experts + expert;
      unsigned sums[Width] = {};
      unsigned any_number = 0, any_sum = 0;  // their high bits tell of negative and of too many
      WAYBILL_UNROLL(8)
      for (int r = first; r < p_.num_ranks; r += groups_) {
        std::int32_t rows[Width];
        Warp::load(from, rows);
        from += std::int64_t{groups_} * p_.num_experts;
        for (int j = 0; j < Width; ++j) {
          any_number |= static_cast<unsigned>(rows[j]);
          sums[j] += static_cast<unsigned>(rows[j]);
          any_sum |= sums[j];
        }
      }
      Warp::store(m_.warps + first * p_.num_experts + expert, sums);
      if (static_cast<int>(any_number) < 0) {
        fail_later(EvenExpertsStatus::negative_rows);
      } else if (static_cast<int>(any_sum) < 0) {
        fail_later(EvenExpertsStatus::too_many_rows);
      }
    }
  }

  /// Present experts of each rank in order. They are no home experts of the rank, and none twice.
  WAYBILL_HOST_DEVICE void sort_present() {
    if (p_.present == nullptr) return;
    WAYBILL_UNROLL(1)
    for (int r = thread_; r < p_.num_ranks; r += threads_) {
      int* const sorted = m_.present_copy + r * p_.spare;
      int count = 0;
      WAYBILL_UNROLL(1)
      for (int s = 0; s < p_.spare; ++s) {
        const int expert = p_.present[r * p_.present_stride + s];
        const int home = expert / p_.homes;
        const bool good = expert >= -1 && expert < p_.num_experts && (expert < 0 || home != r);
        if (!good) fail_later(EvenExpertsStatus::wrong_present);
        const int copy = good && expert >= 0 ? EvenExpertsCopy::pack(expert, home, r) : -1;
        m_.present[r * p_.spare + s] = copy;
        if (copy < 0) continue;
        int place = count++;
        for (; place > 0 && sorted[place - 1] >= copy; --place) {
          if (sorted[place - 1] == copy) fail_later(EvenExpertsStatus::wrong_present);
          sorted[place] = sorted[place - 1];
        }
        sorted[place] = copy;
      }
      for (; count < p_.spare; ++count) sorted[count] = -1;
    }
  }

  WAYBILL_HOST_DEVICE void note_total(const Int (&rows)[Own]) {
    Int low = Int(0), high = Int(0), most = Int(0);
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Int own = Warp::select(rank_of(k) < Int(p_.num_ranks), rows[k], Int(0));
      low = low + (own & Int(0xFFFF));
      high = high + (own >> 16 & Int(0xFFFF));
      most = Warp::larger(most, own);
    }
    const std::int64_t total = (std::int64_t{Warp::reduce_add(high)} << 16) + Warp::reduce_add(low);
    // Loads are int; INT_MAX stands for none.
    if (total >= INT_MAX) fail(EvenExpertsStatus::too_many_rows);
    const auto ranks = static_cast<unsigned>(p_.num_ranks);
    m_.block->total = static_cast<int>(total);
    m_.block->mean = m_.block->bound =
        static_cast<int>((static_cast<unsigned>(total) + ranks - 1) / ranks);
    m_.block->fullest = Warp::reduce_max(most);
  }

  WAYBILL_HOST_DEVICE std::uint32_t needed_of(int place) const {
    std::uint32_t needed = needed_[0];
    WAYBILL_UNROLL(4)
    for (int k = 1; k < Own; ++k)
      if (place / warp_lanes == k) needed = needed_[k];
    return needed;
  }

  /// All but the `room` largest experts of the k fullest ranks.
  WAYBILL_HOST_DEVICE int kept_by_fullest(int k, int room) const {
    Int kept = Int(0);
    int before = 0;
    WAYBILL_UNROLL(4)
    for (int i = 0; i < p_.num_experts; i += warp_lanes) {
      const Int place = Warp::lane() + Int(i);
      const Mask there = place < Int(p_.num_experts);
      const Mask is_member = Warp::gather(m_.sorted_position, place, there, INT_MAX) < Int(k);
      const std::uint32_t members = Warp::ballot(is_member);
      const Mask stays = is_member && Int(before) + Warp::count_below(members) >= Int(room);
      kept = kept + Warp::gather(m_.sorted_expert_rows, place, stays, 0);
      before += Warp::count(members);
    }
    return Warp::reduce_add(kept);
  }

  /// The number among all tries: those of the first way need present copies.
  WAYBILL_HOST_DEVICE int attempt_of(int number) const {
    if (p_.present != nullptr) return number;
    const auto place = static_cast<unsigned>(number);
    constexpr unsigned skipped = Pass::tries / even_ways;
    return static_cast<int>(place + (place / (skipped * (even_ways - 1)) + 1) * skipped);
  }

  /// The limit of a rung. No limit above the fullest rank changes anything.
  WAYBILL_HOST_DEVICE int limit_of(int rung) const {
    const int fullest = m_.block->fullest;
    const double wanted = static_cast<double>(m_.block->bound) * p_.limit_factor;
    if (wanted >= static_cast<double>(fullest)) return fullest;
    const int base = static_cast<int>(wanted);
    constexpr auto top = static_cast<unsigned>(even_rungs - 1);
    constexpr unsigned cube = top * top * top;
    const auto above = static_cast<unsigned>(fullest - base);
    const auto step = static_cast<unsigned>(rung);
    const unsigned cubed = step * step * step;
    return base + static_cast<int>(above / cube * cubed + above % cube * cubed / cube);
  }

  WAYBILL_HOST_DEVICE EvenExpertsWarp winner() const {
    return m_.warp(p_, m_.block->best_try % EvenExpertsBlock::max_warps);
  }

  /// A slot of `quota` rows takes as many of its own rank's tokens as there are.
  WAYBILL_HOST_DEVICE int local_rows(int rank, int expert, int quota) const {
    std::int32_t own[1];
    Warp::load(p_.rows + std::int64_t{rank} * p_.num_experts + expert, own);
    return own[0] < quota ? own[0] : quota;
  }

  WAYBILL_HOST_DEVICE void set_slot(int place, int copy, int quota) {
    const int rank = EvenExpertsCopy::rank(copy), expert = EvenExpertsCopy::expert(copy);
    m_.final_copy[place] = copy;
    m_.final_quota[place] = quota;
    m_.final_rest[place] = quota - local_rows(rank, expert, quota);
    m_.next_copy[place] = Warp::block_exchange(m_.first_copy + expert, place);
  }

  WAYBILL_HOST_DEVICE void count_copy(int copy) {
    Warp::block_add(m_.weights_out + EvenExpertsCopy::home(copy), 1);
    Warp::block_add(m_.weights_in + EvenExpertsCopy::rank(copy), 1);
  }

  /// Without present copies: those of a rank lie in the order of their experts.
  WAYBILL_HOST_DEVICE void place_copy(const EvenExpertsWarp& own, int i) {
    const int rows = own.copy_rows[i];
    if (rows == 0) return;
    const int copy = own.copies[i];
    const int first = EvenExpertsCopy::rank(copy) * p_.spare;
    int place = first;
    WAYBILL_UNROLL(2)
    for (int s = first; s < first + p_.spare; ++s)
      place += own.copy_rows[s] > 0 && own.copies[s] < copy ? 1 : 0;
    set_slot(place, copy, rows);
    count_copy(copy);
  }

  WAYBILL_HOST_DEVICE void place_among_present(const EvenExpertsWarp& own, int rank) {
    const int first = rank * p_.spare, end = first + p_.spare;
    WAYBILL_UNROLL(1)
    for (int i = first; i < end; ++i) m_.final_copy[i] = m_.present[i];
    WAYBILL_UNROLL(1)
    for (int i = first; i < end; ++i) {
      if (own.copy_rows[i] == 0 || own.copies[i] >= 0) continue;
      const int copy = own.copies[i] & INT_MAX;
      int place = first;
      while (m_.present[place] != copy) ++place;
      set_slot(place, copy, own.copy_rows[i]);
    }
    for (int after = -1;;) {
      const int i = next_new_copy(own, first, after);
      if (i < 0) return;
      after = own.copies[i];
      set_slot(free_place(first), after, own.copy_rows[i]);
      count_copy(after);
    }
  }

  /// The copy of the lowest expert above `after` on this rank that was not present; -1: none.
  WAYBILL_HOST_DEVICE int next_new_copy(const EvenExpertsWarp& own, int first, int after) const {
    int next = -1;
    WAYBILL_UNROLL(1)
    for (int i = first; i < first + p_.spare; ++i) {
      // One that was present is negative.
      if (own.copy_rows[i] == 0 || own.copies[i] <= after) continue;
      if (next < 0 || own.copies[i] < own.copies[next]) next = i;
    }
    return next;
  }

  WAYBILL_HOST_DEVICE int free_place(int first) const {
    WAYBILL_UNROLL(1)
    for (int i = first; i < first + p_.spare; ++i) {
      if (m_.final_copy[i] == -1) return i;
    }
    int place = first;
    while (m_.final_quota[place] != 0) ++place;
    return place;
  }

  WAYBILL_HOST_DEVICE void write_figures(const EvenExpertsWarp& own) {
    Int most = Int(0);
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Mask is_rank = rank_of(k) < Int(p_.num_ranks);
      most = Warp::larger(most, of_rank(own.load, k, 0));
      Warp::scatter(p_.weights_out, rank_of(k), of_rank(m_.weights_out, k, 0), is_rank);
      Warp::scatter(p_.weights_in, rank_of(k), of_rank(m_.weights_in, k, 0), is_rank);
    }
    const int max_rows = Warp::reduce_max(most);
    p_.figures[figure_status] = static_cast<int>(EvenExpertsStatus::good);
    p_.figures[figure_max_rows] = max_rows;
    p_.figures[figure_bound] = m_.block->bound;
    p_.figures[figure_total] = m_.block->total;
    p_.figures[figure_try] = m_.block->best_try / EvenExpertsBlock::max_warps;
  }

  const EvenExpertsParams& p_;
  const EvenExpertsMemory& m_;
  int thread_, threads_, copies_, slots_per_rank_;
  int groups_;  ///< threads that sum the same experts
  EvenExpertsStatus status_ = EvenExpertsStatus::good;
  std::uint32_t needed_[Own] = {};  ///< bit k - 1: the k fullest ranks may be a bound
};

}  // namespace waybill::cuda
