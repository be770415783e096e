// What goes between nodes, to the ranks of the same local index and back.

#include "meet.cuh"
#include "nodes_launch.h"

namespace waybill::cuda {
namespace {

constexpr unsigned all_lanes = 0xFFFFFFFFU;
constexpr int warps = 16;

__device__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }

__global__ void __launch_bounds__(32)
    meet_nodes_kernel(const __grid_constant__ MoeMeet m, int kind) {
  const std::uint64_t epoch = begin_moe_call(m, kind);
  publish_to_all(m.meet, epoch);
  await_all(m.meet, epoch);
}

template <class Word>
__device__ void copy_words(std::byte* to, const std::byte* from, std::int64_t bytes) {
  constexpr int unroll = 4;
  const auto count = static_cast<int>(bytes / static_cast<int>(sizeof(Word)));
  for (int first = lane_id(); first < count; first += 32 * unroll) {
    Word words[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (first + u * 32 < count) words[u] = reinterpret_cast<const Word*>(from)[first + u * 32];
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (first + u * 32 < count) reinterpret_cast<Word*>(to)[first + u * 32] = words[u];
    }
  }
}

/// A row to a peer's board. One warp.
__device__ void put(const PeerWire& wire, std::int32_t node, std::int64_t to, const std::byte* from,
                    std::int64_t bytes, std::int32_t word_bytes) {
  std::byte* const there = wire.boards[node] + to;
  switch (word_bytes) {
    case 16:
      return copy_words<uint4>(there, from, bytes);
    case 8:
      return copy_words<uint2>(there, from, bytes);
    case 4:
      return copy_words<std::uint32_t>(there, from, bytes);
    case 2:
      return copy_words<std::uint16_t>(there, from, bytes);
    default:
      return copy_words<std::uint8_t>(there, from, bytes);
  }
}

/// Tells a peer that all of this rank's puts to it have arrived. @pre they have
__device__ void raise(const PeerWire& wire, std::int32_t node, std::int32_t rank,
                      std::uint64_t epoch) {
  publish(wire.signals[node] + rank, epoch);
}

/// Whether row `row` goes to `node`. One warp.
__device__ bool goes(const ExchangeParams& p, std::int32_t own, std::int32_t node,
                     std::int64_t row) {
  if (p.filter == NodeFilter::all) return true;
  const MoeShape& s = p.shape;
  const std::int64_t slice = p.filter == NodeFilter::shares ? node : 0;
  const std::int32_t wanted = p.filter == NodeFilter::shares ? own : node;
  std::int32_t there = -1;
  if (lane_id() < s.topk) {
    const std::int32_t id = p.ids[(slice * s.max_tokens + row) * s.topk + lane_id()];
    if (id >= 0) there = id / (s.experts_per_rank * s.node_ranks);
  }
  return __any_sync(all_lanes, there == wanted);
}

template <class Wire>
__device__ void send_array(const ExchangeParams& p, const Wire& wire, const NodeArray& array,
                           std::int32_t own) {
  const std::int32_t others = p.shape.num_nodes - 1;
  const std::int64_t rows = (array.total_bytes + array.row_bytes - 1) / array.row_bytes;
  const std::int64_t step = std::int64_t{gridDim.x} * warps;
  for (std::int64_t i = blockIdx.x + std::int64_t{threadIdx.x / 32} * gridDim.x; i < rows * others;
       i += step) {
    const std::int64_t row = i / others;
    const auto node =
        static_cast<std::int32_t>((own + 1 + i % others) % std::int64_t{p.shape.num_nodes});
    if (!goes(p, own, node, row)) continue;
    const std::int64_t offset = row * array.row_bytes;
    const std::int64_t left = array.total_bytes - offset;
    put(wire, node, array.to + offset, array.from + node * array.from_node_bytes + offset,
        left < array.row_bytes ? left : array.row_bytes, array.word_bytes);
  }
}

template <class Wire>
__global__ void __launch_bounds__(warps * 32)
    exchange_kernel(const __grid_constant__ ExchangeParams p, const __grid_constant__ Wire wire) {
  const MoeShape& s = p.shape;
  const std::uint64_t epoch = p.m.state->call.epoch + (p.is_first ? 1 : 0);
  const std::int32_t own = s.first_rank / s.node_ranks;
  for (std::int32_t a = 0; a < p.num_arrays; ++a) send_array(p, wire, p.arrays[a], own);
  __threadfence_system();
  if (!comes_last(p.m.state)) return;
  p.m.state->call.blocks = 0;
  __threadfence_system();
  for (std::int32_t k = 1; k < s.num_nodes; ++k) {
    raise(wire, (own + k) % s.num_nodes, s.rank, epoch);
  }
  for (std::int32_t k = 1; k < s.num_nodes; ++k) {
    const std::int32_t node = (own + s.num_nodes - k) % s.num_nodes;
    const std::int32_t peer = node * s.node_ranks + s.rank - s.first_rank;
    await(p.own_signals + peer, epoch, p.m.meet.kind, s.rank, peer, p.m.meet.sink);
  }
}

}  // namespace

cudaError_t launch_meet_nodes(const MoeMeet& meet, int kind, cudaStream_t stream) {
  meet_nodes_kernel<<<1, 32, 0, stream>>>(meet, kind);
  return cudaGetLastError();
}

cudaError_t launch_exchange(const ExchangeParams& params, const PeerWire& wire, int blocks,
                            cudaStream_t stream) {
  exchange_kernel<<<static_cast<unsigned>(blocks), warps * 32, 0, stream>>>(params, wire);
  return cudaGetLastError();
}

cudaError_t prepare_exchange() {
  cudaFuncAttributes unused{};
  const cudaError_t status = cudaFuncGetAttributes(&unused, meet_nodes_kernel);
  if (status != cudaSuccess) return status;
  return cudaFuncGetAttributes(&unused, exchange_kernel<PeerWire>);
}

}  // namespace waybill::cuda
