#pragma once

#include "../rank/device_limits.h"
#include "placement.cuh"

// Rows of topk slots, from where each expert's rows begin.

namespace waybill::cuda {

/// Of a block's shared memory on the current device, at most what sm_80 has.
inline int most_route_bytes() {
  constexpr int most = 156 * 1024;
  constexpr int of_kernels = 4096;  // what these have besides
  const int room = shared_bytes_of_block() - of_kernels;
  return room < most ? room : most;
}

template <class Kernel>
cudaError_t allow_route_memory(Kernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              most_route_bytes());
}

/// Words of shared memory of what a block knows of ranks.
inline int table_words(const MoeShape& s) {
  constexpr auto word = static_cast<int>(sizeof(std::int32_t));
  return s.node_ranks * static_cast<int>(sizeof(std::byte*)) / word +
         s.world_size * static_cast<int>(sizeof(RankTotals)) / word;
}

/// Warps of a block that have a tile each: as many as have room for their counts. @param kept words
/// that are needed besides
inline int tile_warps_of(const MoeShape& s, int kept = 0) {
  const int room =
      most_route_bytes() / 4 - table_words(s) - 2 * s.num_experts - num_counts(s) - kept;
  const int fit = room / num_counts(s);
  return fit < route_warps ? fit : route_warps;
}

/// Words of shared memory that `Scratch` takes. @param keeps_counts those of all ranks, too
inline std::int64_t scratch_words(const MoeShape& s, int tile_warps, bool keeps_counts) {
  const std::int64_t counts = num_counts(s);
  return table_words(s) + (tile_warps + 1) * counts + 2 * s.num_experts +
         (keeps_counts ? s.world_size * counts : 0);
}

/// @param shared aligned to 8 bytes
__device__ inline Scratch scratch_in(std::int32_t* shared, const MoeShape& s, int tile_warps,
                                     bool keeps_counts) {
  const std::int32_t n = num_counts(s);
  auto* const bases = reinterpret_cast<std::byte**>(shared);
  auto* const totals = reinterpret_cast<RankTotals*>(bases + s.node_ranks);
  auto* const cursors = reinterpret_cast<std::int32_t*>(totals + s.world_size);
  std::int32_t* const behind = cursors + tile_warps * n;
  return {bases,
          totals,
          cursors,
          behind,
          behind + s.num_experts,
          behind + 2 * s.num_experts,
          keeps_counts ? behind + 2 * s.num_experts + n : nullptr};
}

/// What a warp sends to all ranks of the node about its round's tokens; or this one, which has the
/// ids of all.
template <Span S>
__device__ void send_records(const RouteParams& p, const RoutePart& part, const Scratch& scratch,
                             const TopkSlot& c, std::int32_t row, std::int32_t compact_row,
                             bool first) {
  const MoeShape& s = p.shape;
  const std::int64_t token = part.record + c.token;
  const std::int32_t stride = record_stride(s);
  if (!c.active) return;
  if constexpr (S == Span::world) {
    std::int32_t* const record = p.own_records + token * stride;
    record[c.k] = c.dst == s.rank ? row : -1;
    if (s.compact != 0 && first && c.dst == s.rank) record[s.topk] = compact_row;
  } else {
    for (std::int32_t i = 0; i < s.node_ranks; ++i) {
      const std::int32_t d = node_rank(s, i);
      part_at<std::int32_t>(s, scratch, p.records, d)[token * stride + c.k] = c.dst == d ? row : -1;
    }
    if (s.compact != 0 && first) {
      part_at<std::int32_t>(s, scratch, p.records, c.dst)[token * stride + s.topk] = compact_row;
    }
  }
}

/// The row of a topk slot where the caller wants it.
__device__ __noinline__ inline std::int32_t scattered_row(const RouteParams& p,
                                                          const RoutePart& part, const TopkSlot& c,
                                                          const RankTotals* totals) {
  const MoeShape& s = p.shape;
  const std::int32_t topk_slot = c.token * s.topk + c.k;
  const std::int64_t position =
      index_at(p.scatter, p.wide_scatter,
               std::int64_t{totals[part.source].first_token} * s.topk + topk_slot);
  const std::int32_t first = totals[c.dst].first_row;
  const std::int32_t rows = totals[c.dst].recv_rows;
  if (position < first || position >= std::int64_t{first} + rows) {
    report_position(p, position, part.source, topk_slot, first, rows, c.dst);
  }
  return static_cast<std::int32_t>(position - first);
}

/// Gives each topk slot of the tile its row: behind the lower ranks', the earlier tiles' and the
/// earlier topk slots' of the same expert. @param overflows rows may not fit
template <Span S>
__device__ void place_tile(const RouteParams& p, const RoutePart& part, Tile tile,
                           const Scratch& scratch, std::int32_t* cursors, bool overflows) {
  const MoeShape& s = p.shape;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const unsigned below = (1U << lane) - 1;
  const int expert_bits = bits_of(s.num_experts - 1);
  const int rank_bits = bits_of(s.world_size);
  for (std::int32_t t = tile.begin; t < tile.end; t += 32 / s.topk) {
    const TopkSlot c = read_topk_slot<S>(s, part, t, tile.end);
    const bool live = c.active && c.expert < s.num_experts;
    const unsigned same = lanes_with(c.expert, expert_bits) & __ballot_sync(all_lanes, live);
    std::int32_t row = live ? cursors[c.expert] + __popc(same & below) : -1;
    if (live && p.scatter != nullptr) row = scattered_row(p, part, c, scratch.totals);
    const unsigned same_dst = lanes_with(c.dst, rank_bits);
    unsigned on_rank = same_dst & lanes_of_token(s.topk, c.k);
    bool fits = true;
    if (overflows && s.compact == 0) {  // the same in all lanes
      fits = row < p.fitting_rows;
      on_rank &= __ballot_sync(all_lanes, fits);
    }
    const bool first = live && is_first(on_rank);
    const unsigned firsts = same_dst & __ballot_sync(all_lanes, first);
    std::int32_t* const compact = cursors + s.num_experts + 1;
    const std::int32_t own = first ? compact[c.dst] + __popc(firsts & below) : -1;
    const std::int32_t compact_row =
        __shfl_sync(all_lanes, own, __ffs(static_cast<int>(on_rank)) - 1);
    __syncwarp();
    if (live && is_first(same)) cursors[c.expert] += __popc(same);
    if (first && is_first(firsts)) compact[c.dst] += __popc(firsts);
    __syncwarp();
    if (!c.active) continue;  // no lane of the warp is waited for below
    const std::int64_t of_part = std::int64_t{c.token} * s.topk + c.k;
    const std::int64_t i = part.entry + of_part;
    const std::int32_t sent = s.compact != 0 ? (live ? compact_row : -1) : row;
    constexpr bool nodes = S == Span::nodes;
    const std::int32_t local_dst = nodes ? c.dst - s.first_rank : c.dst;
    const bool here = live && (!nodes || (0 <= local_dst && local_dst < s.node_ranks));
    send_records<S>(p, part, scratch, c, fits ? row : -1, compact_row, first && here);
    if (S == Span::world && (part.source != s.rank || c.absent)) continue;
    p.out_ids[i] = c.absent ? -1 : c.expert;
    p.dst_rows[i] = here || p.scatter != nullptr ? sent : -1;
    p.addresses[i] =
        here ? (std::int64_t{local_dst} << address_dst_shift) + sent + (first ? primary_row_bit : 0)
             : -1;
    if (part.weights != nullptr) {
      copy_weight(p.out_weights, part.weights, i, of_part, p.weight_bytes);
      if (S != Span::world && here) {
        copy_weight(part_at<std::byte>(s, scratch, p.sent_weights, c.dst), part.weights,
                    part.record * s.topk + of_part, of_part, p.weight_bytes);
      }
    }
  }
}

/// First row of expert e for the part's topk slots, or beyond the experts first compact row on a
/// rank.
__device__ inline std::int32_t first_row(const MoeShape& s, const Scratch& scratch,
                                         std::int32_t e) {
  if (e < s.num_experts) return scratch.starts[e] + scratch.before[e];
  return e > s.num_experts ? scratch.totals[e - s.num_experts - 1].compact_base : 0;
}

/// Where each tile of the part has the first row of each expert, from what the tiles have of it.
/// Reports an expert that this rank has too often: with the earlier blocks' topk slots, one block
/// finds it.
/// @param earlier(e): topk slots of the part's earlier blocks
template <class Earlier>
__device__ void set_cursors(const RouteParams& p, const RoutePart& part, const Scratch& scratch,
                            int tile_warps, Earlier&& earlier) {
  const MoeShape& s = p.shape;
  const std::int32_t n = num_counts(s);
  for (auto e = static_cast<std::int32_t>(threadIdx.x); e < n; e += route_threads) {
    std::int32_t own[route_warps];
#pragma unroll
    for (int w = 0; w < route_warps; ++w) {
      own[w] = w < tile_warps ? scratch.cursors[w * n + e] : 0;
    }
    const std::int32_t first = first_row(s, scratch, e);
    std::int32_t row = first + earlier(e);
#pragma unroll
    for (int w = 0; w < route_warps; ++w) {
      if (w < tile_warps) scratch.cursors[w * n + e] = row;
      row += own[w];
    }
    if (row - first > p.max_per_expert && e < s.num_experts && part.source == s.rank) {
      report_many_of_expert(p, e);
    }
  }
  __syncthreads();
}

/// Places the part's topk slots. @pre cursors hold what each tile has of each expert
/// @param earlier as above
template <Span S, class Earlier>
__device__ void place_block(const RouteParams& p, const RoutePart& part, const Scratch& scratch,
                            int tile_warps, bool overflows, Earlier&& earlier) {
  const MoeShape& s = p.shape;
  set_cursors(p, part, scratch, tile_warps, earlier);
  const auto warp = static_cast<int>(threadIdx.x / 32);
  if (warp >= tile_warps) return;
  place_tile<S>(p, part, tile_of(s, part, warp, tile_warps), scratch,
                scratch.cursors + warp * num_counts(s), overflows);
}

}  // namespace waybill::cuda
