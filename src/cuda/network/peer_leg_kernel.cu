#include "leg_kernel.cuh"
#include "peer_leg_kernel.h"

namespace waybill::cuda {
namespace {

/// Copies, by all threads of a block.
template <class Word>
__device__ void copy_words(std::byte* to, const std::byte* from, std::int64_t bytes) {
  constexpr int unroll = 8;
  const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(Word));
  const auto* const source = reinterpret_cast<const Word*>(from);
  auto* const target = reinterpret_cast<Word*>(to);
  for (std::int64_t first = threadIdx.x; first < count; first += leg_threads * unroll) {
    Word words[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (first + u * leg_threads < count) words[u] = source[first + u * leg_threads];
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (first + u * leg_threads < count) target[first + u * leg_threads] = words[u];
    }
  }
}

class PeerWire {
 public:
  __device__ PeerWire(const LegParams& p, const PeerAddresses& peers) : p_(p), peers_(peers) {}

  __device__ void put(const NetworkPut& put) {
    const std::byte* const from = p_.window + put.from_bytes;
    std::byte* const to = peers_.windows[put.peer] + put.to_bytes;
    const auto bits = static_cast<unsigned>(put.from_bytes | put.to_bytes | put.size_bytes);
    if (bits % 16 == 0) {
      copy_words<uint4>(to, from, put.size_bytes);
    } else if (bits % 4 == 0) {
      copy_words<std::uint32_t>(to, from, put.size_bytes);
    } else {
      copy_words<std::uint8_t>(to, from, put.size_bytes);
    }
  }
  __device__ void settle() {
    __threadfence_system();
    __syncthreads();
  }
  __device__ void raise_slot(std::int32_t peer, std::int32_t slot, std::uint64_t epoch) {
    publish(peers_.slots[peer] + slot, epoch);
  }
  __device__ void tell_words(std::int32_t peer, const CallWords& words, std::uint64_t epoch) {
    std::uint64_t* const arrivals = peers_.arrivals[peer] - p_.rank;
    store_words(words_at(arrivals, p_.fingerprint, p_.world_size, epoch, p_.rank), words, epoch);
  }
  __device__ void raise_arrival(std::int32_t peer, std::uint64_t epoch) {
    store_behind_fence(peers_.arrivals[peer], epoch);
  }
  __device__ bool put_signal(const NetworkPut& /*put*/, std::int32_t /*slot*/,
                             std::uint64_t /*epoch*/) {
    return false;
  }

 private:
  const LegParams& p_;
  const PeerAddresses& peers_;
};

__global__ void __launch_bounds__(leg_threads)
    peer_leg_kernel(const __grid_constant__ LegParams p,
                    const __grid_constant__ PeerAddresses peers) {
  PeerWire wire(p, peers);
  run_leg(p, wire);
}

}  // namespace

cudaError_t prepare_peer_leg() {
  cudaFuncAttributes unused{};
  return cudaFuncGetAttributes(&unused, peer_leg_kernel);
}

cudaError_t launch_peer_leg(const LegParams& params, const PeerAddresses& peers, int num_sms,
                            cudaStream_t stream) {
  peer_leg_kernel<<<static_cast<unsigned>(num_sms), leg_threads, 0, stream>>>(params, peers);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
