#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <type_traits>

// The rule of even_experts (python/waybill/moe/even_experts_rule.py) for a block of threads: its
// tables in shared memory, its phases, and a pass, which a warp does. `Warp` says what a warp can
// do: a GPU's warp in even_experts.cu, loops over 32 lanes in tests/planner.
// The caller puts a barrier of the block between phases.

#ifdef __CUDACC__
#define WAYBILL_HOST_DEVICE __host__ __device__ __forceinline__
#define WAYBILL_PRAGMA(text) _Pragma(#text)
#define WAYBILL_UNROLL(count) WAYBILL_PRAGMA(unroll count)
#else
#define WAYBILL_HOST_DEVICE inline
#define WAYBILL_UNROLL(count)
#endif

namespace waybill::cuda {

inline constexpr int even_rungs = 32;
inline constexpr int even_ways = 4;
inline constexpr int warp_lanes = 32;

/// Rows or present copies may be wrong; the plan then is not written.
enum class EvenExpertsStatus : std::int32_t { good, negative_rows, too_many_rows, wrong_present };

/// A call's tables on the device. Tables of slots are [R, E / R + spare].
struct EvenExpertsParams {
  const std::int32_t* rows = nullptr;     ///< [R, E]
  const std::int32_t* present = nullptr;  ///< row r begins at r * present_stride; null: none
  std::int64_t present_stride = 0;
  std::int32_t num_ranks = 0, num_experts = 0, homes = 0, spare = 0;
  std::int32_t min_rows = 0, alignment = 1;  ///< at most INT_MAX, which no copy reaches
  double limit_factor = 1;
  std::int32_t pass_warps = 8;  ///< warps that try limits and ways

  std::int32_t* slots = nullptr;
  std::int32_t* quotas = nullptr;
  std::int32_t* local_rows = nullptr;
  std::int32_t* first_row = nullptr;
  std::int32_t* weights_out = nullptr;  ///< [R]
  std::int32_t* weights_in = nullptr;   ///< [R]
  std::int32_t* figures = nullptr;      ///< EvenExpertsFigure
};

/// Places in EvenExpertsParams::figures.
enum EvenExpertsFigure : int {
  figure_status,
  figure_max_rows,
  figure_bound,
  figure_total,
  figure_try,           ///< rung * 4 + way
  figure_count_cycles,  ///< clocks of the block: sums and bound, tries, and from there to the end
  figure_try_cycles,
  figure_write_cycles,
  num_even_figures
};

/// Numbers that the whole block shares.
struct EvenExpertsBlock {
  int status, total, mean, fullest, bound;
  int next_try;  ///< that a warp takes next
  int best_try;  ///< the lowest that has succeeded
  int winner;    ///< the warp whose try that was
  int any_fits;  ///< a copy can go home
  int num_copies;
};

/// The memory of one warp's pass.
struct EvenExpertsWarp {
  int* home_rows;     ///< [E] rows at home
  int* copy_expert;   ///< [R, spare] in order of use
  int* copy_rows;     ///< [R, spare]
  int* load;          ///< [R]
  int* free_slots;    ///< [R]
  int* present_rows;  ///< [R, spare] rows that a present copy takes now; -1: it was used
  int* of_home;       ///< [R] present copies that take rows
  int* of_rank;       ///< [R]
};

/// The shared memory of a call, in words.
struct EvenExpertsMemory {
  EvenExpertsBlock* block;
  std::uint64_t* keys;   ///< [R, spare] the order of going home
  int* expert_rows;      ///< [E]
  int* expert_position;  ///< [E] place of the expert's home among ranks, fullest first
  int* rank_rows;        ///< [R]
  int* position;         ///< [R]
  int* sorted_rows;      ///< [R]
  int* needs_sum;        ///< [R] k whose bound is to be computed
  int* top_rows;         ///< [R] rows of a rank's largest expert
  int* top_expert;       ///< [R]
  int* present;          ///< [R, spare] experts in their slots
  int* present_expert;   ///< [R, spare] experts of a rank in ascending order, then -1
  int* final_expert;     ///< [R, spare] the plan's
  int* final_quota;      ///< [R, spare]
  int* final_rest;       ///< [R, spare] rows of other ranks that a copy takes
  int* home_rest;        ///< [E] the same of home experts
  int* place;            ///< [R, spare] place of a copy in that order
  int* order;            ///< [R, spare] copies in that order
  int* weights_out;      ///< [R]
  int* warps;            ///< memory of pass_warps warps; partial sums before

  static constexpr int block_words = 16;

  WAYBILL_HOST_DEVICE static int warp_words(const EvenExpertsParams& p) {
    return p.num_experts + 3 * p.num_ranks * p.spare + 4 * p.num_ranks;
  }
  /// Threads that sum one expert's rows, each of some ranks.
  WAYBILL_HOST_DEVICE static int partial_sums(const EvenExpertsParams& p, int threads) {
    const int groups = threads / p.num_experts;
    return groups < 1 ? 1 : groups > p.num_ranks ? p.num_ranks : groups;
  }
  WAYBILL_HOST_DEVICE static std::int64_t words(const EvenExpertsParams& p, int threads) {
    const std::int64_t fixed = block_words + 3 * std::int64_t{p.num_experts} +
                               7 * std::int64_t{p.num_ranks} +
                               9 * std::int64_t{p.num_ranks} * p.spare;
    const std::int64_t passes = std::int64_t{p.pass_warps} * warp_words(p);
    const std::int64_t partial = 2 * std::int64_t{partial_sums(p, threads)} * p.num_experts;
    return (fixed + 1) / 2 * 2 + (passes > partial ? passes : partial);
  }

  WAYBILL_HOST_DEVICE EvenExpertsMemory(int* words, const EvenExpertsParams& p) {
    const int copies = p.num_ranks * p.spare;
    int* at = words;
    const auto take = [&](int count) {
      int* const first = at;
      at += count;
      return first;
    };
    block = reinterpret_cast<EvenExpertsBlock*>(take(block_words));
    keys = reinterpret_cast<std::uint64_t*>(take(2 * copies));
    expert_rows = take(p.num_experts);
    expert_position = take(p.num_experts);
    home_rest = take(p.num_experts);
    rank_rows = take(p.num_ranks);
    position = take(p.num_ranks);
    sorted_rows = take(p.num_ranks);
    needs_sum = take(p.num_ranks);
    top_rows = take(p.num_ranks);
    top_expert = take(p.num_ranks);
    weights_out = take(p.num_ranks);
    present = take(copies);
    present_expert = take(copies);
    final_expert = take(copies);
    final_quota = take(copies);
    final_rest = take(copies);
    place = take(copies);
    order = take(copies);
    warps = words + (at - words + 1) / 2 * 2;  // partial sums have 8 bytes
  }

  WAYBILL_HOST_DEVICE EvenExpertsWarp warp(const EvenExpertsParams& p, int number) const {
    const int copies = p.num_ranks * p.spare;
    const int words_before = number * warp_words(p);
    int* const experts = warps + words_before;
    int* const first = experts + p.num_experts;  // three tables have a place per copy
    int* const ranks = first + copies + copies + copies;
    return {experts,
            first,
            first + copies,
            ranks,
            ranks + p.num_ranks,
            first + copies + copies,
            ranks + p.num_ranks + p.num_ranks,
            ranks + p.num_ranks + p.num_ranks + p.num_ranks};
  }
};
static_assert(sizeof(EvenExpertsBlock) <= EvenExpertsMemory::block_words * sizeof(int));

/// A try brings all ranks down to its limit, or not, or a lower one has succeeded meanwhile.
enum class PassResult : std::int32_t { success, failure, stopped };

/// One try to bring every rank down to `limit` rows, by one warp. Lane l has the ranks l, l + 32,
/// ..., `Own` of them, in registers.
template <class Warp, int Own>
class EvenExpertsPass {
 public:
  using Int = typename Warp::Int;
  using Mask = typename Warp::Mask;

  WAYBILL_HOST_DEVICE EvenExpertsPass(const EvenExpertsParams& p, const EvenExpertsMemory& m,
                                      const EvenExpertsWarp& own)
      : p_(p),
        m_(m),
        own_(own),
        best_try_(Warp::pin(&m.block->best_try)),
        homes_(Warp::keep(p.homes)),
        spare_(Warp::keep(p.spare)),
        min_rows_(Warp::keep(p.min_rows)),
        alignment_(Warp::keep(p.alignment)) {
    // What each step reads.
    own_.home_rows = Warp::pin(own.home_rows);
    own_.copy_expert = Warp::pin(own.copy_expert);
    own_.copy_rows = Warp::pin(own.copy_rows);
  }

  WAYBILL_HOST_DEVICE PassResult run(int attempt, int limit) {
    attempt_ = attempt;
    limit_ = limit;
    const int way = attempt % even_ways;
    begin();
    if (way == 0) reuse_present();
    // The largest order of a giver: weights that it sends * room of the taker + rows.
    const std::int64_t largest =
        std::int64_t{p_.num_ranks} * spare_ * limit_ + m_.block->fullest + 1;
    const bool narrow = largest * rank_keys <= std::int64_t{0xFFFFFFFF} && homes_ <= rank_keys;
    return narrow ? settle<typename Warp::Unsigned>(way <= 1, way == 3)
                  : settle<typename Warp::Wide>(way <= 1, way == 3);
  }

  /// Writes what the block needs of a pass that has succeeded.
  WAYBILL_HOST_DEVICE void finish() {
    for (int k = 0; k < Own; ++k) {
      const Int rank = Warp::lane() + k * warp_lanes;
      const Mask is_rank = rank < Int(p_.num_ranks);
      Warp::scatter(own_.load, rank, load_[k], is_rank);
      Warp::scatter(own_.free_slots, rank, free_[k], is_rank);
    }
    Warp::sync();
  }

 private:
  static constexpr int rank_keys = 128;          // ranks that a key tells apart
  static constexpr unsigned steps_per_look = 4;  // at what other warps have done
  static_assert(Own * warp_lanes <= rank_keys);

  /// The lane's number that belongs to rank `rank`, which all lanes know.
  WAYBILL_HOST_DEVICE int of_rank(const Int (&values)[Own], int rank) const {
    const auto place = static_cast<unsigned>(rank);
    Int value = values[0];
    WAYBILL_UNROLL(4)
    for (int k = 1; k < Own; ++k) {
      if (place / warp_lanes == static_cast<unsigned>(k)) value = values[k];
    }
    return Warp::broadcast(value, static_cast<int>(place % warp_lanes));
  }

  WAYBILL_HOST_DEVICE void begin() {
    Warp::sync();  // lanes may still read what the last pass wrote
    for (int e = 0; e < p_.num_experts; e += warp_lanes) {
      const Int expert = Warp::lane() + e;
      const Mask is_expert = expert < Int(p_.num_experts);
      Warp::scatter(own_.home_rows, expert, Warp::gather(m_.expert_rows, expert, is_expert, 0),
                    is_expert);
    }
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Int rank = Warp::lane() + k * warp_lanes;
      const Mask is_rank = rank < Int(p_.num_ranks);
      load_[k] = Warp::gather(m_.rank_rows, rank, is_rank, 0);
      free_[k] = Warp::select(is_rank, Int(spare_), Int(0));
      sent_[k] = Int(0);
      top_rows_[k] = Warp::gather(m_.top_rows, rank, is_rank, 0);
      top_expert_[k] = Warp::gather(m_.top_expert, rank, is_rank, 0);
    }
    Warp::sync();
  }

  /// Gives rows of ranks above the limit to the emptiest ranks. A rank's number stands below its
  /// rows in one key, so that one reduction finds both.
  template <class Number>
  WAYBILL_HOST_DEVICE PassResult settle(bool spread, bool whole) {
    changed_rank_ = -1;
    for (unsigned step = 1;; ++step) {
      if (step % steps_per_look == 0 && Warp::look(best_try_) < attempt_)
        return PassResult::stopped;
      const auto emptiest = emptiest_rank<Number>();
      const bool has_taker = emptiest != static_cast<decltype(emptiest)>(-1);
      const int room = has_taker ? limit_ - static_cast<int>(emptiest / rank_keys) : 0;
      note_top<Number>();
      const auto first = next_giver<Number>(spread ? room : 0);
      if (first == 0) return PassResult::success;
      if (!has_taker) return PassResult::failure;
      const int taker = static_cast<int>(emptiest % rank_keys);
      const int giver = rank_keys - 1 - static_cast<int>(first % rank_keys);
      const int excess = of_rank(load_, giver) - limit_;
      const int giver_free = of_rank(free_, giver);
      const int taker_free = of_rank(free_, taker);
      int expert = of_rank(top_expert_, giver);
      int expert_rows = of_rank(top_rows_, giver);
      if (whole && taker_free > 1 && excess > room) {
        int fitting_rows = 0;
        const int fitting = largest_fitting<Number>(giver, room, fitting_rows);
        if (fitting_rows > 0) {
          expert = fitting;
          expert_rows = fitting_rows;
        }
      }
      const bool fills = taker_free == 1 && giver_free > 0;
      const int rows = share(expert_rows, room, excess, fills);
      if (rows == 0) return PassResult::failure;
      give(expert, expert_rows, giver, taker, taker_free, rows, excess);
    }
  }

  /// (rows, rank) of the rank below the limit, with a free slot, that has fewest rows; all bits
  /// are set where there is none.
  template <class Number>
  WAYBILL_HOST_DEVICE auto emptiest_rank() const {
    Number best = Number(-1);
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Mask takes = free_[k] > Int(0) && load_[k] < Int(limit_);
      const Number key =
          Number(load_[k]) * Number(rank_keys) + Number(Warp::lane() + k * warp_lanes);
      best = Warp::select(takes && key < best, key, best);
    }
    return Warp::reduce_min(best);
  }

  /// (order, rank counted down) of the rank above the limit that gives next; 0: none is above.
  template <class Number>
  WAYBILL_HOST_DEVICE auto next_giver(int weight) const {
    Number best = Number(0);
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Number order = Number(sent_[k]) * Number(weight) + Number(load_[k]);
      const Number key =
          order * Number(rank_keys) + Number(Int(rank_keys - 1 - k * warp_lanes) - Warp::lane());
      best = Warp::select(load_[k] > Int(limit_) && key > best, key, best);
    }
    return Warp::reduce_max(best);
  }

  /// The largest expert of a rank, of those of the lanes; the first of equals. Its number in the
  /// rank stands below its rows in one key, where keys are narrow.
  template <class Number>
  WAYBILL_HOST_DEVICE static void reduce_top(const Int& lane_rows, const Int& lane_expert,
                                             int first, int& rows, int& expert) {
    if constexpr (std::is_same_v<Number, typename Warp::Unsigned>) {
      const Number key =
          Number(lane_rows) * Number(rank_keys) + Number(Int(first + rank_keys - 1) - lane_expert);
      const unsigned top = Warp::reduce_max(Warp::select(lane_rows > Int(0), key, Number(0)));
      rows = static_cast<int>(top / rank_keys);
      expert = first + rank_keys - 1 - static_cast<int>(top % rank_keys);
    } else {
      rows = Warp::reduce_max(lane_rows);
      expert = Warp::reduce_min(Warp::select(lane_rows == Int(rows), lane_expert, Int(INT_MAX)));
    }
  }

  /// The largest expert of the rank that gave last. Reductions that nothing waits for soon.
  template <class Number>
  WAYBILL_HOST_DEVICE void note_top() {
    int most = 0, expert = 0;
    reduce_top<Number>(changed_rows_, changed_expert_, changed_rank_ * homes_, most, expert);
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Mask is_rank = Warp::lane() + k * warp_lanes == Int(changed_rank_);
      top_rows_[k] = Warp::select(is_rank, Int(most), top_rows_[k]);
      top_expert_[k] = Warp::select(is_rank, Int(expert), top_expert_[k]);
    }
  }

  /// The lanes' largest experts of a rank, at most `max_rows` each; the first of equals.
  /// @param changed has `changed_rows`, whatever memory says; -1: none
  WAYBILL_HOST_DEVICE void largest_of_lanes(int rank, int max_rows, int changed, int changed_rows,
                                            Int& most, Int& expert) const {
    const int first = rank * homes_;
    most = Int(0);
    expert = Int(INT_MAX);
    WAYBILL_UNROLL(1)
    for (int h = 0; h < homes_; h += warp_lanes) {
      const Int e = Warp::lane() + (first + h);
      const Mask is_home = e < Int(first + homes_);
      Int n = Warp::gather(own_.home_rows, e, is_home, 0);
      n = Warp::select(is_home && e == Int(changed), Int(changed_rows), n);
      const Mask better = n > most && n <= Int(max_rows);
      most = Warp::select(better, n, most);
      expert = Warp::select(better, e, expert);
    }
  }

  template <class Number>
  WAYBILL_HOST_DEVICE int largest_fitting(int rank, int max_rows, int& rows) const {
    Int most, expert;
    largest_of_lanes(rank, max_rows, -1, 0, most, expert);
    int fitting = 0;
    reduce_top<Number>(most, expert, rank * homes_, rows, fitting);
    return fitting;
  }

  /// How many of an expert's rows a copy takes; 0: none.
  WAYBILL_HOST_DEVICE int share(int rows, int room, int excess, bool fills) const {
    const int most = rows < room ? rows : room;
    int wanted = fills || most < excess ? most : excess;
    const int least = min_rows_ < most ? min_rows_ : most;
    wanted = wanted > least ? wanted : least;
    if (wanted < min_rows_) return 0;
    if (alignment_ > 1 && wanted < rows) {
      const int down = wanted / alignment_ * alignment_;
      const bool up = down < wanted && most - down >= alignment_;
      wanted = up ? down + alignment_ : down;
    }
    return wanted >= min_rows_ ? wanted : 0;
  }

  WAYBILL_HOST_DEVICE bool is_present(int rank, int expert) const {
    if (p_.present == nullptr) return false;
    const int first = rank * spare_;
    return find(m_.present + first, spare_, expert) >= 0;
  }

  /// The first of `count` numbers that is `wanted`; -1: none.
  WAYBILL_HOST_DEVICE static int find(const int* numbers, int count, int wanted) {
    WAYBILL_UNROLL(1)
    for (int s = 0; s < count; s += warp_lanes) {
      const Int i = Warp::lane() + s;
      const Mask there = i < Int(count);
      const std::uint32_t lanes =
          Warp::ballot(there && Warp::gather(numbers, i, there, -1) == Int(wanted));
      if (lanes != 0) return s + Warp::lowest(lanes);
    }
    return -1;
  }

  WAYBILL_HOST_DEVICE void give(int expert, int expert_rows, int giver, int taker, int taker_free,
                                int rows, int excess) {
    const int used = spare_ - taker_free;
    const int first = taker * spare_;
    const int old = used > 0 ? find(own_.copy_expert + first, used, expert) : -1;
    const bool is_new = old < 0;
    const int sends = is_new && !is_present(taker, expert) ? 1 : 0;
    const int slot = first + (is_new ? used : old);
    const Int first_lane_rows =
        is_new ? Int(rows)
               : Warp::gather(own_.copy_rows, Int(slot), Warp::lane() == Int(0), 0) + Int(rows);
    Warp::scatter(own_.copy_expert, Int(slot), Int(expert), Warp::lane() == Int(0));
    Warp::scatter(own_.copy_rows, Int(slot), first_lane_rows, Warp::lane() == Int(0));
    Warp::scatter(own_.home_rows, Int(expert), Int(expert_rows - rows), Warp::lane() == Int(0));
    // A rank that is not above the limit gives no more: its largest expert is of no interest.
    changed_rank_ = excess > rows ? giver : -1;
    if (excess > rows)
      largest_of_lanes(giver, INT_MAX, expert, expert_rows - rows, changed_rows_, changed_expert_);
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Int rank = Warp::lane() + k * warp_lanes;
      const Mask gives = rank == Int(giver), takes = rank == Int(taker);
      load_[k] = load_[k] + Warp::select(takes, Int(rows), Int(0)) -
                 Warp::select(gives, Int(rows), Int(0));
      free_[k] = free_[k] - Warp::select(takes, Int(is_new ? 1 : 0), Int(0));
      sent_[k] = sent_[k] + Warp::select(gives, Int(sends), Int(0));
    }
    Warp::sync();
  }

  /// Rows that the present copies `i` take now; 0: none. The last slot of a rank is used only if
  /// that fills the rank.
  WAYBILL_HOST_DEVICE Int reusable(Int rank, Int expert, Int home, Mask there) const {
    const Int at_home = Warp::gather(own_.home_rows, expert, there, 0);
    const Int room = Int(limit_) - Warp::gather(own_.load, rank, there, 0);
    const Int excess = Warp::gather(own_.load, home, there, 0) - Int(limit_);
    Int rows = Warp::select(at_home < room, at_home, room);
    rows = Warp::select(rows < excess, rows, excess);
    const Mask ok = there && rows > Int(0) && rows >= Int(min_rows_) &&
                    (Warp::gather(own_.free_slots, rank, there, 0) > Int(1) || rows == room);
    return Warp::select(ok, rows, Int(0));
  }

  /// Fills copies that are present: first those that settle a rank with no other such copy.
  WAYBILL_HOST_DEVICE void reuse_present() {
    const int copies = p_.num_ranks * spare_;
    finish();  // loads and free slots to memory
    for (int i = 0; i < copies; i += warp_lanes) {
      const Int copy = Warp::lane() + i;
      const Mask there = copy < Int(copies);
      const Int expert = Warp::gather(m_.present_expert, copy, there, -1);
      Warp::scatter(own_.present_rows, copy, Warp::select(expert < Int(0), Int(-1), Int(0)), there);
    }
    Warp::sync();
    while (reuse_next(copies)) {
      if (Warp::look(best_try_) < attempt_) break;
    }
    WAYBILL_UNROLL(4)
    for (int k = 0; k < Own; ++k) {
      const Int rank = Warp::lane() + k * warp_lanes;
      const Mask is_rank = rank < Int(p_.num_ranks);
      load_[k] = Warp::gather(own_.load, rank, is_rank, 0);
      free_[k] = Warp::gather(own_.free_slots, rank, is_rank, 0);
      find_top(rank, is_rank && load_[k] > Int(limit_), k);
    }
    Warp::sync();
  }

  /// The largest experts of the lanes' ranks, one after the other.
  WAYBILL_HOST_DEVICE void find_top(Int rank, Mask wanted, int k) {
    Int most = Int(0), expert = Int(0);
    if (Warp::ballot(wanted) != 0) {
      for (int h = 0; h < homes_; ++h) {
        const Int e = rank * Int(homes_) + Int(h);
        const Int n = Warp::gather(own_.home_rows, e, wanted, 0);
        expert = Warp::select(n > most, e, expert);
        most = Warp::select(n > most, n, most);
      }
    }
    top_rows_[k] = most;
    top_expert_[k] = expert;
  }

  /// False: no present copy takes rows.
  WAYBILL_HOST_DEVICE bool reuse_next(int copies) {
    for (int r = 0; r < p_.num_ranks; r += warp_lanes) {
      const Int rank = Warp::lane() + r;
      const Mask is_rank = rank < Int(p_.num_ranks);
      Warp::scatter(own_.of_home, rank, Int(0), is_rank);
      Warp::scatter(own_.of_rank, rank, Int(0), is_rank);
    }
    Warp::sync();
    for (int i = 0; i < copies; i += warp_lanes) {
      const Present c = present_copy(i, copies);
      const Int rows = reusable(c.rank, c.expert, c.home, c.there);
      Warp::scatter(own_.present_rows, c.copy, rows, c.there);
      Warp::add_one(own_.of_home, c.home, rows > Int(0));
      Warp::add_one(own_.of_rank, c.rank, rows > Int(0));
    }
    Warp::sync();
    Int best_rows = Int(0), best_settles = Int(0), best = Int(INT_MAX);
    for (int i = 0; i < copies; i += warp_lanes) {
      const Present c = present_copy(i, copies);
      const Int rows = Warp::gather(own_.present_rows, c.copy, c.there, 0);
      const Mask takes = rows > Int(0);
      const Int room = Int(limit_) - Warp::gather(own_.load, c.rank, takes, 0);
      const Int excess = Warp::gather(own_.load, c.home, takes, 0) - Int(limit_);
      const Mask settles =
          takes && ((Warp::gather(own_.of_rank, c.rank, takes, 0) == Int(1) && rows == room) ||
                    (Warp::gather(own_.of_home, c.home, takes, 0) == Int(1) && rows == excess));
      const Int settling = Warp::select(settles, Int(1), Int(0));
      const Mask better = settling > best_settles || (settling == best_settles && rows > best_rows);
      best = Warp::select(better, c.copy, best);
      best_rows = Warp::select(better, rows, best_rows);
      best_settles = Warp::select(better, settling, best_settles);
    }
    if (Warp::reduce_max(best_rows) == 0) return false;
    const int settles = Warp::reduce_max(best_settles);
    const int rows =
        Warp::reduce_max(Warp::select(best_settles == Int(settles), best_rows, Int(0)));
    const Mask is_best = best_settles == Int(settles) && best_rows == Int(rows);
    fill_present(Warp::reduce_min(Warp::select(is_best, best, Int(INT_MAX))), rows);
    return true;
  }

  struct Present {
    Int copy, rank, expert, home;
    Mask there;  ///< a copy lies there and was not used yet
  };
  WAYBILL_HOST_DEVICE Present present_copy(int first, int copies) const {
    const Int copy = Warp::lane() + first;
    const Mask there = copy < Int(copies) &&
                       Warp::gather(own_.present_rows, copy, copy < Int(copies), -1) >= Int(0);
    const Int expert = Warp::gather(m_.present_expert, copy, there, 0);
    return {copy, copy / Int(spare_), expert, expert / Int(homes_), there};
  }

  WAYBILL_HOST_DEVICE void fill_present(int copy, int rows) {
    const int rank = copy / spare_;
    const int expert = Warp::read(m_.present_expert + copy);
    const int home = expert / homes_;
    const int free_slots = Warp::read(own_.free_slots + rank);
    const int rank_load = Warp::read(own_.load + rank), home_load = Warp::read(own_.load + home);
    const int at_home = Warp::read(own_.home_rows + expert);
    const int slot = rank * spare_ + spare_ - free_slots;
    Warp::sync();
    const Mask first_lane = Warp::lane() == Int(0);
    Warp::scatter(own_.present_rows, Int(copy), Int(-1), first_lane);
    Warp::scatter(own_.home_rows, Int(expert), Int(at_home - rows), first_lane);
    Warp::scatter(own_.load, Int(home), Int(home_load - rows), first_lane);
    Warp::scatter(own_.load, Int(rank), Int(rank_load + rows), first_lane);
    Warp::scatter(own_.free_slots, Int(rank), Int(free_slots - 1), first_lane);
    Warp::scatter(own_.copy_expert, Int(slot), Int(expert), first_lane);
    Warp::scatter(own_.copy_rows, Int(slot), Int(rows), first_lane);
    Warp::sync();
  }

  const EvenExpertsParams& p_;
  const EvenExpertsMemory& m_;
  EvenExpertsWarp own_;
  const int* const best_try_;
  const int homes_, spare_, min_rows_, alignment_;  // in registers: a step is a chain of waits
  int attempt_ = 0, limit_ = 0;
  Int load_[Own], free_[Own], sent_[Own];
  Int top_rows_[Own], top_expert_[Own];  // those of ranks above the limit
  // The rank that gave last, or -1, and its largest experts in each lane, for note_top.
  int changed_rank_ = -1;
  Int changed_rows_ = Int(0), changed_expert_ = Int(0);
};

}  // namespace waybill::cuda
