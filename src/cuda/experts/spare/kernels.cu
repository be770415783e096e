// Slots in place of experts: ranks exchange what they have of each expert, and when the planner has
// made the copies, each topk slot gets the slot of its row. The route then counts and places slots.

#include <algorithm>

#include "../placement.cuh"
#include "spare.h"

namespace waybill::cuda {
namespace {

/// Counts that a thread loads at once.
constexpr int counts_together = 4;

/// Brings the counts of all ranks to the table that the planner reads. The blocks share the work.
__device__ void take_rows(const SpareParams& p, std::uint64_t epoch) {
  const RouteParams& of = p.experts;
  const MoeShape& s = of.shape;
  const std::int32_t n = num_counts(s);
  const std::int32_t all = s.world_size * s.num_experts;
  const auto step = static_cast<std::int32_t>(num_blocks()) * route_threads;
  const auto word_at = [&](std::int32_t i) {
    return of.own_counts + std::int64_t{i / s.num_experts} * n + i % s.num_experts;
  };
  for (std::int32_t first = static_cast<std::int32_t>(block_idx() * route_threads + threadIdx.x);
       first < all; first += step * counts_together) {
    std::uint64_t seen[counts_together] = {};
#pragma unroll
    for (int k = 0; k < counts_together; ++k) {
      const std::int32_t i = first + k * step;
      if (i < all) seen[k] = load_word(word_at(i));
    }
#pragma unroll
    for (int k = 0; k < counts_together; ++k) {
      const std::int32_t i = first + k * step;
      if (i >= all) continue;
      const std::int32_t r = i / s.num_experts;
      const std::int32_t count = is_flagged(seen[k], epoch)
                                     ? static_cast<std::int32_t>(seen[k])
                                     : wait_flagged(of, r, word_at(i), epoch);
      p.rows[i] = count;
      if (r == s.rank && count > of.max_per_expert) report_many_of_expert(of, i % s.num_experts);
    }
  }
}

/// Each rank writes its counts as flagged words to all ranks, or those of its peers on all nodes to
/// the ranks of its node. Another rank has read the words of the last dispatch of this parity, as
/// all ranks have arrived in the dispatch after it.
template <Span S>
__global__ void __launch_bounds__(route_threads, 1)
    count_experts_kernel(const __grid_constant__ SpareParams p, int tile_warps) {
  extern __shared__ __align__(16) std::int32_t shared[];
  const RouteParams& of = p.experts;
  const Scratch scratch = scratch_in(shared, of.shape, tile_warps, false);
  const std::uint64_t epoch = begin_moe_call(of.m, 0);
  if (S == Span::rank && compares_calls()) {  // the route compares: here others are told
    send_call_words(of.m.arrive, epoch, load_call_words(of.m.arrive.fingerprint));
  }
  const RoutePart part = part_of<S>(of);
  count_block<S>(of, part, scratch, tile_warps);
  send_counts(of, part, scratch, epoch);
  take_rows(p, epoch);
  if (!is_last_block(of.m.state)) return;
  // The route waits for its blocks and counts them by the same words.
  of.m.state->arrived_blocks = 0;
  of.m.state->call.blocks = 0;
}

/// How a source rank's rows of each expert go to slots, in shared memory.
struct SlotTables {
  std::int32_t* local_rows;  ///< [E]: its first rows, which stay on that rank
  std::int32_t* local_slot;  ///< [E]: where they go
  std::int32_t* next_rest;   ///< [E]: place of the row after them in what the local slots leave
  std::int32_t* head;        ///< [E]: a slot of the expert that takes rows of other ranks; -1: none
  std::int32_t* next;        ///< [W, P]: the next such slot, in any order
};

constexpr std::int32_t tables_of_expert = 4;

__device__ SlotTables slot_tables_in(std::int32_t* shared, std::int32_t num_experts) {
  return {shared, shared + num_experts, shared + 2 * num_experts, shared + 3 * num_experts,
          shared + 4 * num_experts};
}

/// Fills the tables of a source. All threads.
__device__ void read_plan(const SpareParams& p, const SlotTables& tables, std::int32_t source) {
  const MoeShape& s = p.experts.shape;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int32_t e = thread; e < s.num_experts; e += route_threads) {
    std::int32_t lower = 0;  // rows of lower ranks
#pragma unroll 8
    for (std::int32_t r = 0; r < source; ++r) {
      lower += __ldg(p.rows + std::int64_t{r} * s.num_experts + e);
    }
    tables.local_rows[e] = 0;
    tables.local_slot[e] = -1;
    tables.next_rest[e] = lower;
    tables.head[e] = -1;
  }
  __syncthreads();
  const std::int32_t num_slots = s.world_size * p.slots_per_rank;
  for (std::int32_t i = thread; i < num_slots; i += route_threads) {
    const std::int32_t e = __ldg(p.slots + i);
    const std::int32_t quota = __ldg(p.quotas + i);
    if (e < 0 || quota == 0) continue;
    const std::int32_t local = __ldg(p.local_rows + i);
    const std::int32_t rank = i / p.slots_per_rank;
    if (rank < source) atomicSub(&tables.next_rest[e], local);
    if (rank == source) {  // no rank has an expert twice
      tables.local_rows[e] = local;
      tables.local_slot[e] = i;
    }
    if (quota > local) tables.next[i] = atomicExch(&tables.head[e], i);
  }
  __syncthreads();
}

/// The slot of the source's row `n` of an expert.
__device__ std::int32_t slot_of_row(const SpareParams& p, const SlotTables& tables,
                                    std::int32_t expert, std::int32_t n) {
  const std::int32_t local = tables.local_rows[expert];
  if (n < local) return tables.local_slot[expert];
  const std::int32_t place = tables.next_rest[expert] + n - local;
  std::int32_t slot = -1;
  std::int32_t first = -1;  // the last of all slots that begin at or before the place
  for (std::int32_t i = tables.head[expert]; i >= 0; i = tables.next[i]) {
    const std::int32_t begin = __ldg(p.first_row + i);
    if (begin > place || begin <= first) continue;
    first = begin;
    slot = i;
  }
  return slot;
}

/// Replaces the counts of each tile by the source's rows of each expert in earlier tiles.
__device__ void set_row_numbers(const RouteParams& of, const Scratch& scratch, int tile_warps) {
  const std::int32_t n = num_counts(of.shape);
  const std::int32_t* const tiles = of.tile_counts + std::int64_t{block_idx() - blockIdx.x} * n;
  for (auto e = static_cast<std::int32_t>(threadIdx.x); e < of.shape.num_experts;
       e += route_threads) {
    std::int32_t row = 0;
#pragma unroll 8
    for (unsigned b = 0; b < blockIdx.x; ++b) row += __ldcg(tiles + std::int64_t{b} * n + e);
    for (int w = 0; w < tile_warps; ++w) {
      const std::int32_t own = scratch.cursors[w * n + e];
      scratch.cursors[w * n + e] = row;
      row += own;
    }
  }
  __syncthreads();
}

/// Gives each topk slot of a tile its slot. One warp, whose lanes write what they have read.
template <Span S>
__device__ void replace_ids(const SpareParams& p, const RoutePart& part, Tile tile,
                            const SlotTables& tables, std::int32_t* cursors) {
  const MoeShape& s = p.experts.shape;
  const unsigned below = (1U << lane_id()) - 1;
  const int bits = bits_of(s.num_experts - 1);
  for (std::int32_t t = tile.begin; t < tile.end; t += 32 / s.topk) {
    const TopkSlot c = read_topk_slot<S>(s, part, t, tile.end);
    const bool live = c.active && c.expert < s.num_experts;
    const unsigned same = lanes_with(c.expert, bits) & __ballot_sync(all_lanes, live);
    const std::int32_t n = live ? cursors[c.expert] + __popc(same & below) : 0;
    __syncwarp();
    if (live && is_first(same)) cursors[c.expert] += __popc(same);
    __syncwarp();
    if (!c.active) continue;
    const std::int32_t no_slot = c.absent ? -1 : s.world_size * p.slots_per_rank;
    p.slot_ids[part.entry + std::int64_t{c.token} * s.topk + c.k] =
        live ? slot_of_row(p, tables, c.expert, n) : no_slot;
  }
}

/// The tables that the dispatch keeps. The blocks share the work.
__device__ void keep_plan(const SpareParams& p) {
  const std::int32_t num_slots = p.experts.shape.world_size * p.slots_per_rank;
  for (auto i = static_cast<std::int32_t>(block_idx() * route_threads + threadIdx.x); i < num_slots;
       i += static_cast<std::int32_t>(num_blocks()) * route_threads) {
    p.slot_experts[i] = __ldg(p.slots + i);
    p.slot_quotas[i] = __ldg(p.quotas + i);
  }
}

template <Span S>
__global__ void __launch_bounds__(route_threads, 1)
    slot_ids_kernel(const __grid_constant__ SpareParams p, int tile_warps) {
  extern __shared__ __align__(16) std::int32_t shared[];
  const RouteParams& of = p.experts;
  const MoeShape& s = of.shape;
  end_if_reported(of.m.arrive.sink);
  const Scratch scratch = scratch_in(shared, s, tile_warps, false);
  const SlotTables tables = slot_tables_in(scratch.block_counts + num_counts(s), s.num_experts);
  const RoutePart part = part_of<S>(of);
  keep_plan(p);
  count_block<S>(of, part, scratch, tile_warps);  // the same counts as before the plan
  read_plan(p, tables, part.source);
  set_row_numbers(of, scratch, tile_warps);
  const auto warp = static_cast<int>(threadIdx.x / 32);
  if (warp >= tile_warps) return;
  replace_ids<S>(p, part, tile_of(s, part, warp, tile_warps), tables,
                 scratch.cursors + warp * num_counts(s));
}

/// Words of shared memory for SlotTables.
int slot_table_words(const MoeShape& experts, std::int32_t num_slots) {
  return tables_of_expert * experts.num_experts + num_slots;
}

/// Warps that count a tile each, the same in both kernels.
int spare_tile_warps(const MoeShape& experts, std::int32_t num_slots) {
  return tile_warps_of(experts, slot_table_words(experts, num_slots));
}

std::int32_t num_slots_of(const SpareParams& params) {
  return params.experts.shape.world_size * params.slots_per_rank;
}

}  // namespace

bool spare_kernels_fit(const MoeShape& experts, std::int32_t num_slots) {
  return spare_tile_warps(experts, num_slots) >= 1;
}

int spare_blocks(const MoeShape& experts, int num_sms) {
  const std::int64_t counts = std::int64_t{experts.world_size} * experts.num_experts;
  constexpr std::int64_t per_block = std::int64_t{route_threads} * counts_together;
  const auto readers = std::min<std::int64_t>((counts + per_block - 1) / per_block, num_sms);
  return std::max(route_blocks(experts, num_sms), static_cast<int>(readers / experts.num_nodes));
}

cudaError_t prepare_spare() {
  for (const auto kernel : {count_experts_kernel<Span::rank>, count_experts_kernel<Span::nodes>,
                            slot_ids_kernel<Span::rank>, slot_ids_kernel<Span::nodes>}) {
    const cudaError_t status = allow_route_memory(kernel);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

namespace {

/// Launches a kernel of this file: it takes the tokens of one source, or a row of blocks for each.
template <class Kernel>
cudaError_t launch(Kernel of_rank, Kernel of_nodes, const SpareParams& params, int blocks,
                   int tile_warps, std::int64_t words, cudaStream_t stream) {
  const auto nodes = static_cast<unsigned>(params.experts.shape.num_nodes);
  const dim3 grid(static_cast<unsigned>(blocks), nodes);
  (nodes > 1 ? of_nodes
             : of_rank)<<<grid, route_threads, static_cast<std::size_t>(words) * 4, stream>>>(
      params, tile_warps);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_count_experts(const SpareParams& params, int blocks, cudaStream_t stream) {
  const MoeShape& s = params.experts.shape;
  const int tile_warps = spare_tile_warps(s, num_slots_of(params));
  return launch(count_experts_kernel<Span::rank>, count_experts_kernel<Span::nodes>, params, blocks,
                tile_warps, scratch_words(s, tile_warps, false), stream);
}

cudaError_t launch_slot_ids(const SpareParams& params, int blocks, cudaStream_t stream) {
  const MoeShape& s = params.experts.shape;
  const std::int32_t num_slots = num_slots_of(params);
  const int tile_warps = spare_tile_warps(s, num_slots);
  const std::int64_t words = scratch_words(s, tile_warps, false) + slot_table_words(s, num_slots);
  return launch(slot_ids_kernel<Span::rank>, slot_ids_kernel<Span::nodes>, params, blocks,
                tile_warps, words, stream);
}

}  // namespace waybill::cuda
