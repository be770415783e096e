#include <algorithm>

#include "expert_rows.cuh"
#include "launch.h"

namespace waybill::cuda {
namespace {

__device__ void copy_weight(std::byte* to, const std::byte* from, std::int64_t to_idx,
                            std::int64_t from_idx, int bytes) {
  if (bytes == 4) {
    reinterpret_cast<std::uint32_t*>(to)[to_idx] =
        reinterpret_cast<const std::uint32_t*>(from)[from_idx];
  } else {
    reinterpret_cast<std::uint16_t*>(to)[to_idx] =
        reinterpret_cast<const std::uint16_t*>(from)[from_idx];
  }
}

/// What a warp tells all ranks of the node of its round's tokens.
__device__ void tell_records(const RouteParams& p, const RoutePart& part, const Choice& c,
                             std::int32_t row, std::int32_t compact_row, bool first) {
  const MoeShape& s = p.shape;
  const std::int64_t token = part.record + c.token;
  const std::int32_t stride = record_stride(s);
  if (!c.active) return;
  for (std::int32_t i = 0; i < s.node_ranks; ++i) {
    const std::int32_t d = node_rank(s, i);
    p.records[d][token * stride + c.k] = c.dst == d ? row : -1;
  }
  if (s.compact != 0 && first) p.records[c.dst][token * stride + s.topk] = compact_row;
}

/// Gives each choice of the tile its row: behind the lower ranks', the earlier tiles' and the
/// earlier choices' of the same expert.
template <bool Nodes>
__device__ void place_tile(const RouteParams& p, const RoutePart& part, Tile tile,
                           std::int32_t* cursors, const BlockTotals& totals) {
  const MoeShape& s = p.shape;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const unsigned below = (1U << lane) - 1;
  for (std::int32_t t = tile.begin; t < tile.end; t += 32 / s.topk) {
    const Choice c = read_choice<Nodes>(p, part, t, tile.end);
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
    const std::int64_t of_part = std::int64_t{c.token} * s.topk + c.k;
    const std::int64_t i = part.entry + of_part;
    if (live && p.scatter != nullptr) {
      const std::int64_t at = std::int64_t{totals.first_token} * s.topk + of_part;
      const std::int64_t position = p.wide_scatter
                                        ? static_cast<const std::int64_t*>(p.scatter)[at]
                                        : static_cast<const std::int32_t*>(p.scatter)[at];
      row = static_cast<std::int32_t>(position - totals.first_row[c.dst]);
      if (row < 0 || row >= totals.recv_rows[c.dst]) {
        p.faults->bad_positions = 1;
        row = static_cast<std::int32_t>(s.capacity);
      }
    }
    const std::int32_t sent = s.compact != 0 ? (live ? compact_row : -1) : row;
    const std::int32_t local_dst = Nodes ? c.dst - s.first_rank : c.dst;
    const bool here = live && (!Nodes || (0 <= local_dst && local_dst < s.node_ranks));
    p.out_ids[i] = c.absent ? -1 : c.expert;
    p.dst_rows[i] = here || p.scatter != nullptr ? sent : -1;
    p.places[i] =
        here ? (std::int64_t{local_dst} << place_dst_shift) + sent + (first ? place_leader_bit : 0)
             : -1;
    tell_records(p, part, c, row, compact_row, first && here);
    if (part.weights != nullptr) {
      copy_weight(p.out_weights, part.weights, i, of_part, p.weight_bytes);
      if (here) {
        copy_weight(p.sent_weights[c.dst], part.weights, part.record * s.topk + of_part, of_part,
                    p.weight_bytes);
      }
    }
  }
}

template <bool Nodes>
__global__ void __launch_bounds__(route_threads)
    route_kernel(const __grid_constant__ RouteParams p, int tile_warps, bool keeps_counts) {
  extern __shared__ std::int32_t shared[];
  __shared__ BlockTotals totals;
  const MoeShape& s = p.shape;
  const std::int32_t n = num_counts(s);
  std::int32_t* const behind = shared + tile_warps * n;
  const Scratch scratch{shared, behind, behind + s.num_experts, behind + 2 * s.num_experts,
                        keeps_counts ? behind + 2 * s.num_experts + n : nullptr};
  let_next_begin();
  const std::uint64_t epoch = begin_moe_call(p.m, 0);
  const RoutePart part = part_of<Nodes>(p);
  count_block<Nodes>(p, part, scratch, tile_warps);
  tell_counts(p, part, scratch, epoch);
  take_counts(p, part, scratch, epoch);
  __syncthreads();
  locate_experts(p, part, scratch, totals);
  if (p.scatter != nullptr) locate_positions(p, part, scratch, totals);
  for (int e = static_cast<int>(threadIdx.x); e < n; e += route_threads) {
    const std::int32_t base = e < s.num_experts   ? scratch.starts[e] + scratch.before[e]
                              : e > s.num_experts ? totals.compact_base[e - s.num_experts - 1]
                                                  : 0;
    for (int w = 0; w < tile_warps; ++w) scratch.cursors[w * n + e] += base + scratch.shares[e];
  }
  __syncthreads();
  const auto warp = static_cast<int>(threadIdx.x / 32);
  if (warp < tile_warps) {
    place_tile<Nodes>(p, part, tile_of(part, warp, tile_warps), scratch.cursors + warp * n, totals);
  }
  write_tables<Nodes>(p, scratch, totals);
  if (block_idx() == 0 && warp == 0) tell_host(p, totals);
  if (comes_last(p.m.state)) end_moe_call(p.m, 0, epoch);
}

/// A dispatch with the tables of an earlier one: meets the others, sends new weights. On several
/// nodes the others have been met, and the weights are those of all tokens that are forwarded here.
template <bool Nodes>
__global__ void __launch_bounds__(route_threads)
    enter_kernel(const __grid_constant__ RouteParams p) {
  const MoeShape& s = p.shape;
  let_next_begin();
  const std::uint64_t epoch = begin_moe_call(p.m, 0);
  if (!Nodes && threadIdx.x < 32) {
    if (blockIdx.x == 0) publish_to_all(p.m.meet, epoch);
    await_all(p.m.meet, epoch);
  }
  __syncthreads();
  if (p.weights != nullptr) {
    const std::int64_t tokens = std::int64_t{s.num_nodes} * s.max_tokens;
    const std::int64_t there = (s.rank - s.first_rank) * tokens * s.topk;
    const std::int64_t count = (Nodes ? tokens : s.num_tokens) * s.topk;
    for (std::int64_t i = std::int64_t{blockIdx.x} * route_threads + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * route_threads) {
      copy_weight(p.out_weights, p.weights, i, i, p.weight_bytes);
      const std::int64_t place = p.places[i];
      if (place < 0) continue;
      std::byte* const to = p.sent_weights[s.first_rank + (place >> place_dst_shift & 0xFFFF)];
      copy_weight(to, p.weights, there + i, i, p.weight_bytes);
    }
  }
  if (comes_last(p.m.state)) end_moe_call(p.m, 0, epoch);
}

/// An empty call, if the last dispatch or combine had the turn of the next one.
__global__ void __launch_bounds__(32)
    realign_moe_kernel(const __grid_constant__ MoeMeet m, MoeTurns next) {
  bool off = false;
  for (int kind = 0; kind < 2; ++kind) off = off || is_off_turn(m, kind, next.of[kind]);
  if (!off) return;
  const std::uint64_t epoch = m.state->call.epoch + 1;
  publish_to_all(m.meet, epoch);
  await_all(m.meet, epoch);
  if (threadIdx.x != 0) return;
  for (int kind = 0; kind < 2; ++kind) m.state->last_turn[kind] = 2 - next.of[kind];
  end_call(m.meet, epoch);
}

constexpr int most_shared_bytes = 200 * 1024;

/// Warps of a block that have a tile each: as many as have room for their counts.
int tile_warps_of(const MoeShape& s) {
  const int room = most_shared_bytes / 4 - 2 * s.num_experts - num_counts(s);
  const int fit = room / num_counts(s);
  return fit < route_warps ? fit : route_warps;
}

}  // namespace

int max_experts_on_gpu(int world_size) {
  return (most_shared_bytes / 4 - 2 * (1 + world_size)) / 4;
}

int route_blocks(const MoeShape& shape, int num_sms) {
  constexpr std::int64_t choices_a_block = 1024;
  const bool nodes = shape.num_nodes > 1;
  const std::int64_t tokens = nodes ? shape.max_tokens : shape.num_tokens;
  const std::int64_t most = nodes ? num_sms / shape.num_nodes : num_sms;
  const std::int64_t wanted = (tokens * shape.topk + choices_a_block - 1) / choices_a_block;
  return static_cast<int>(std::max<std::int64_t>(1, std::min(wanted, most)));
}

namespace {

template <bool Nodes>
cudaError_t prepare_route_for() {
  cudaFuncAttributes unused{};
  for (const void* kernel : {reinterpret_cast<const void*>(enter_kernel<Nodes>),
                             reinterpret_cast<const void*>(realign_moe_kernel)}) {
    const cudaError_t status = cudaFuncGetAttributes(&unused, kernel);
    if (status != cudaSuccess) return status;
  }
  int device = 0;
  int most = 0;
  (void)cudaGetDevice(&device);
  (void)cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return cudaFuncSetAttribute(route_kernel<Nodes>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              most - 4096 < most_shared_bytes ? most - 4096 : most_shared_bytes);
}

}  // namespace

cudaError_t prepare_route(bool nodes) {
  return nodes ? prepare_route_for<true>() : prepare_route_for<false>();
}

cudaError_t launch_route(const RouteParams& params, int blocks, cudaStream_t stream) {
  const int tile_warps = tile_warps_of(params.shape);
  const int counts = num_counts(params.shape);
  int words = (tile_warps + 1) * counts + 2 * params.shape.num_experts;
  const bool keeps_counts =
      words + std::int64_t{params.shape.world_size} * counts <= most_shared_bytes / 4;
  if (keeps_counts) words += params.shape.world_size * counts;
  const bool nodes = params.shape.num_nodes > 1;
  const auto kernel = nodes ? route_kernel<true> : route_kernel<false>;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(params.shape.num_nodes));
  kernel<<<grid, route_threads, static_cast<std::size_t>(words) * 4, stream>>>(params, tile_warps,
                                                                               keeps_counts);
  return cudaGetLastError();
}

cudaError_t launch_realign(const MoeMeet& meet, MoeTurns next, cudaStream_t stream) {
  realign_moe_kernel<<<1, 32, 0, stream>>>(meet, next);
  return cudaGetLastError();
}

cudaError_t launch_enter(const RouteParams& params, int blocks, cudaStream_t stream) {
  const auto kernel = params.shape.num_nodes > 1 ? enter_kernel<true> : enter_kernel<false>;
  kernel<<<static_cast<unsigned>(blocks), route_threads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
