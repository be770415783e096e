#pragma once

#include "even_experts_rule.h"

namespace waybill::cuda {

/// The phases of a call. All threads call each; a barrier of the block follows. Some take the
/// number of the warp.
template <class Warp>
class EvenExpertsPhases {
 public:
  using Int = typename Warp::Int;
  using Mask = typename Warp::Mask;

  WAYBILL_HOST_DEVICE EvenExpertsPhases(const EvenExpertsParams& p, const EvenExpertsMemory& m,
                                        int thread, int threads)
      : p_(p),
        m_(m),
        thread_(thread),
        threads_(threads),
        copies_(p.num_ranks * p.spare),
        slots_per_rank_(p.homes + p.spare) {}

  WAYBILL_HOST_DEVICE void clear() {
    if (thread_ == 0) {
      *m_.block = {};
      m_.block->best_try = INT_MAX;
      m_.block->winner = -1;
    }
    WAYBILL_UNROLL(1)
    for (int r = thread_; r < p_.num_ranks; r += threads_) {
      m_.needs_sum[r] = 0;
      m_.weights_out[r] = 0;
    }
  }

  /// Each thread sums the rows of an expert over some ranks.
  WAYBILL_HOST_DEVICE void sum_some_ranks() {
    const int groups = EvenExpertsMemory::partial_sums(p_, threads_);
    auto* const partial = reinterpret_cast<std::int64_t*>(m_.warps);
    WAYBILL_UNROLL(1)
    for (int i = thread_; i < groups * p_.num_experts; i += threads_) {
      const int expert = i % p_.num_experts;
      const std::int32_t* const from = p_.rows + expert;
      std::int64_t sum = 0;
      std::int32_t any = 0;  // its sign tells of a negative number
      WAYBILL_UNROLL(16)
      for (int r = i / p_.num_experts; r < p_.num_ranks; r += groups) {
        const std::int32_t n = Warp::load(from + std::int64_t{r} * p_.num_experts);
        sum += n;
        any |= n;
      }
      partial[i] = sum;
      if (any < 0) fail(EvenExpertsStatus::negative_rows);
    }
    sort_present();
  }

  WAYBILL_HOST_DEVICE void sum_experts() {
    const int groups = EvenExpertsMemory::partial_sums(p_, threads_);
    const auto* const partial = reinterpret_cast<const std::int64_t*>(m_.warps);
    WAYBILL_UNROLL(1)
    for (int e = thread_; e < p_.num_experts; e += threads_) {
      std::int64_t sum = 0;
      for (int g = 0; g < groups; ++g) sum += partial[g * p_.num_experts + e];
      m_.expert_rows[e] = in_range(sum);
    }
  }

  WAYBILL_HOST_DEVICE void sum_ranks() {
    WAYBILL_UNROLL(1)
    for (int r = thread_; r < p_.num_ranks; r += threads_) {
      std::int64_t sum = 0;
      int most = 0, expert = r * p_.homes;
      for (int e = r * p_.homes; e < (r + 1) * p_.homes; ++e) {
        const int rows = m_.expert_rows[e];
        sum += rows;
        expert = rows > most ? e : expert;
        most = rows > most ? rows : most;
      }
      m_.rank_rows[r] = in_range(sum);
      m_.top_rows[r] = most;
      m_.top_expert[r] = expert;
    }
  }

  /// Places of ranks, fullest first; of equals the lower rank.
  WAYBILL_HOST_DEVICE void order_ranks() {
    WAYBILL_UNROLL(1)
    for (int r = thread_; r < p_.num_ranks; r += threads_) {
      const int own = m_.rank_rows[r];
      int position = 0;
      std::int64_t total = 0;
      WAYBILL_UNROLL(8)
      for (int q = 0; q < p_.num_ranks; ++q) {
        const int rows = m_.rank_rows[q];
        position += rows > own || (rows == own && q < r) ? 1 : 0;
        total += rows;
      }
      m_.position[r] = position;
      m_.sorted_rows[position] = own;
      if (position == 0) {
        m_.block->fullest = own;
        m_.block->total = in_range(total);
        m_.block->mean = static_cast<int>((total + p_.num_ranks - 1) / p_.num_ranks);
        m_.block->bound = m_.block->mean;
      }
    }
  }

  /// The largest experts are at least average: most k need no sum, as it is not above the mean.
  WAYBILL_HOST_DEVICE void choose_sums() {
    WAYBILL_UNROLL(1)
    for (int k = thread_ + 1; k < p_.num_ranks; k += threads_) {
      std::int64_t held = 0;
      WAYBILL_UNROLL(8)
      for (int i = 0; i < k; ++i) held += m_.sorted_rows[i];
      const std::int64_t room = std::int64_t{p_.spare} * (p_.num_ranks - k);
      const std::int64_t experts = std::int64_t{k} * p_.homes;
      // Whole numbers up to 2^31 * E: E is far below 2^32.
      if (room < experts && held * (experts - room) > std::int64_t{m_.block->mean} * k * experts)
        m_.needs_sum[k] = 1;
    }
    WAYBILL_UNROLL(1)
    for (int e = thread_; e < p_.num_experts; e += threads_)
      m_.expert_position[e] = m_.position[e / p_.homes];
  }

  /// The rows that the k fullest ranks keep if the others take their largest experts, over k.
  WAYBILL_HOST_DEVICE void find_bound(int warp, int warps) {
    for (int k = warp + 1; k < p_.num_ranks; k += warps) {
      if (m_.needs_sum[k] == 0) continue;
      const int kept = kept_by_fullest(k, p_.spare * (p_.num_ranks - k));
      Warp::block_max(&m_.block->bound, (kept - 1) / k + (kept > 0 ? 1 : 0));
    }
  }

  /// The limit of a rung. No limit above the fullest rank changes anything.
  WAYBILL_HOST_DEVICE int limit_of(int rung) const {
    constexpr std::int64_t max_exact = std::int64_t{1} << 53;
    const double wanted = static_cast<double>(m_.block->bound) * p_.limit_factor;
    const auto base = static_cast<std::int64_t>(
        wanted < static_cast<double>(max_exact) ? wanted : static_cast<double>(max_exact));
    const std::int64_t fullest = m_.block->fullest;
    if (base >= fullest) return static_cast<int>(fullest);
    constexpr std::int64_t cube =
        std::int64_t{even_rungs - 1} * (even_rungs - 1) * (even_rungs - 1);
    const std::int64_t above = fullest - base;
    const std::int64_t cubed = std::int64_t{rung} * rung * rung;
    return static_cast<int>(base + above / cube * cubed + above % cube * cubed / cube);
  }

  /// Warps take tries in order until one has succeeded; the lowest wins.
  template <int Own>
  WAYBILL_HOST_DEVICE void try_limits(int warp) {
    const EvenExpertsWarp own = m_.warp(p_, warp);
    const int ways = p_.present == nullptr ? even_ways - 1 : even_ways;  // the first needs present
    EvenExpertsPass<Warp, Own> pass(p_, m_, own);
    for (;;) {
      const int number = Warp::take_next(&m_.block->next_try);
      const int attempt = number / ways * even_ways + number % ways + even_ways - ways;
      if (attempt >= even_rungs * even_ways || Warp::look(&m_.block->best_try) < attempt) return;
      if (pass.run(attempt, limit_of(attempt / even_ways)) != PassResult::success) continue;
      pass.finish();
      Warp::block_min(&m_.block->best_try, attempt);
      succeeded_ = attempt;
      return;
    }
  }

  /// After try_limits: whether this warp's try has won.
  WAYBILL_HOST_DEVICE void name_winner(int warp, bool first_lane) {
    if (succeeded_ == m_.block->best_try && first_lane) m_.block->winner = warp;
  }

  /// Whether any copy can go home at all, and how many copies there are.
  WAYBILL_HOST_DEVICE void check_homeward() {
    const EvenExpertsWarp own = m_.warp(p_, m_.block->winner);
    const int limit = limit_of(m_.block->best_try / even_ways);
    WAYBILL_UNROLL(1)
    for (int i = thread_; i < copies_; i += threads_) {
      const bool is_copy = i % p_.spare < p_.spare - own.free_slots[i / p_.spare];
      m_.place[i] = 0;
      if (!is_copy) own.copy_rows[i] = 0;
      if (!is_copy) continue;
      Warp::block_add(&m_.block->num_copies, 1);
      m_.keys[i] = key_of(own, i);
      const int home = own.copy_expert[i] / p_.homes;
      if (own.load[home] + own.copy_rows[i] <= limit) Warp::block_max(&m_.block->any_fits, 1);
    }
  }

  /// How many copies go home before each: new ones before present ones, smallest first. Several
  /// threads count for one copy.
  WAYBILL_HOST_DEVICE void count_places() {
    if (m_.block->any_fits == 0) return;
    const EvenExpertsWarp own = m_.warp(p_, m_.block->winner);
    const int parts = threads_ > copies_ ? threads_ / copies_ : 1;
    WAYBILL_UNROLL(1)
    for (int i = thread_; i < copies_ * parts; i += threads_) {
      const int copy = i % copies_;
      if (own.copy_rows[copy] == 0) continue;
      int before = 0;
      for (int j = i / copies_; j < copies_; j += parts)
        before += own.copy_rows[j] > 0 && m_.keys[j] < m_.keys[copy] ? 1 : 0;
      if (before > 0) Warp::block_add(m_.place + copy, before);
    }
  }

  WAYBILL_HOST_DEVICE void order_copies() {
    if (m_.block->any_fits == 0) return;
    const EvenExpertsWarp own = m_.warp(p_, m_.block->winner);
    WAYBILL_UNROLL(1)
    for (int i = thread_; i < copies_; i += threads_)
      if (own.copy_rows[i] > 0) m_.order[m_.place[i]] = i;
  }

  /// One warp: copies go home while home has room.
  WAYBILL_HOST_DEVICE void send_home() {
    if (m_.block->any_fits == 0) return;
    const EvenExpertsWarp own = m_.warp(p_, m_.block->winner);
    const int limit = limit_of(m_.block->best_try / even_ways);
    const Mask first_lane = Warp::lane() == Int(0);
    for (int next = 0; next < m_.block->num_copies;) {
      const Int place = Warp::lane() + next;
      const Mask there = place < Int(m_.block->num_copies);
      const Int copy = Warp::gather(m_.order, place, there, 0);
      const Int rows = Warp::gather(own.copy_rows, copy, there, 0);
      const Int home = Warp::gather(own.copy_expert, copy, there, 0) / Int(p_.homes);
      const Mask fits = there && Warp::gather(own.load, home, there, 0) + rows <= Int(limit);
      const std::uint32_t lanes = Warp::ballot(fits);
      if (lanes == 0) {
        next += warp_lanes;
        continue;
      }
      const int lane = Warp::lowest(lanes);
      next += lane + 1;
      const int goes = Warp::broadcast(copy, lane), count = Warp::broadcast(rows, lane);
      const int to = Warp::broadcast(home, lane), from = goes / p_.spare;
      const int expert = Warp::read(own.copy_expert + goes);
      const int to_load = Warp::read(own.load + to) + count;
      const int from_load = Warp::read(own.load + from) - count;
      const int at_home = Warp::read(own.home_rows + expert) + count;
      Warp::sync();
      Warp::scatter(own.load, Int(to), Int(to_load), first_lane);
      Warp::scatter(own.load, Int(from), Int(from_load), first_lane);
      Warp::scatter(own.home_rows, Int(expert), Int(at_home), first_lane);
      Warp::scatter(own.copy_rows, Int(goes), Int(0), first_lane);
      Warp::sync();
    }
  }

  /// A present copy keeps its slot, and stays there unused until a new copy needs the slot. New
  /// copies, by expert, take empty slots first.
  WAYBILL_HOST_DEVICE void fill_slots() {
    const EvenExpertsWarp own = m_.warp(p_, m_.block->winner);
    WAYBILL_UNROLL(1)
    for (int r = thread_; r < p_.num_ranks; r += threads_) {
      const int first = r * p_.spare;
      int* const expert = m_.final_expert + first;
      int* const quota = m_.final_quota + first;
      for (int s = 0; s < p_.spare; ++s) {
        expert[s] = p_.present == nullptr ? -1 : m_.present[first + s];
        quota[s] = 0;
      }
      int came = 0;
      WAYBILL_UNROLL(1)
      for (int s = 0; s < p_.spare; ++s) {
        const int rows = own.copy_rows[first + s];
        const int place = rows > 0 ? present_place(r, own.copy_expert[first + s]) : -1;
        if (place >= 0) quota[place] = rows;
      }
      for (int after = -1;;) {
        const int copy = next_new_copy(own, r, after);
        if (copy < 0) break;
        after = own.copy_expert[copy];
        const int place = free_place(expert, quota);
        expert[place] = after;
        quota[place] = own.copy_rows[copy];
        Warp::block_add(m_.weights_out + after / p_.homes, 1);
        ++came;
      }
      p_.weights_in[r] = came;
    }
  }

  /// Slots, quotas and the rows of a slot's own rank.
  WAYBILL_HOST_DEVICE void write_slots() {
    const EvenExpertsWarp own = m_.warp(p_, m_.block->winner);
    WAYBILL_UNROLL(1)
    for (int i = thread_; i < p_.num_experts; i += threads_) {
      const int rank = i / p_.homes, quota = own.home_rows[i];
      m_.home_rest[i] = write_slot(rank, i % p_.homes, i, quota);
    }
    WAYBILL_UNROLL(1)
    for (int i = thread_; i < copies_; i += threads_) {
      const int rank = i / p_.spare;
      m_.final_rest[i] =
          write_slot(rank, p_.homes + i % p_.spare, m_.final_expert[i], m_.final_quota[i]);
    }
    WAYBILL_UNROLL(1)
    for (int r = thread_; r < p_.num_ranks; r += threads_) p_.weights_out[r] = m_.weights_out[r];
    if (thread_ == threads_ - 1) write_figures(own);
  }

  /// Warps: where the other rows of a copy, and of its home, begin.
  WAYBILL_HOST_DEVICE void write_first_rows(int warp, int warps) {
    for (int c = warp; c < copies_; c += warps) {
      const int expert = m_.final_expert[c], quota = m_.final_quota[c];
      if (quota == 0) continue;
      const int rank = c / p_.spare, home = expert / p_.homes;
      Int before = Int(0), before_home = Int(0);
      for (int i = 0; i < copies_; i += warp_lanes) {
        const Int other = Warp::lane() + i;
        const Mask there = other < Int(copies_);
        const Mask same = there && Warp::gather(m_.final_expert, other, there, -1) == Int(expert) &&
                          Warp::gather(m_.final_quota, other, there, 0) > Int(0);
        const Int rest = Warp::gather(m_.final_rest, other, same, 0);
        const Int other_rank = other / Int(p_.spare);
        before = before + Warp::select(same && other_rank < Int(rank), rest, Int(0));
        before_home = before_home + Warp::select(same && other_rank < Int(home), rest, Int(0));
      }
      const int first = Warp::reduce_add(before) + (home < rank ? m_.home_rest[expert] : 0);
      const int first_home = Warp::reduce_add(before_home);
      const bool home_takes = m_.warp(p_, m_.block->winner).home_rows[expert] > 0;
      const Mask first_lane = Warp::lane() == Int(0);
      Warp::scatter(p_.first_row, Int(rank * slots_per_rank_ + p_.homes + c % p_.spare), Int(first),
                    first_lane);
      Warp::scatter(p_.first_row, Int(home * slots_per_rank_ + expert % p_.homes),
                    Int(home_takes ? first_home : 0), first_lane);
    }
  }

  /// Only where the rows or the present copies are wrong.
  WAYBILL_HOST_DEVICE void write_failure() {
    if (thread_ == 0) p_.figures[figure_status] = m_.block->status;
  }

 private:
  WAYBILL_HOST_DEVICE void fail(EvenExpertsStatus status) {
    Warp::block_max(&m_.block->status, static_cast<int>(status));
  }

  /// Loads are int; INT_MAX stands for none.
  WAYBILL_HOST_DEVICE int in_range(std::int64_t rows) {
    if (rows < INT_MAX) return static_cast<int>(rows);
    fail(EvenExpertsStatus::too_many_rows);
    return 0;
  }

  /// Present experts of each rank in order. They are no home experts of the rank, and none twice.
  WAYBILL_HOST_DEVICE void sort_present() {
    if (p_.present == nullptr) return;
    WAYBILL_UNROLL(1)
    for (int r = thread_; r < p_.num_ranks; r += threads_) {
      int* const sorted = m_.present_expert + r * p_.spare;
      int count = 0;
      WAYBILL_UNROLL(1)
      for (int s = 0; s < p_.spare; ++s) {
        const int expert = p_.present[r * p_.present_stride + s];
        const bool good =
            expert >= -1 && expert < p_.num_experts && (expert < 0 || expert / p_.homes != r);
        if (!good) fail(EvenExpertsStatus::wrong_present);
        m_.present[r * p_.spare + s] = good ? expert : -1;
        if (!good || expert < 0) continue;
        int place = count++;
        for (; place > 0 && sorted[place - 1] >= expert; --place) {
          if (sorted[place - 1] == expert) fail(EvenExpertsStatus::wrong_present);
          sorted[place] = sorted[place - 1];
        }
        sorted[place] = expert;
      }
      for (; count < p_.spare; ++count) sorted[count] = -1;
    }
  }

  /// All but the `room` largest experts of the k fullest ranks.
  WAYBILL_HOST_DEVICE int kept_by_fullest(int k, int room) const {
    int low = 0, high = m_.block->fullest;  // the least with at most `room` experts above it
    while (low < high) {
      const int middle = low + (high - low) / 2;
      Int above = Int(0);
      for (int e = 0; e < p_.num_experts; e += warp_lanes)
        above = above + Warp::select(members(e, k) > Int(middle), Int(1), Int(0));
      if (Warp::reduce_add(above) > room) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    Int above = Int(0), rows = Int(0);
    for (int e = 0; e < p_.num_experts; e += warp_lanes) {
      const Int n = members(e, k);
      const Mask is_above = n > Int(low);
      above = above + Warp::select(is_above, Int(1), Int(0));
      rows = rows + Warp::select(is_above, Int(0), n);
    }
    return Warp::reduce_add(rows) - (room - Warp::reduce_add(above)) * low;
  }

  /// Rows of the lanes' experts from `first` on, 0 for those that are not on the k fullest ranks.
  WAYBILL_HOST_DEVICE Int members(int first, int k) const {
    const Int expert = Warp::lane() + first;
    const Mask there = expert < Int(p_.num_experts);
    const Mask is_member = there && Warp::gather(m_.expert_position, expert, there, 0) < Int(k);
    return Warp::gather(m_.expert_rows, expert, is_member, 0);
  }

  WAYBILL_HOST_DEVICE int present_place(int rank, int expert) const {
    if (p_.present == nullptr) return -1;
    WAYBILL_UNROLL(1)
    for (int s = 0; s < p_.spare; ++s) {
      if (m_.present[rank * p_.spare + s] == expert) return s;
    }
    return -1;
  }

  /// (is present, rows, expert, rank)
  WAYBILL_HOST_DEVICE std::uint64_t key_of(const EvenExpertsWarp& own, int copy) const {
    const int rank = copy / p_.spare, expert = own.copy_expert[copy];
    const std::uint64_t present = present_place(rank, expert) >= 0 ? 1 : 0;
    const std::uint64_t pair =
        static_cast<std::uint64_t>(expert) * static_cast<std::uint64_t>(p_.num_ranks) +
        static_cast<std::uint64_t>(rank);
    return present << 63U | static_cast<std::uint64_t>(own.copy_rows[copy]) << 32U | pair;
  }

  /// The copy of the lowest expert above `after` on this rank that is not present; -1: none.
  WAYBILL_HOST_DEVICE int next_new_copy(const EvenExpertsWarp& own, int rank, int after) const {
    int next = -1;
    WAYBILL_UNROLL(1)
    for (int i = rank * p_.spare; i < (rank + 1) * p_.spare; ++i) {
      if (own.copy_rows[i] == 0 || own.copy_expert[i] <= after) continue;
      if (next >= 0 && own.copy_expert[i] > own.copy_expert[next]) continue;
      if (present_place(rank, own.copy_expert[i]) < 0) next = i;
    }
    return next;
  }

  WAYBILL_HOST_DEVICE int free_place(const int* expert, const int* quota) const {
    WAYBILL_UNROLL(1)
    for (int s = 0; s < p_.spare; ++s) {
      if (expert[s] == -1) return s;
    }
    int place = 0;
    while (quota[place] != 0) ++place;
    return place;
  }

  /// @return rows of other ranks that the slot takes
  WAYBILL_HOST_DEVICE int write_slot(int rank, int slot, int expert, int quota) {
    const int i = rank * slots_per_rank_ + slot;
    int local = 0;
    if (quota > 0) {
      const int own = Warp::load(p_.rows + std::int64_t{rank} * p_.num_experts + expert);
      local = own < quota ? own : quota;
    }
    p_.slots[i] = expert;
    p_.quotas[i] = quota;
    p_.local_rows[i] = local;
    p_.first_row[i] = 0;
    return quota - local;
  }

  WAYBILL_HOST_DEVICE void write_figures(const EvenExpertsWarp& own) {
    int most = 0;
    WAYBILL_UNROLL(8)
    for (int r = 0; r < p_.num_ranks; ++r) most = own.load[r] > most ? own.load[r] : most;
    p_.figures[figure_status] = static_cast<int>(EvenExpertsStatus::good);
    p_.figures[figure_max_rows] = most;
    p_.figures[figure_bound] = m_.block->bound;
    p_.figures[figure_total] = m_.block->total;
    p_.figures[figure_try] = m_.block->best_try;
  }

  const EvenExpertsParams& p_;
  const EvenExpertsMemory& m_;
  int thread_, threads_, copies_, slots_per_rank_;
  int succeeded_ = -1;
};

}  // namespace waybill::cuda
