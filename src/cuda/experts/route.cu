#include <algorithm>

#include "kernels.h"
#include "placement.cuh"

namespace waybill::cuda {
namespace {

constexpr int enter_threads = 512;

template <Span S>
__global__ void __launch_bounds__(route_threads, 1)
    route_kernel(const __grid_constant__ RouteParams p, int tile_warps, bool keeps_counts) {
  extern __shared__ __align__(16) std::int32_t shared[];
  const MoeShape& s = p.shape;
  const Scratch scratch = scratch_in(shared, s, tile_warps, keeps_counts);
  const std::uint64_t epoch = begin_moe_call(p.m, 0);
  const bool compares =
      S == Span::rank && compares_calls();  // several nodes have synchronized before
  let_next_begin(p.m, epoch);
  if (compares) {
    const CallWords words = load_call_words(p.m.arrive.fingerprint);
    send_call_words(p.m.arrive, epoch, words);
  }
  const RoutePart part = part_of<S>(p);
  count_block<S>(p, part, scratch, tile_warps);
  send_counts(p, part, scratch, epoch);
  take_counts(p, part, scratch, epoch);
  __syncthreads();
  end_if_reported(p.m.arrive.sink);
  const bool overflows = locate_experts(p, part, scratch);
  if (p.scatter != nullptr) locate_positions(p, scratch);
  place_block<S>(p, part, scratch, tile_warps, overflows,
                 [&](std::int32_t e) { return scratch.block_counts[e]; });
  CallComparison comparison(p.m.arrive, epoch, compares);
  write_receiver_tables(p, scratch);
  if (compares) comparison.settle(p.m.arrive);
  write_tables<S>(p, scratch);
  if (block_idx() == 0 && threadIdx.x < 32) report_to_host(p, scratch);
  if (is_last_block(p.m.state)) end_moe_call(p.m, 0, epoch);
}

template <bool Nodes>
__global__ void __launch_bounds__(enter_threads)
    enter_kernel(const __grid_constant__ EnterParams p) {
  const MoeShape& s = p.shape;
  wait_earlier_kernel();
  const std::uint64_t epoch = begin_moe_call(p.m, 0);
  let_next_begin(p.m, epoch);
  if (!Nodes) arrive_and_wait(p.m.arrive, epoch);  // the kernel that follows compares call words
  if (p.weights != nullptr) {
    const std::int64_t tokens = std::int64_t{s.num_nodes} * s.max_tokens;
    const std::int64_t first_slot = (s.rank - s.first_rank) * tokens * s.topk;
    const std::int64_t count = (Nodes ? tokens : s.num_tokens) * s.topk;
    for (std::int64_t i = std::int64_t{blockIdx.x} * enter_threads + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * enter_threads) {
      copy_weight(p.out_weights, p.weights, i, i, p.weight_bytes);
      const std::int64_t address = p.addresses[i];
      if (address < 0) continue;
      const auto rank = static_cast<std::int32_t>(address >> address_dst_shift & 0xFFFF);
      copy_weight(peer_at(p.sent_weights, rank), p.weights, first_slot + i, i, p.weight_bytes);
    }
  }
  if (is_last_block(p.m.state)) end_moe_call(p.m, 0, epoch);
}

/// Makes an empty call if the last dispatch or combine had the parity of the next one.
__global__ void __launch_bounds__(32)
    realign_moe_kernel(const __grid_constant__ MoeArrive m, std::uint32_t next_dispatch,
                       std::uint32_t next_combine) {
  const std::uint32_t next[2] = {next_dispatch, next_combine};
  bool off = false;
  for (int kind = 0; kind < 2; ++kind) off = off || is_off_parity(m, kind, next[kind]);
  if (!off) return;
  const std::uint64_t epoch = m.state->call.epoch + 1;
  signal_to_all(m.arrive, epoch);
  wait_all(m.arrive, epoch);
  if (threadIdx.x != 0) return;
  for (int kind = 0; kind < 2; ++kind) m.state->last_parity[kind] = 2 - next[kind];
  end_call(m.arrive, epoch);
}

}  // namespace

/// This holds for one node and one warp that counts.
int max_experts_on_gpu(int world_size) {
  MoeShape shape{};
  shape.world_size = world_size;
  shape.node_ranks = world_size;
  return (max_route_bytes() / 4 - table_words(shape) - 2 * (1 + world_size)) / 4;
}

int route_blocks(const MoeShape& shape, int num_sms) {
  constexpr std::int64_t slots_per_block = 1024;
  const bool nodes = shape.num_nodes > 1;
  const std::int64_t tokens = nodes ? shape.max_tokens : shape.num_tokens;
  const std::int64_t max_blocks = nodes ? num_sms / shape.num_nodes : num_sms;
  const std::int64_t wanted = (tokens * shape.topk + slots_per_block - 1) / slots_per_block;
  return static_cast<int>(std::max<std::int64_t>(1, std::min(wanted, max_blocks)));
}

namespace {

template <bool Nodes>
cudaError_t prepare_route_for() {
  const cudaError_t status = load_kernels(enter_kernel<Nodes>, realign_moe_kernel);
  if (status != cudaSuccess) return status;
  constexpr Span span = Nodes ? Span::nodes : Span::rank;
  return allow_route_memory(route_kernel<span>);
}

}  // namespace

cudaError_t prepare_route(bool nodes) {
  return nodes ? prepare_route_for<true>() : prepare_route_for<false>();
}

cudaError_t launch_route(const RouteParams& params, int blocks, cudaStream_t stream) {
  const int tile_warps = tile_warps_of(params.shape);
  const bool keeps_counts = scratch_words(params.shape, tile_warps, true) <= max_route_bytes() / 4;
  const std::int64_t words = scratch_words(params.shape, tile_warps, keeps_counts);
  const bool nodes = params.shape.num_nodes > 1;
  const auto kernel = nodes ? route_kernel<Span::nodes> : route_kernel<Span::rank>;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(params.shape.num_nodes));
  kernel<<<grid, route_threads, static_cast<std::size_t>(words) * 4, stream>>>(params, tile_warps,
                                                                               keeps_counts);
  return cudaGetLastError();
}

cudaError_t launch_realign(const MoeArrive& arrive, std::uint32_t next_dispatch,
                           std::uint32_t next_combine, cudaStream_t stream) {
  realign_moe_kernel<<<1, 32, 0, stream>>>(arrive, next_dispatch, next_combine);
  return cudaGetLastError();
}

cudaError_t launch_enter(const EnterParams& params, int blocks, bool early, cudaStream_t stream) {
  const auto kernel = params.shape.num_nodes > 1 ? enter_kernel<true> : enter_kernel<false>;
  return launch_kernel(kernel, static_cast<unsigned>(blocks), enter_threads, 0, early, stream,
                       params);
}

// The low-latency route: each rank sends its ids to all ranks, which then count and place the
// tokens of all ranks by themselves.

namespace {

/// Ids that a thread loads at once.
constexpr int ids_together = 8;

/// The words for weights of topk slots, which follow the ids of all ranks.
__device__ std::uint64_t* weight_words(const RouteParams& p, std::uint64_t* gathered) {
  const MoeShape& s = p.shape;
  return gathered + std::int64_t{s.world_size} * s.max_tokens * s.topk;
}

/// Sends this rank's ids and weights to the ranks that this block serves. The id is -1 where there
/// is no token.
__device__ void send_ids(const RouteParams& p, std::uint64_t epoch) {
  const MoeShape& s = p.shape;
  const std::int32_t all = s.max_tokens * s.topk;
  const std::int64_t first = std::int64_t{s.rank} * all;
  for (auto k = static_cast<std::int32_t>(block_idx()); k < s.world_size;
       k += static_cast<std::int32_t>(num_blocks())) {
    auto* const gathered =
        reinterpret_cast<std::uint64_t*>(peer_at(p.peers, rank_after(s, k)) + p.gathered);
    bool bad = false;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < all; i += route_threads) {
      const std::int32_t id = id_to_send(s, p.ids, p.wide_ids, p.dropped_id, i, bad);
      if (bad) report_bad_id(p, p.m.arrive.sink, p.m.state);
      if (id >= 0 && p.weights != nullptr) {
        const std::uint32_t bits = load_weight(p.weights, i, p.weight_bytes);
        store_flagged(weight_words(p, gathered) + first + i, static_cast<std::int32_t>(bits),
                      epoch);
      }
      store_flagged(gathered + first + i, id, epoch);
    }
  }
}

/// Waits for the ids of all ranks. The id is -1 where there is no token.
__device__ void take_ids(const RouteParams& p, std::int32_t* ids, std::uint64_t epoch) {
  constexpr std::int32_t missing = -2;
  const MoeShape& s = p.shape;
  const std::int32_t of_rank = s.max_tokens * s.topk;
  const std::int32_t all = s.world_size * of_rank;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::uint64_t* const words = p.own_gathered;
  for (std::int32_t first = thread; first < all; first += route_threads * ids_together) {
    std::uint64_t seen[ids_together] = {};
#pragma unroll
    for (int k = 0; k < ids_together; ++k) {
      const std::int32_t i = first + k * route_threads;
      if (i < all) seen[k] = load_word(words + i);
    }
#pragma unroll
    for (int k = 0; k < ids_together; ++k) {
      const std::int32_t i = first + k * route_threads;
      if (i < all)
        ids[i] = is_flagged(seen[k], epoch) ? static_cast<std::int32_t>(seen[k]) : missing;
    }
  }
  for (std::int32_t i = thread; i < all; i += route_threads) {
    if (ids[i] != missing) continue;
    ids[i] = wait_flagged(p, i / of_rank, words + i, epoch);
  }
}

__device__ RoutePart part_of_source(const RouteParams& p, const std::int32_t* ids,
                                    std::int32_t source) {
  const MoeShape& s = p.shape;
  const std::int64_t token = std::int64_t{source} * s.max_tokens;
  return {source, s.max_tokens,  ids + token * s.topk,
          false,  s.num_experts, source == s.rank ? p.weights : nullptr,
          0,      token};
}

/// Writes the weights of a source to where receivers look for them.
__device__ void take_weights(const RouteParams& p, const std::int32_t* ids, std::int32_t source,
                             std::uint64_t epoch) {
  const MoeShape& s = p.shape;
  const std::int32_t all = s.max_tokens * s.topk;
  const std::int64_t first = std::int64_t{source} * all;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < all; i += route_threads) {
    if (ids[first + i] < 0) continue;
    const std::int32_t bits =
        wait_flagged(p, source, weight_words(p, p.own_gathered) + first + i, epoch);
    store_weight(p.own_sent_weights, first + i, p.weight_bytes, static_cast<std::uint32_t>(bits));
  }
}

/// Counts the topk slots of each rank except the part's source.
__device__ void count_ranks(const RouteParams& p, const RoutePart& part, const std::int32_t* ids,
                            std::int32_t* counts) {
  const MoeShape& s = p.shape;
  const Tile tile = tile_of(s, part, static_cast<int>(threadIdx.x / 32), route_warps);
  for (std::int32_t r = 0; r < s.world_size; ++r) {
    if (r == part.source) continue;
    std::int32_t* const own = counts + r * num_counts(s);
    (void)count_tile<Span::world>(s, part_of_source(p, ids, r), tile,
                                  [&](std::int32_t i) { atomicAdd(&own[i], 1); });
  }
}

/// Sums the topk slots of each expert. @pre all ranks are counted
__device__ void add_ranks(const RouteParams& p, const RoutePart& part, const Scratch& scratch) {
  const std::int32_t n = num_counts(p.shape);
  add_counts<4>(
      p, part, scratch, [&](std::int32_t r, std::int32_t e) { return scratch.counts[r * n + e]; },
      [](std::int32_t /*r*/, std::int32_t /*e*/, std::int32_t own) { return own; });
}

/// Signals receivers that the sources of this block are placed.
__device__ void signal_placed(const RouteParams& p, std::uint64_t epoch) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  linger(p.m, DelayPoint::placed, epoch * num_blocks() + block_idx());
  __threadfence();
  for (auto source = static_cast<std::int32_t>(block_idx()); source < p.shape.world_size;
       source += static_cast<std::int32_t>(num_blocks())) {
    store_relaxed(placed_slot(p.m.state, source), epoch);
  }
}

/// Each block places some of the sources, and does not depend on the others.
__global__ void __launch_bounds__(route_threads, 1)
    low_latency_route_kernel(const __grid_constant__ RouteParams p, int tile_warps) {
  extern __shared__ __align__(16) std::int32_t shared[];
  const MoeShape& s = p.shape;
  const std::int32_t n = num_counts(s);
  const Scratch scratch = scratch_in(shared, s, tile_warps, true);
  wait_earlier_kernel();
  const std::uint64_t epoch = begin_moe_call(p.m, 0);
  std::int32_t* const ids = scratch.counts + s.world_size * n;
  const bool compares = compares_calls();
  let_next_begin(p.m, epoch);
  send_ids(p, epoch);
  if (compares) {
    send_call_words(p.m.arrive, epoch, load_call_words(p.m.arrive.fingerprint));
  }
  clear_counts(scratch.counts, s.world_size * n);  // the ids are in flight meanwhile
  clear_counts(scratch.cursors, tile_warps * n);
  take_ids(p, ids, epoch);
  __syncthreads();
  end_if_reported(p.m.arrive.sink);
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const auto first = static_cast<std::int32_t>(block_idx());
  count_ranks(p, part_of_source(p, ids, first), ids, scratch.counts);
  for (std::int32_t source = first; source < s.world_size;
       source += static_cast<std::int32_t>(num_blocks())) {
    const RoutePart part = part_of_source(p, ids, source);
    std::int32_t* const cursors = scratch.cursors + warp * n;
    if (source != first) {
      clear_counts(scratch.cursors, tile_warps * n);
      __syncthreads();
    }
    if (warp < tile_warps) {
      std::int32_t* const also = source == first ? scratch.counts + source * n : nullptr;
      (void)count_tile<Span::world>(s, part, tile_of(s, part, warp, tile_warps),
                                    [&](std::int32_t i) {
                                      atomicAdd(&cursors[i], 1);
                                      if (also != nullptr) atomicAdd(&also[i], 1);
                                    });
    }
    __syncthreads();
    add_ranks(p, part, scratch);
    const bool overflows = locate_experts(p, part, scratch);
    if (p.scatter != nullptr) locate_positions(p, scratch);
    if (source == first) write_receiver_tables(p, scratch);
    place_block<Span::world>(p, part, scratch, tile_warps, overflows,
                             [](std::int32_t /*e*/) { return 0; });
    if (p.takes_weights) take_weights(p, ids, source, epoch);
    __syncthreads();
  }
  CallComparison id(p.m.arrive, epoch, compares);
  signal_placed(p, epoch);
  write_tables<Span::world>(p, scratch);
  if (block_idx() == 0 && threadIdx.x < 32) report_to_host(p, scratch);
  if (compares) id.settle(p.m.arrive);
  if (is_last_block(p.m.state)) end_moe_call(p.m, 0, epoch);
}

std::int64_t num_topk_slots(const MoeShape& s) {
  return std::int64_t{s.world_size} * s.max_tokens * s.topk;
}

/// Warps that have space in shared memory besides the counts and ids of all ranks.
int low_latency_tile_warps(const MoeShape& s) {
  return tile_warps_of(s, static_cast<int>(s.world_size * num_counts(s) + num_topk_slots(s)));
}

}  // namespace

bool low_latency_route_fits(const MoeShape& shape) {
  return shape.max_tokens <= max_low_latency_tokens && shape.num_nodes == 1 &&
         shape.world_size > 1 && low_latency_tile_warps(shape) >= 1;
}

cudaError_t prepare_low_latency_route() { return allow_route_memory(low_latency_route_kernel); }

int low_latency_route_blocks(const MoeShape& shape, int num_sms) {
  return std::min(shape.world_size, num_sms);
}

cudaError_t launch_low_latency_route(const RouteParams& params, int blocks, bool early,
                                     cudaStream_t stream) {
  const MoeShape& s = params.shape;
  const int tile_warps = low_latency_tile_warps(s);
  const std::int64_t words = scratch_words(s, tile_warps, true) + num_topk_slots(s);
  const dim3 grid(1, static_cast<unsigned>(blocks));
  return launch_kernel(low_latency_route_kernel, grid, route_threads,
                       static_cast<std::size_t>(words) * 4, early, stream, params, tile_warps);
}

}  // namespace waybill::cuda
