#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

// The rule of even_experts (python/waybill/moe/even_experts_rule.py) for a block of threads: here
// its tables in shared memory, in pass.h a try, which a warp does, in plain.h one without special
// cases, in kernel.h what the block does around tries. `Warp` says what a warp can do: a GPU's warp
// in kernel.cu, loops over 32 lanes in tests/planner.

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
inline constexpr int max_even_nodes = 32;  ///< a bit each
inline constexpr int warp_lanes = 32;

/// Rows or present copies may be wrong; the plan then is not written. The highest is told.
enum class EvenExpertsStatus : std::int32_t { good, too_many_rows, negative_rows, wrong_present };

/// A call's tables on the device. Tables of slots are [R, E / R + spare].
struct EvenExpertsParams {
  const std::int32_t* rows = nullptr;     ///< [R, E]
  const std::int32_t* present = nullptr;  ///< row r begins at r * present_stride; null: none
  std::int64_t present_stride = 0;
  std::int32_t num_ranks = 0, num_experts = 0, homes = 0, spare = 0;
  std::int32_t min_rows = 0, alignment = 1;  ///< at most INT_MAX, which no copy reaches
  double limit_factor = 1;
  std::int32_t num_nodes = 1;   ///< at most max_even_nodes
  std::int32_t pass_warps = 4;  ///< warps that try limits and ways

  std::int32_t* slots = nullptr;
  std::int32_t* quotas = nullptr;
  std::int32_t* local_rows = nullptr;
  std::int32_t* first_row = nullptr;
  std::int32_t* weights_out = nullptr;  ///< [R]
  std::int32_t* weights_in = nullptr;   ///< [R]
  std::int32_t* figures = nullptr;      ///< EvenExpertsFigure

  /// Tries per rung: with nodes each way is tried near first.
  WAYBILL_HOST_DEVICE int tries() const { return num_nodes > 1 ? 2 * even_ways : even_ways; }
  WAYBILL_HOST_DEVICE int node_ranks() const { return num_ranks / num_nodes; }
};

/// Places in EvenExpertsParams::figures.
enum EvenExpertsFigure : int {
  figure_status,
  figure_max_rows,
  figure_bound,
  figure_total,
  figure_try,           ///< rung * EvenExpertsParams::tries() + try
  figure_count_cycles,  ///< clocks of the block: sums and bound, tries, and from there to the end
  figure_try_cycles,
  figure_write_cycles,
  num_even_figures
};

/// A copy in one number that orders copies of a rank by expert; -1: none.
struct EvenExpertsCopy {
  static constexpr int rank_bits = 7, expert_bits = 17;
  static constexpr int is_present = INT_MIN;  ///< bit of a copy that was there before

  WAYBILL_HOST_DEVICE static int pack(int expert, int home, int rank) {
    return expert << (2 * rank_bits) | home << rank_bits | rank;
  }
  template <class Int>
  WAYBILL_HOST_DEVICE static Int expert(const Int& copy) {
    return (copy & Int(INT_MAX)) >> (2 * rank_bits);
  }
  template <class Int>
  WAYBILL_HOST_DEVICE static Int home(const Int& copy) {
    return copy >> rank_bits & Int((1 << rank_bits) - 1);
  }
  template <class Int>
  WAYBILL_HOST_DEVICE static Int rank(const Int& copy) {
    return copy & Int((1 << rank_bits) - 1);
  }
};

/// Numbers that the whole block shares.
struct EvenExpertsBlock {
  int status, total, mean, fullest, bound;
  int found;     ///< the bound where it is above the mean, else 0
  int next_try;  ///< that a warp takes next, after the first of each
  int best_try;  ///< the lowest that has succeeded * max_warps + its warp

  static constexpr int max_warps = 32;
};

/// The memory of one warp's pass.
struct EvenExpertsWarp {
  int* home_rows;     ///< [E] rows at home
  int* copies;        ///< [R, spare] EvenExpertsCopy in order of use
  int* copy_rows;     ///< [R, spare] 0: no copy
  int* load;          ///< [R]
  int* free_slots;    ///< [R]
  int* present_rows;  ///< [R, spare] rows that a present copy takes now; 0: none; -1: it is used
  int* of_home;       ///< [R] present copies that take rows
  int* of_rank;       ///< [R]
  int* copy_nodes;    ///< [E] with nodes: a bit for each that has a copy
  int* gifts;         ///< [R * spare + 2, 4] see EvenExpertsPlain
};

/// The shared memory of a call, in words.
struct EvenExpertsMemory {
  EvenExpertsBlock* block;
  int* expert_rows;   ///< [E], zeros up to a multiple of 4
  int* home_rest;     ///< [E] rows of other ranks that a home takes
  int* rank_rows;     ///< [R]
  int* position;      ///< [R] place among ranks, fullest first
  int* sorted_rows;   ///< [R]
  int* top_rows;      ///< [R] rows of a rank's largest expert
  int* top_expert;    ///< [R]
  int* weights_out;   ///< [R]
  int* weights_in;    ///< [R]
  int* present;       ///< [R, spare] EvenExpertsCopy in their slots
  int* present_copy;  ///< [R, spare] those of a rank in ascending order, then -1
  int* final_copy;    ///< [R, spare] the plan's, in their slots
  int* final_quota;   ///< [R, spare]
  int* final_rest;    ///< [R, spare] rows of other ranks that a copy takes
  int* first_copy;    ///< [E] the place of a copy of the expert, or -1
  int* next_copy;     ///< [R, spare] the place of another copy of the same expert, or -1
  // Experts, those of most rows first.
  int* sorted_expert_rows;  ///< [E]
  int* sorted_position;     ///< [E] place of the expert's home among ranks
  int* ties;                ///< [E]

  int* warps;  ///< memory of pass_warps warps; before: partial sums

  static constexpr int block_words = 16;
  static constexpr int max_listed_homes = 8, max_listed_spare = 7;  ///< for EvenExpertsPlain

  WAYBILL_HOST_DEVICE static int warp_words(const EvenExpertsParams& p) {
    const int nodes = p.num_nodes > 1 ? p.num_experts : 0;
    const int words = p.num_experts + 3 * p.num_ranks * p.spare + 4 * p.num_ranks + nodes;
    return (words + 3) / 4 * 4 + gift_words(p);
  }
  /// Four words per gift; the two steps after the last one write theirs, too.
  WAYBILL_HOST_DEVICE static int gift_words(const EvenExpertsParams& p) {
    const bool lists = p.num_nodes == 1 && p.alignment == 1 && p.homes <= max_listed_homes &&
                       p.spare <= max_listed_spare;
    return lists ? 4 * (p.num_ranks * p.spare + 2) : 0;
  }
  WAYBILL_HOST_DEVICE static int experts_in_fours(const EvenExpertsParams& p) {
    return (p.num_experts + 3) & ~3;
  }
  /// Threads that sum the rows of `width` experts, each of some ranks.
  WAYBILL_HOST_DEVICE static int partial_sums(const EvenExpertsParams& p, int threads) {
    const auto experts = static_cast<unsigned>(p.num_experts);
    const auto groups = static_cast<int>(static_cast<unsigned>(threads * sum_width(p)) / experts);
    return groups < 1 ? 1 : groups > p.num_ranks ? p.num_ranks : groups;
  }
  /// Experts that a thread sums: of four it reads 16 bytes at once.
  WAYBILL_HOST_DEVICE static int sum_width(const EvenExpertsParams& p) {
    return p.num_experts % 4 == 0 && reinterpret_cast<std::uintptr_t>(p.rows) % 16 == 0 ? 4 : 1;
  }
  /// `p.rows` may be null: then it is taken to lie as reads of 16 bytes need it, which needs most.
  WAYBILL_HOST_DEVICE static std::int64_t words(const EvenExpertsParams& p, int threads) {
    const std::int64_t fixed = block_words + experts_in_fours(p) + 5 * std::int64_t{p.num_experts} +
                               7 * std::int64_t{p.num_ranks} +
                               6 * std::int64_t{p.num_ranks} * p.spare;
    const std::int64_t passes = std::int64_t{p.pass_warps} * warp_words(p);
    const std::int64_t partial = std::int64_t{partial_sums(p, threads)} * p.num_experts;
    return (fixed + 3) / 4 * 4 + (passes > partial ? passes : partial);
  }

  WAYBILL_HOST_DEVICE EvenExpertsMemory(int* words, const EvenExpertsParams& p) {
    const int copies = p.num_ranks * p.spare;
    int used = 0;
    const auto take = [&](int count) {
      int* const first = words + used;
      used += count;
      return first;
    };
    block = reinterpret_cast<EvenExpertsBlock*>(take(block_words));
    expert_rows = take(experts_in_fours(p));  // read by fours
    home_rest = take(p.num_experts);
    rank_rows = take(p.num_ranks);
    position = take(p.num_ranks);
    sorted_rows = take(p.num_ranks);
    top_rows = take(p.num_ranks);
    top_expert = take(p.num_ranks);
    weights_out = take(p.num_ranks);
    weights_in = take(p.num_ranks);
    present = take(copies);
    present_copy = take(copies);
    final_copy = take(copies);
    final_quota = take(copies);
    final_rest = take(copies);
    first_copy = take(p.num_experts);
    next_copy = take(copies);
    sorted_expert_rows = take(p.num_experts);
    sorted_position = take(p.num_experts);
    ties = take(p.num_experts);
    warps = words + ((used + 3) & ~3);  // partial sums are written by fours
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
            ranks + p.num_ranks + p.num_ranks + p.num_ranks,
            ranks + 4 * p.num_ranks,
            experts + warp_words(p) - gift_words(p)};
  }
};
static_assert(sizeof(EvenExpertsBlock) <= EvenExpertsMemory::block_words * sizeof(int));

}  // namespace waybill::cuda
