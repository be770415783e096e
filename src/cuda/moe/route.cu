#include "launch.h"
#include "meet.cuh"

namespace waybill::cuda {
namespace {

constexpr int threads = 512;
constexpr int warps = threads / 32;
constexpr unsigned all_lanes = 0xFFFFFFFFU;

/// One choice of a round; lanes hold them in order of token and choice.
struct Choice {
  bool active;
  std::int32_t token;
  std::int32_t k;
  std::int32_t expert;  ///< num_experts when dropped
  std::int32_t dst;     ///< world_size when dropped
  bool bad;             ///< id out of range
};

/// Shared memory of a block.
struct Scratch {
  std::int32_t* cursors;  ///< [tile_warps, num_counts]
  std::int32_t* starts;   ///< [E]: choices of an expert, then its first row
  std::int32_t* before;   ///< [E]: choices of lower ranks
};

struct Tile {
  std::int32_t begin;
  std::int32_t end;
};

struct BlockTotals {
  std::int32_t recv_rows[max_gpu_ranks];
  std::int32_t grouped_rows[max_gpu_ranks];
  std::int32_t compact_base[max_gpu_ranks];  ///< first compact row of this rank's tokens
  std::int32_t first_row[max_gpu_ranks];     ///< with scatter indices: rows of lower ranks
  std::int32_t first_token;                  ///< with scatter indices: tokens of lower ranks
};

/// Tokens of warp `warp` of this block: a stretch of the rank's tokens.
__device__ Tile tile_of(const MoeShape& s, int warp, int tile_warps) {
  const std::int64_t total = std::int64_t{gridDim.x} * tile_warps;
  const std::int64_t i = std::int64_t{blockIdx.x} * tile_warps + warp;
  return {static_cast<std::int32_t>(s.num_tokens * i / total),
          static_cast<std::int32_t>(s.num_tokens * (i + 1) / total)};
}

__device__ Choice read_choice(const RouteParams& p, std::int32_t first, std::int32_t end) {
  const MoeShape& s = p.shape;
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  Choice c{};
  c.token = first + lane / s.topk;
  c.k = lane % s.topk;
  c.active = lane / s.topk < 32 / s.topk && c.token < end;
  c.expert = s.num_experts;
  if (c.active) {
    const std::int64_t i = std::int64_t{c.token} * s.topk + c.k;
    const std::int64_t id = p.wide_ids ? static_cast<const std::int64_t*>(p.ids)[i]
                                       : static_cast<const std::int32_t*>(p.ids)[i];
    const bool in_range = 0 <= id && id < s.num_experts;
    if (in_range) c.expert = static_cast<std::int32_t>(id);
    c.bad = !in_range && id != p.dropped_id;
  }
  c.dst = c.expert / s.experts_per_rank;
  return c;
}

/// Lanes with the same token and rank.
__device__ unsigned same_rank(const Choice& c) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  return __match_any_sync(all_lanes, c.active ? (c.token << 8) + c.dst : -1 - lane);
}

__device__ bool is_first(unsigned lanes) {
  return static_cast<int>(threadIdx.x % 32) == __ffs(static_cast<int>(lanes)) - 1;
}

__device__ void count_tile(const RouteParams& p, Tile tile, std::int32_t* counts) {
  const MoeShape& s = p.shape;
  bool bad = false;
  for (std::int32_t t = tile.begin; t < tile.end; t += 32 / s.topk) {
    const Choice c = read_choice(p, t, tile.end);
    const unsigned same = same_rank(c);
    if (c.active) {
      atomicAdd(&counts[c.expert], 1);
      if (c.dst < s.world_size && is_first(same)) atomicAdd(&counts[s.num_experts + 1 + c.dst], 1);
    }
    bad |= c.bad;
  }
  if (bad) p.faults->bad_ids = 1;
}

/// Counts of the block's warps, then what the warps before have: the block's share goes to
/// tile_counts.
__device__ void count_block(const RouteParams& p, const Scratch& scratch, int tile_warps) {
  const std::int32_t n = num_counts(p.shape);
  const auto warp = static_cast<int>(threadIdx.x / 32);
  for (int i = static_cast<int>(threadIdx.x); i < tile_warps * n; i += threads) {
    scratch.cursors[i] = 0;
  }
  __syncthreads();
  if (warp < tile_warps) {
    count_tile(p, tile_of(p.shape, warp, tile_warps), scratch.cursors + warp * n);
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < n; e += threads) {
    std::int32_t sum = 0;
    for (int w = 0; w < tile_warps; ++w) {
      const std::int32_t own = scratch.cursors[w * n + e];
      scratch.cursors[w * n + e] = sum;
      sum += own;
    }
    p.tile_counts[std::int64_t{blockIdx.x} * n + e] = sum;
  }
}

/// The last block: what the blocks before have, in place; the rank's counts to all ranks.
__device__ void tell_counts(const RouteParams& p, std::uint64_t epoch) {
  const std::int32_t n = num_counts(p.shape);
  for (int e = static_cast<int>(threadIdx.x); e < n; e += threads) {
    std::int32_t sum = 0;
#pragma unroll 8
    for (unsigned b = 0; b < gridDim.x; ++b) {
      std::int32_t* const at = p.tile_counts + std::int64_t{b} * n + e;
      const std::int32_t own = __ldcg(at);
      __stcg(at, sum);
      sum += own;
    }
    for (std::int32_t r = 0; r < p.shape.world_size; ++r) {
      p.counts[r][std::int64_t{p.shape.rank} * n + e] = sum;
    }
  }
  if (threadIdx.x == 0) p.m.state->call.blocks = 0;  // counted again when the kernel ends
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x < 32) publish_to_all_and_self(p.m.meet, epoch);
}

/// First row of each expert, on its rank; rows of each rank. All blocks do the same.
__device__ void locate_experts(const RouteParams& p, const Scratch& scratch, BlockTotals& totals) {
  const MoeShape& s = p.shape;
  const std::int32_t n = num_counts(s);
  const std::int32_t* const counts = p.counts[s.rank];
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int32_t e = thread; e < s.num_experts; e += threads) {
    std::int32_t sum = 0;
    std::int32_t lower = 0;
#pragma unroll 8
    for (std::int32_t r = 0; r < s.world_size; ++r) {
      const std::int32_t own = __ldcg(counts + std::int64_t{r} * n + e);
      if (r < s.rank) lower += own;
      sum += own;
    }
    scratch.starts[e] = sum;
    scratch.before[e] = lower;
    const std::int32_t local = e - s.rank * s.experts_per_rank;
    if (blockIdx.x == 0 && 0 <= local && local < s.experts_per_rank) p.expert_counts[local] = sum;
  }
  __syncthreads();
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  for (std::int32_t d = thread / 32; d < s.world_size; d += warps) {
    std::int32_t carry = 0;
    for (std::int32_t first = 0; first < s.experts_per_rank; first += 32) {
      const bool is_expert = first + lane < s.experts_per_rank;
      const std::int32_t e = d * s.experts_per_rank + first + lane;
      const std::int32_t rows =
          is_expert ? (scratch.starts[e] + s.alignment - 1) / s.alignment * s.alignment : 0;
      std::int32_t upto = rows;
      for (int step = 1; step < 32; step *= 2) {
        const std::int32_t left = __shfl_up_sync(all_lanes, upto, step);
        if (lane >= step) upto += left;
      }
      if (is_expert) scratch.starts[e] = carry + upto - rows;
      carry += __shfl_sync(all_lanes, upto, 31);
    }
    if (lane == 0) totals.grouped_rows[d] = carry;
  }
  __syncthreads();
  if (thread < s.world_size) {
    std::int32_t sum = 0;
    for (std::int32_t r = 0; r < s.world_size; ++r) {
      if (r == s.rank) totals.compact_base[thread] = sum;
      sum += __ldcg(counts + std::int64_t{r} * n + s.num_experts + 1 + thread);
    }
    totals.recv_rows[thread] = s.compact != 0 ? sum : totals.grouped_rows[thread];
  }
  __syncthreads();
}

/// Tokens of rank r, by a warp.
__device__ std::int32_t tokens_of(const RouteParams& p, std::int32_t r) {
  const MoeShape& s = p.shape;
  const std::int32_t* const row = p.counts[s.rank] + std::int64_t{r} * num_counts(s);
  std::int32_t sum = 0;
  for (auto e = static_cast<std::int32_t>(threadIdx.x % 32); e <= s.num_experts; e += 32) {
    sum += __ldcg(row + e);
  }
  return __reduce_add_sync(all_lanes, sum) / s.topk;
}

/// The tables that all ranks know alike, spread over the blocks.
__device__ void write_tables(const RouteParams& p, const Scratch& scratch,
                             const BlockTotals& totals) {
  const MoeShape& s = p.shape;
  const std::int32_t n = num_counts(s);
  const std::int32_t* const counts = p.counts[s.rank];
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const auto warp = static_cast<std::int32_t>(blockIdx.x * warps + threadIdx.x / 32);
  for (std::int32_t r = warp; r < s.world_size; r += static_cast<std::int32_t>(gridDim.x) * warps) {
    const std::int32_t tokens = tokens_of(p, r);
    if (threadIdx.x % 32 == 0) p.num_input_tokens[r] = tokens;
  }
  const auto step = static_cast<std::int32_t>(gridDim.x) * threads;
  const std::int32_t first = static_cast<std::int32_t>(blockIdx.x) * threads + thread;
  for (std::int32_t i = first; i < s.world_size * (s.num_experts + 1); i += step) {
    p.splits[i] = __ldcg(counts + std::int64_t{i / (s.num_experts + 1)} * n +
                         i % (s.num_experts + 1));
  }
  for (std::int32_t e = first; e < s.num_experts; e += step) {
    std::int32_t row = scratch.starts[e];
    for (std::int32_t r = 0; r < s.world_size; ++r) {
      p.segment_offsets[std::int64_t{e} * s.world_size + r] = row;
      row += __ldcg(counts + std::int64_t{r} * n + e);
    }
  }
  // No token is there.
  for (std::int32_t i = s.num_tokens * s.topk + first; i < s.max_tokens * s.topk; i += step) {
    p.dst_rows[i] = -1;
  }
  if (blockIdx.x != 0) return;
  for (std::int32_t i = thread; i < s.experts_per_rank; i += threads) {
    p.expert_offsets[i] = scratch.starts[s.rank * s.experts_per_rank + i];
  }
  if (thread == 0) p.expert_offsets[s.experts_per_rank] = totals.grouped_rows[s.rank];
  if (thread < s.world_size) p.num_recv_rows[thread] = totals.recv_rows[thread];
}

/// One warp tells the host how many rows come.
__device__ void tell_host(const RouteParams& p, const BlockTotals& totals) {
  for (auto r = static_cast<std::int32_t>(threadIdx.x); r < p.shape.world_size; r += 32) {
    p.host->num_recv_rows[r] = totals.recv_rows[r];
  }
  const std::int32_t own = totals.recv_rows[p.shape.rank];
  if (threadIdx.x == 0 && own > p.shape.capacity && own > p.faults->most_rows) {
    p.faults->most_rows = own;
  }
  __threadfence_system();
  __syncwarp();
  if (threadIdx.x == 0) p.host->ticket = p.ticket;
}

/// For scatter indices: what lower ranks have.
__device__ void locate_positions(const RouteParams& p, BlockTotals& totals) {
  const MoeShape& s = p.shape;
  if (threadIdx.x < 32) {
    std::int32_t first = 0;
    for (std::int32_t r = 0; r < s.rank; ++r) first += tokens_of(p, r);
    if (threadIdx.x == 0) {
      totals.first_token = first;
      std::int32_t rows = 0;
      for (std::int32_t r = 0; r < s.world_size; ++r) {
        totals.first_row[r] = rows;
        rows += totals.recv_rows[r];
      }
    }
  }
  __syncthreads();
}

__device__ void copy_weight(std::byte* to, const std::byte* from, std::int64_t i, int bytes) {
  if (bytes == 4) {
    reinterpret_cast<std::uint32_t*>(to)[i] = reinterpret_cast<const std::uint32_t*>(from)[i];
  } else {
    reinterpret_cast<std::uint16_t*>(to)[i] = reinterpret_cast<const std::uint16_t*>(from)[i];
  }
}

/// What a warp tells all ranks of its round's tokens.
__device__ void tell_records(const RouteParams& p, const Choice& c, std::int32_t row,
                             std::int32_t compact_row, bool first) {
  const MoeShape& s = p.shape;
  const std::int64_t token = std::int64_t{s.rank} * s.max_tokens + c.token;
  const std::int32_t stride = record_stride(s);
  if (!c.active) return;
  for (std::int32_t i = 0; i < s.world_size; ++i) {
    const std::int32_t d = (s.rank + i) % s.world_size;
    p.records[d][token * stride + c.k] = c.dst == d ? row : -1;
  }
  if (c.dst == s.world_size) return;
  if (s.compact != 0 && first) p.records[c.dst][token * stride + s.topk] = compact_row;
}

/// Gives each choice of the tile its row: behind the lower ranks', the earlier tiles' and the
/// earlier choices' of the same expert.
__device__ void place_tile(const RouteParams& p, Tile tile, std::int32_t* cursors,
                           const BlockTotals& totals) {
  const MoeShape& s = p.shape;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const unsigned below = (1U << lane) - 1;
  for (std::int32_t t = tile.begin; t < tile.end; t += 32 / s.topk) {
    const Choice c = read_choice(p, t, tile.end);
    const bool live = c.active && c.expert < s.num_experts;
    const unsigned same = __match_any_sync(all_lanes, live ? c.expert : -1 - lane);
    std::int32_t row = live ? cursors[c.expert] + __popc(same & below) : -1;
    const unsigned on_rank = same_rank(c);
    const bool first = live && is_first(on_rank);
    const unsigned firsts = __match_any_sync(all_lanes, first ? c.dst : -1 - lane);
    std::int32_t* const compact = cursors + s.num_experts + 1;
    const std::int32_t own = first ? compact[c.dst] + __popc(firsts & below) : -1;
    const std::int32_t compact_row =
        __shfl_sync(all_lanes, own, __ffs(static_cast<int>(on_rank)) - 1);
    __syncwarp();
    if (live && is_first(same)) cursors[c.expert] += __popc(same);
    if (first && is_first(firsts)) compact[c.dst] += __popc(firsts);
    __syncwarp();
    if (!c.active) continue;  // no lane of the warp is waited for below
    const std::int64_t i = std::int64_t{c.token} * s.topk + c.k;
    if (live && p.scatter != nullptr) {
      const std::int64_t at = std::int64_t{totals.first_token} * s.topk + i;
      const std::int64_t position = p.wide_scatter ? static_cast<const std::int64_t*>(p.scatter)[at]
                                                   : static_cast<const std::int32_t*>(p.scatter)[at];
      row = static_cast<std::int32_t>(position - totals.first_row[c.dst]);
      if (row < 0 || row >= totals.recv_rows[c.dst]) {
        p.faults->bad_positions = 1;
        row = static_cast<std::int32_t>(s.capacity);
      }
    }
    const std::int32_t sent = s.compact != 0 ? (live ? compact_row : -1) : row;
    p.out_ids[i] = c.expert;
    p.dst_rows[i] = sent;
    p.places[i] = live ? (std::int64_t{c.dst} << place_dst_shift) + sent +
                             (first ? place_leader_bit : 0)
                       : -1;
    tell_records(p, c, row, compact_row, first);
    if (p.weights != nullptr) {
      copy_weight(p.out_weights, p.weights, i, p.weight_bytes);
      if (live) {
        const std::int64_t there = std::int64_t{s.rank} * s.max_tokens * s.topk;
        copy_weight(p.sent_weights[c.dst] + there * p.weight_bytes, p.weights, i, p.weight_bytes);
      }
    }
  }
}

__global__ void __launch_bounds__(threads)
    route_kernel(const __grid_constant__ RouteParams p, int tile_warps) {
  extern __shared__ std::int32_t shared[];
  __shared__ BlockTotals totals;
  const MoeShape& s = p.shape;
  const std::int32_t n = num_counts(s);
  const Scratch scratch{shared, shared + tile_warps * n, shared + tile_warps * n + s.num_experts};
  const std::uint64_t epoch = begin_moe_call(p.m, 0);
  count_block(p, scratch, tile_warps);
  if (is_last_block(p.m.meet)) tell_counts(p, epoch);
  if (threadIdx.x < 32) await_all_and_self(p.m.meet, epoch);
  __syncthreads();
  locate_experts(p, scratch, totals);
  if (blockIdx.x == 0 && threadIdx.x < 32) tell_host(p, totals);
  if (p.scatter != nullptr) locate_positions(p, totals);
  const std::int32_t* const earlier = p.tile_counts + std::int64_t{blockIdx.x} * n;
  for (int i = static_cast<int>(threadIdx.x); i < tile_warps * n; i += threads) {
    const std::int32_t e = i % n;
    const std::int32_t base = e < s.num_experts ? scratch.starts[e] + scratch.before[e]
                              : e > s.num_experts ? totals.compact_base[e - s.num_experts - 1]
                                                  : 0;
    scratch.cursors[i] += base + __ldcg(earlier + e);
  }
  __syncthreads();
  const auto warp = static_cast<int>(threadIdx.x / 32);
  if (warp < tile_warps) {
    place_tile(p, tile_of(s, warp, tile_warps), scratch.cursors + warp * n, totals);
  }
  write_tables(p, scratch, totals);
  if (is_last_block(p.m.meet) && threadIdx.x == 0) end_moe_call(p.m, 0, epoch);
}

/// A dispatch with the tables of an earlier one: meets the others, sends new weights.
__global__ void __launch_bounds__(threads) enter_kernel(const __grid_constant__ RouteParams p) {
  const MoeShape& s = p.shape;
  const std::uint64_t epoch = begin_moe_call(p.m, 0);
  if (threadIdx.x < 32) {
    if (blockIdx.x == 0) publish_to_all(p.m.meet, epoch);
    await_all(p.m.meet, epoch);
  }
  __syncthreads();
  if (p.weights != nullptr) {
    const std::int64_t there = std::int64_t{s.rank} * s.max_tokens * s.topk;
    const std::int64_t count = std::int64_t{s.num_tokens} * s.topk;
    for (std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * threads) {
      copy_weight(p.out_weights, p.weights, i, p.weight_bytes);
      const std::int64_t place = p.places[i];
      if (place < 0) continue;
      std::byte* const to = p.sent_weights[place >> place_dst_shift & 0xFFFF];
      copy_weight(to + there * p.weight_bytes, p.weights, i, p.weight_bytes);
    }
  }
  if (is_last_block(p.m.meet) && threadIdx.x == 0) end_moe_call(p.m, 0, epoch);
}

constexpr int most_shared_bytes = 200 * 1024;

/// Warps of a block that have a tile each: as many as have room for their counts.
int tile_warps_of(const MoeShape& s) {
  const int room = most_shared_bytes / 4 - 2 * s.num_experts;
  const int fit = room / num_counts(s);
  return fit < warps ? fit : warps;
}

}  // namespace

int max_experts_on_gpu(int world_size) { return (most_shared_bytes / 4 - 1 - world_size) / 3; }

int route_blocks(const MoeShape& shape, int num_sms) {
  constexpr std::int64_t choices_a_block = 512;
  const std::int64_t wanted =
      (std::int64_t{shape.num_tokens} * shape.topk + choices_a_block - 1) / choices_a_block;
  return static_cast<int>(wanted < 1 ? 1 : wanted < num_sms ? wanted : num_sms);
}

cudaError_t prepare_route() {
  cudaFuncAttributes unused{};
  const cudaError_t status = cudaFuncGetAttributes(&unused, enter_kernel);
  if (status != cudaSuccess) return status;
  int device = 0;
  int most = 0;
  (void)cudaGetDevice(&device);
  (void)cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return cudaFuncSetAttribute(route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              most - 4096 < most_shared_bytes ? most - 4096 : most_shared_bytes);
}

cudaError_t launch_route(const RouteParams& params, int blocks, cudaStream_t stream) {
  const int tile_warps = tile_warps_of(params.shape);
  const std::size_t bytes =
      (static_cast<std::size_t>(tile_warps) * static_cast<std::size_t>(num_counts(params.shape)) +
       2 * static_cast<std::size_t>(params.shape.num_experts)) *
      4;
  route_kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(params, tile_warps);
  return cudaGetLastError();
}

cudaError_t launch_enter(const RouteParams& params, int blocks, cudaStream_t stream) {
  enter_kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
