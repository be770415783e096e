#pragma once

#include "slots.cuh"

// Where each rank keeps the rows of each expert, from the counts of all.

namespace waybill::cuda {

/// A count of rank r, when it has come; `word` was seen first.
__device__ inline std::int32_t wait_count(const RouteParams& p, std::int32_t r, std::int32_t e,
                                          std::uint64_t word, std::uint64_t epoch) {
  if (is_flagged(word, epoch)) return static_cast<std::int32_t>(word);
  return wait_flagged(p, r, p.own_counts + std::int64_t{r} * num_counts(p.shape) + e, epoch);
}

/// A count that has come.
__device__ inline std::int32_t count_at(const RouteParams& p, const Scratch& scratch,
                                        std::int32_t r, std::int32_t e) {
  const std::int64_t i = std::int64_t{r} * num_counts(p.shape) + e;
  return scratch.counts != nullptr ? scratch.counts[i]
                                   : static_cast<std::int32_t>(load_word(p.own_counts + i));
}

/// Topk slots of one expert: of all ranks, and of lower ones.
__device__ inline void note_sums(const RouteParams& p, const Scratch& scratch, std::int32_t e,
                                 std::int32_t sum, std::int32_t lower) {
  const MoeShape& s = p.shape;
  if (e >= s.num_experts) return;
  scratch.starts[e] = sum;
  scratch.before[e] = lower;
  const std::int32_t local = e - s.rank * s.experts_per_rank;
  if (block_idx() == 0 && 0 <= local && local < s.experts_per_rank) p.expert_counts[local] = sum;
}

/// Adds up the counts that ranks have of each expert. Those of several ranks are asked for
/// together.
/// @param ask(r, e), take(r, e, what was asked for): a count of rank r
template <int Together, class Ask, class Take>
__device__ void add_counts(const RouteParams& p, const RoutePart& part, const Scratch& scratch,
                           Ask&& ask, Take&& take) {
  const MoeShape& s = p.shape;
  const std::int32_t n = num_counts(s);
  for (auto e = static_cast<std::int32_t>(threadIdx.x); e < n; e += route_threads) {
    std::int32_t sum = 0;
    std::int32_t lower = 0;
    for (std::int32_t first = 0; first < s.world_size; first += Together) {
      decltype(ask(0, 0)) asked[Together];
#pragma unroll
      for (int i = 0; i < Together; ++i) {
        if (first + i < s.world_size) asked[i] = ask(first + i, e);
      }
#pragma unroll
      for (int i = 0; i < Together; ++i) {
        const std::int32_t r = first + i;
        if (r >= s.world_size) continue;
        const std::int32_t own = take(r, e, asked[i]);
        if (r < part.source) lower += own;
        sum += own;
      }
    }
    note_sums(p, scratch, e, sum, lower);
  }
}

/// Waits for the counts of all ranks, and adds up those of each expert.
__device__ inline void take_counts(const RouteParams& p, const RoutePart& part,
                                   const Scratch& scratch, std::uint64_t epoch) {
  const std::int32_t n = num_counts(p.shape);
  add_counts<8>(
      p, part, scratch,
      [&](std::int32_t r, std::int32_t e) {
        return load_word(p.own_counts + std::int64_t{r} * n + e);
      },
      [&](std::int32_t r, std::int32_t e, std::uint64_t word) {
        const std::int32_t own = wait_count(p, r, e, word, epoch);
        if (scratch.counts != nullptr) scratch.counts[std::int64_t{r} * n + e] = own;
        return own;
      });
}

/// First row of each expert, on its rank; rows of each rank. All blocks do the same.
/// @return whether a rank gets more rows than fit
__device__ inline bool locate_experts(const RouteParams& p, const RoutePart& part,
                                      const Scratch& scratch) {
  const MoeShape& s = p.shape;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  __syncthreads();
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const auto padded = [&](std::int32_t rows) {
    return s.alignment == 1 ? rows : (rows + s.alignment - 1) / s.alignment * s.alignment;
  };
  const std::int32_t each = (s.experts_per_rank + 31) / 32;  // experts of a lane
  for (std::int32_t d = thread / 32; d < s.world_size; d += route_warps) {
    std::int32_t* const starts = scratch.starts + d * s.experts_per_rank;
    const std::int32_t begin = min(lane * each, s.experts_per_rank);
    const std::int32_t end = min(begin + each, s.experts_per_rank);
    std::int32_t own = 0;
    for (std::int32_t e = begin; e < end; ++e) own += padded(starts[e]);
    std::int32_t upto = own;
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t left = __shfl_up_sync(all_lanes, upto, step);
      if (lane >= step) upto += left;
    }
    std::int32_t row = upto - own;
    for (std::int32_t e = begin; e < end; ++e) {
      const std::int32_t rows = padded(starts[e]);
      starts[e] = row;
      row += rows;
    }
    if (lane == 31) scratch.totals[d].grouped_rows = upto;
  }
  __syncthreads();
  bool overflows = false;
#pragma unroll 1  // one iteration for as many ranks as a block has threads
  for (std::int32_t d = thread; d < s.world_size; d += route_threads) {
    RankTotals& totals = scratch.totals[d];
    std::int32_t sum = 0;
    for (std::int32_t r = 0; r < s.world_size; ++r) {
      if (r == part.source) totals.compact_base = sum;
      sum += count_at(p, scratch, r, s.num_experts + 1 + d);
    }
    totals.recv_rows = s.compact != 0 ? sum : totals.grouped_rows;
    overflows |= totals.recv_rows > p.fitting_rows;
  }
  return __syncthreads_or(overflows ? 1 : 0) != 0;
}

/// Tokens of rank r, by a warp.
__device__ inline std::int32_t tokens_of(const RouteParams& p, const Scratch& scratch,
                                         std::int32_t r) {
  const MoeShape& s = p.shape;
  std::int32_t sum = 0;
#pragma unroll 4
  for (auto e = static_cast<std::int32_t>(threadIdx.x % 32); e <= s.num_experts; e += 32) {
    sum += count_at(p, scratch, r, e);
  }
  return __reduce_add_sync(all_lanes, sum) / s.topk;
}

/// What receivers read, spread over the blocks; by their last warps, which have the least to do.
__device__ inline void write_receiver_tables(const RouteParams& p, const Scratch& scratch) {
  const MoeShape& s = p.shape;
  const auto thread = route_threads - 1 - static_cast<std::int32_t>(threadIdx.x);
  const auto blocks = static_cast<std::int32_t>(num_blocks());
  for (std::int32_t r = thread / 32 * blocks + static_cast<std::int32_t>(block_idx());
       r < s.world_size; r += blocks * route_warps) {
    const std::int32_t tokens = tokens_of(p, scratch, r);
    if (threadIdx.x % 32 == 0) p.num_input_tokens[r] = tokens;
  }
  if (block_idx() != 0) return;
  for (std::int32_t i = thread; i < s.experts_per_rank; i += route_threads) {
    p.expert_offsets[i] = scratch.starts[s.rank * s.experts_per_rank + i];
  }
  if (thread == 0) p.expert_offsets[s.experts_per_rank] = scratch.totals[s.rank].grouped_rows;
}

/// The other tables, which all ranks know alike.
template <Span S>
__device__ void write_tables(const RouteParams& p, const Scratch& scratch) {
  const MoeShape& s = p.shape;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const auto step = static_cast<std::int32_t>(num_blocks()) * route_threads;
  const std::int32_t first = static_cast<std::int32_t>(block_idx()) * route_threads + thread;
  for (std::int32_t i = first; i < s.world_size * (s.num_experts + 1); i += step) {
    p.splits[i] = count_at(p, scratch, i / (s.num_experts + 1), i % (s.num_experts + 1));
  }
  for (std::int32_t e = first; e < s.num_experts; e += step) {
    std::int32_t row = scratch.starts[e];
    for (std::int32_t r = 0; r < s.world_size; ++r) {
      p.segment_offsets[std::int64_t{e} * s.world_size + r] = row;
      row += count_at(p, scratch, r, e);
    }
  }
  if constexpr (S != Span::nodes) {  // no token is there
    for (std::int32_t i = s.num_tokens * s.topk + first; i < s.max_tokens * s.topk; i += step) {
      p.dst_rows[i] = -1;
    }
  }
  if (block_idx() != 0) return;
#pragma unroll 1
  for (std::int32_t r = thread; r < s.world_size; r += route_threads) {
    p.num_recv_rows[r] = scratch.totals[r].recv_rows;
  }
  if (thread / 32 != 1) return;
  std::int32_t most = 0;
  for (std::int32_t r = thread % 32; r < s.world_size; r += 32)
    most = max(most, scratch.totals[r].recv_rows);
  most = __reduce_max_sync(all_lanes, most);
  if (thread == 32) p.num_recv_rows[s.world_size] = most;
}

/// One warp writes to the host how many rows come.
__device__ inline void report_to_host(const RouteParams& p, const Scratch& scratch) {
  for (auto r = static_cast<std::int32_t>(threadIdx.x % 32); r < p.shape.world_size; r += 32) {
    const auto rows = static_cast<std::uint32_t>(scratch.totals[r].recv_rows);
    p.host[r] = p.ticket << ticket_shift | std::uint64_t{rows};
  }
}

/// For scatter indices: what lower ranks have.
__device__ inline void locate_positions(const RouteParams& p, const Scratch& scratch) {
  const MoeShape& s = p.shape;
  if (threadIdx.x < 32) {
    std::int32_t tokens = 0;
    std::int32_t rows = 0;
    for (std::int32_t r = 0; r < s.world_size; ++r) {
      RankTotals& totals = scratch.totals[r];
      if (threadIdx.x == 0) {
        totals.first_token = tokens;
        totals.first_row = rows;
      }
      tokens += tokens_of(p, scratch, r);
      rows += totals.recv_rows;
    }
    if (tokens != p.scatter_tokens) report_scatter_size(p, tokens);
  }
  __syncthreads();
}

}  // namespace waybill::cuda
