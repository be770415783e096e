#include "expert_rows.cuh"
#include "launch.h"

namespace waybill::cuda {
namespace {

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
    p.out_ids[i] = c.expert;
    p.dst_rows[i] = sent;
    p.places[i] =
        live ? (std::int64_t{c.dst} << place_dst_shift) + sent + (first ? place_leader_bit : 0)
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
  count_block(p, scratch, tile_warps);
  tell_counts(p, scratch, epoch);
  take_counts(p, scratch, epoch);
  __syncthreads();
  locate_experts(p, scratch, totals);
  if (p.scatter != nullptr) locate_positions(p, scratch, totals);
  for (int e = static_cast<int>(threadIdx.x); e < n; e += route_threads) {
    const std::int32_t base = e < s.num_experts   ? scratch.starts[e] + scratch.before[e]
                              : e > s.num_experts ? totals.compact_base[e - s.num_experts - 1]
                                                  : 0;
    for (int w = 0; w < tile_warps; ++w) scratch.cursors[w * n + e] += base + scratch.shares[e];
  }
  __syncthreads();
  const auto warp = static_cast<int>(threadIdx.x / 32);
  if (warp < tile_warps) {
    place_tile(p, tile_of(s, warp, tile_warps), scratch.cursors + warp * n, totals);
  }
  write_tables(p, scratch, totals);
  if (blockIdx.x == 0 && warp == 0) tell_host(p, totals);
  if (comes_last(p.m.state)) end_moe_call(p.m, 0, epoch);
}

/// A dispatch with the tables of an earlier one: meets the others, sends new weights.
__global__ void __launch_bounds__(route_threads)
    enter_kernel(const __grid_constant__ RouteParams p) {
  const MoeShape& s = p.shape;
  let_next_begin();
  const std::uint64_t epoch = begin_moe_call(p.m, 0);
  if (threadIdx.x < 32) {
    if (blockIdx.x == 0) publish_to_all(p.m.meet, epoch);
    await_all(p.m.meet, epoch);
  }
  __syncthreads();
  if (p.weights != nullptr) {
    const std::int64_t there = std::int64_t{s.rank} * s.max_tokens * s.topk;
    const std::int64_t count = std::int64_t{s.num_tokens} * s.topk;
    for (std::int64_t i = std::int64_t{blockIdx.x} * route_threads + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * route_threads) {
      copy_weight(p.out_weights, p.weights, i, p.weight_bytes);
      const std::int64_t place = p.places[i];
      if (place < 0) continue;
      std::byte* const to = p.sent_weights[place >> place_dst_shift & 0xFFFF];
      copy_weight(to + there * p.weight_bytes, p.weights, i, p.weight_bytes);
    }
  }
  if (comes_last(p.m.state)) end_moe_call(p.m, 0, epoch);
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
  const int counts = num_counts(params.shape);
  int words = (tile_warps + 1) * counts + 2 * params.shape.num_experts;
  const bool keeps_counts =
      words + std::int64_t{params.shape.world_size} * counts <= most_shared_bytes / 4;
  if (keeps_counts) words += params.shape.world_size * counts;
  route_kernel<<<static_cast<unsigned>(blocks), route_threads, static_cast<std::size_t>(words) * 4,
                 stream>>>(params, tile_warps, keeps_counts);
  return cudaGetLastError();
}

cudaError_t launch_enter(const RouteParams& params, int blocks, cudaStream_t stream) {
  enter_kernel<<<static_cast<unsigned>(blocks), route_threads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
