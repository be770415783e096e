#include <algorithm>

#include "early.h"
#include "launch.h"
#include "place_tile.cuh"

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
                 [&](std::int32_t e) { return scratch.shares[e]; });
  CallComparison comparison(p.m.arrive, epoch, compares);
  write_receiver_tables(p, scratch);
  if (compares) comparison.settle(p.m.arrive);
  write_tables<S>(p, scratch);
  if (block_idx() == 0 && threadIdx.x < 32) report_to_host(p, scratch);
  if (comes_last(p.m.state)) end_moe_call(p.m, 0, epoch);
}

template <bool Nodes>
__global__ void __launch_bounds__(enter_threads)
    enter_kernel(const __grid_constant__ EnterParams p) {
  const MoeShape& s = p.shape;
  wait_earlier_kernel();
  const std::uint64_t epoch = begin_moe_call(p.m, 0);
  let_next_begin(p.m, epoch);
  if (!Nodes) arrive_and_wait(p.m.arrive, epoch);  // the kernel behind compares
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
  if (comes_last(p.m.state)) end_moe_call(p.m, 0, epoch);
}

/// An empty call, if the last dispatch or combine had the parity of the next one.
__global__ void __launch_bounds__(32)
    realign_moe_kernel(const __grid_constant__ MoeArrive m, MoeParities next) {
  bool off = false;
  for (int kind = 0; kind < 2; ++kind) off = off || is_off_parity(m, kind, next.of[kind]);
  if (!off) return;
  const std::uint64_t epoch = m.state->call.epoch + 1;
  signal_to_all(m.arrive, epoch);
  wait_all(m.arrive, epoch);
  if (threadIdx.x != 0) return;
  for (int kind = 0; kind < 2; ++kind) m.state->last_parity[kind] = 2 - next.of[kind];
  end_call(m.arrive, epoch);
}

}  // namespace

/// With one warp that has a tile, on one node.
int max_experts_on_gpu(int world_size) {
  MoeShape shape{};
  shape.world_size = world_size;
  shape.node_ranks = world_size;
  return (most_route_bytes() / 4 - table_words(shape) - 2 * (1 + world_size)) / 4;
}

int route_blocks(const MoeShape& shape, int num_sms) {
  constexpr std::int64_t slots_per_block = 1024;
  const bool nodes = shape.num_nodes > 1;
  const std::int64_t tokens = nodes ? shape.max_tokens : shape.num_tokens;
  const std::int64_t most = nodes ? num_sms / shape.num_nodes : num_sms;
  const std::int64_t wanted = (tokens * shape.topk + slots_per_block - 1) / slots_per_block;
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
  constexpr Span span = Nodes ? Span::nodes : Span::rank;
  return allow_route_memory(route_kernel<span>);
}

}  // namespace

cudaError_t prepare_route(bool nodes) {
  return nodes ? prepare_route_for<true>() : prepare_route_for<false>();
}

cudaError_t launch_route(const RouteParams& params, int blocks, cudaStream_t stream) {
  const int tile_warps = tile_warps_of(params.shape);
  const bool keeps_counts = scratch_words(params.shape, tile_warps, true) <= most_route_bytes() / 4;
  const std::int64_t words = scratch_words(params.shape, tile_warps, keeps_counts);
  const bool nodes = params.shape.num_nodes > 1;
  const auto kernel = nodes ? route_kernel<Span::nodes> : route_kernel<Span::rank>;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(params.shape.num_nodes));
  kernel<<<grid, route_threads, static_cast<std::size_t>(words) * 4, stream>>>(params, tile_warps,
                                                                               keeps_counts);
  return cudaGetLastError();
}

cudaError_t launch_realign(const MoeArrive& arrive, MoeParities next, cudaStream_t stream) {
  realign_moe_kernel<<<1, 32, 0, stream>>>(arrive, next);
  return cudaGetLastError();
}

cudaError_t launch_enter(const EnterParams& params, int blocks, bool early, cudaStream_t stream) {
  const auto kernel = params.shape.num_nodes > 1 ? enter_kernel<true> : enter_kernel<false>;
  return launch_kernel(kernel, static_cast<unsigned>(blocks), enter_threads, 0, early, stream,
                       params);
}

}  // namespace waybill::cuda
