#include "../device/peers.cuh"
#include "../device/word_copy.cuh"
#include "path_kernel.cuh"
#include "peer_path_kernel.h"

namespace waybill::cuda {
namespace {

/// Copies, by all threads of a block.
template <class Word>
__device__ void copy_words(std::byte* to, const std::byte* from, std::int64_t bytes) {
  constexpr int unroll = 8;
  const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(Word));
  const auto* const source = reinterpret_cast<const Word*>(from);
  auto* const target = reinterpret_cast<Word*>(to);
  for (std::int64_t first = threadIdx.x; first < count; first += path_threads * unroll) {
    Word words[unroll];
    load_batch<path_threads>(words, source, first, count);
    store_batch<path_threads>(target, words, first, count);
  }
}

class PeerBackend {
 public:
  __device__ PeerBackend(const PathParams& p, const PeerAddresses& peers) : p_(p), peers_(peers) {}

  __device__ void put(const NetworkPut& put) {
    const std::byte* const from = p_.window + put.from_bytes;
    std::byte* const to = peer_at(peers_.windows, put.peer) + put.to_bytes;
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
    signal(peer_at(peers_.slots, peer) + slot, epoch);
  }
  __device__ void send_call_words(std::int32_t peer, const CallWords& words, std::uint64_t epoch) {
    std::uint64_t* const arrivals = peer_at(peers_.arrivals, peer);
    store_words(words_at(arrivals, p_.fingerprint, p_.world_size, epoch, p_.rank), words, epoch);
  }
  __device__ void raise_arrival(std::int32_t peer, std::uint64_t epoch) {
    store_behind_fence(peer_at(peers_.arrivals, peer) + p_.rank, epoch);
  }
  __device__ bool put_signal(const NetworkPut& /*put*/, std::int32_t /*slot*/,
                             std::uint64_t /*epoch*/) {
    return false;
  }

 private:
  const PathParams& p_;
  const PeerAddresses& peers_;
};

__global__ void __launch_bounds__(path_threads)
    peer_path_kernel(const __grid_constant__ PathParams p,
                     const __grid_constant__ PeerAddresses peers) {
  PeerBackend backend(p, peers);
  run_path(p, backend);
}

}  // namespace

cudaError_t prepare_peer_path() {
  cudaFuncAttributes unused{};
  return cudaFuncGetAttributes(&unused, peer_path_kernel);
}

cudaError_t launch_peer_path(const PathParams& params, const PeerAddresses& peers, int num_sms,
                             cudaStream_t stream) {
  peer_path_kernel<<<static_cast<unsigned>(num_sms), path_threads, 0, stream>>>(params, peers);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
