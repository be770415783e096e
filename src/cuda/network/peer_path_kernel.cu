#include "../device/bulk.cuh"
#include "../device/peers.cuh"
#include "../device/word_copy.cuh"
#include "path_kernel.cuh"
#include "path_launch.h"

namespace waybill::cuda {
namespace {

constexpr int path_ring_warps = 8;  ///< warps of a block
constexpr int path_ring_stages = 3;
constexpr int path_piece_bytes = 8192;

/// Shared memory of a block.
struct PathRingMemory {
  alignas(128) std::byte stages[path_ring_warps][path_ring_stages][path_piece_bytes];
  std::byte* to[path_ring_warps][path_ring_stages];
  std::uint32_t bytes[path_ring_warps][path_ring_stages];
  std::uint64_t loaded[path_ring_warps][path_ring_stages];
};

/// Pieces of one warp on their way through shared memory. Its first lane copies; the others only
/// count along.
class PathRing {
 public:
  /// So many of the pieces begun may not have arrived after wait_but_few().
  static constexpr std::uint32_t pieces_not_arrived = path_ring_stages - 1 + 3;

  __device__ explicit PathRing(PathRingMemory& memory)
      : memory_(memory), warp_(static_cast<int>(threadIdx.x / 32)), copies_(threadIdx.x % 32 == 0) {
    if (copies_) {
      for (int s = 0; s < path_ring_stages; ++s) barrier_init(&memory_.loaded[warp_][s]);
      fence_barrier_init();
    }
    fence_async_global();
    __syncwarp();
  }

  [[nodiscard]] __device__ std::uint32_t begun() const { return begun_; }

  /// Multiples of 16 bytes at such addresses, at most path_piece_bytes.
  __device__ void push(std::byte* to, const std::byte* from, std::uint32_t bytes) {
    if (in_flight_ == path_ring_stages - 1) store_oldest();
    if (copies_) {
      bulk_wait_read_but_one();  // the stage filled next has been read
      memory_.to[warp_][newest_] = to;
      memory_.bytes[warp_][newest_] = bytes;
      barrier_expect(&memory_.loaded[warp_][newest_], bytes);
      bulk_load_to_copy(memory_.stages[warp_][newest_], from, bytes,
                        &memory_.loaded[warp_][newest_]);
    }
    newest_ = newest_ + 1 == path_ring_stages ? 0 : newest_ + 1;
    ++in_flight_;
    ++begun_;
  }

  /// All pieces begun but the last pieces_not_arrived have arrived. @pre more were begun
  __device__ void wait_but_few() const {
    if (copies_) {
      bulk_wait_but<3>();
      fence_async_global();
    }
    __syncwarp();
  }

  __device__ void wait_all() {
    while (in_flight_ > 0) store_oldest();
    if (copies_) {
      bulk_wait_all();
      fence_async_global();
    }
    __syncwarp();
  }

 private:
  __device__ void store_oldest() {
    if (copies_) {
      barrier_wait(&memory_.loaded[warp_][oldest_], phases_ >> oldest_ & 1U);
      bulk_store(memory_.to[warp_][oldest_], memory_.stages[warp_][oldest_],
                 memory_.bytes[warp_][oldest_]);
      bulk_commit();
    }
    phases_ ^= 1U << oldest_;
    oldest_ = oldest_ + 1 == path_ring_stages ? 0 : oldest_ + 1;
    --in_flight_;
  }

  PathRingMemory& memory_;
  const int warp_;
  const bool copies_;
  int in_flight_ = 0;
  int oldest_ = 0;
  int newest_ = 0;
  unsigned phases_ = 0;
  std::uint32_t begun_ = 0;
};

/// Copies, by `Threads` threads, of which this one is number `thread`.
template <int Threads, class Word>
__device__ void copy_words(std::byte* to, const std::byte* from, std::int64_t bytes, int thread) {
  constexpr int unroll = 8;
  const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(Word));
  const auto* const source = reinterpret_cast<const Word*>(from);
  auto* const target = reinterpret_cast<Word*>(to);
  for (std::int64_t first = thread; first < count; first += Threads * unroll) {
    Word words[unroll];
    load_batch<Threads>(words, source, first, count);
    store_batch<Threads>(target, words, first, count);
  }
}

template <int Threads>
__device__ void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes, int thread) {
  const auto bits = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(to) |
                                          reinterpret_cast<std::uintptr_t>(from) | bytes);
  if (bits % 16 == 0) {
    copy_words<Threads, uint4>(to, from, bytes, thread);
  } else if (bits % 4 == 0) {
    copy_words<Threads, std::uint32_t>(to, from, bytes, thread);
  } else {
    copy_words<Threads, std::uint8_t>(to, from, bytes, thread);
  }
}

/// Signals of a backend whose peers' memory is mapped.
class PeerSignals {
 public:
  __device__ PeerSignals(const PathParams& p, const PeerAddresses& peers) : p_(p), peers_(peers) {}

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
  __device__ bool put_step(const NetworkPut* /*puts*/, std::int32_t /*count*/,
                           std::int32_t /*slot*/, std::uint64_t /*epoch*/) {
    return false;
  }

 protected:
  [[nodiscard]] __device__ const std::byte* source(const NetworkPut& put) const {
    return p_.window + put.from_bytes;
  }
  [[nodiscard]] __device__ std::byte* target(const NetworkPut& put) const {
    return peer_at(peers_.windows, put.peer) + put.to_bytes;
  }

 private:
  const PathParams& p_;
  const PeerAddresses& peers_;
};

/// Loads and stores of a block's threads.
class WordBackend : public WholeBlock, public PeerSignals {
 public:
  using PeerSignals::PeerSignals;

  __device__ void put(const NetworkPut& put) const {
    copy_bytes<path_threads>(target(put), source(put), put.size_bytes, thread());
  }
  __device__ void put_alone(const NetworkPut& all) const { put(all); }
  __device__ void settle() const {
    __threadfence_system();
    __syncthreads();
  }
};

/// Bulk copies by each warp for itself, with a few pieces on their way at any time.
class BulkBackend : public PeerSignals {
 public:
  static constexpr int groups = path_ring_warps;
  static constexpr int group_threads = 32;
  static constexpr std::uint32_t few = PathRing::pieces_not_arrived;
  static constexpr std::int64_t few_bytes = std::int64_t{few} * path_piece_bytes;

  __device__ BulkBackend(const PathParams& p, const PeerAddresses& peers, PathRingMemory& memory)
      : PeerSignals(p, peers), ring_(memory) {}

  [[nodiscard]] __device__ int group() const { return static_cast<int>(threadIdx.x / 32); }
  [[nodiscard]] __device__ int thread() const { return static_cast<int>(threadIdx.x % 32); }
  __device__ void sync() const { __syncwarp(); }
  [[nodiscard]] __device__ bool all(bool mine) const {
    const bool is_so = __all_sync(0xFFFFFFFFU, mine) != 0;
    __syncwarp();  // the first lane sees what the others have
    return is_so;
  }
  __device__ void expect_arrived() const { fence_async_global(); }
  [[nodiscard]] __device__ std::uint32_t begun() const { return ring_.begun(); }
  __device__ void wait_but_few() { ring_.wait_but_few(); }
  __device__ void settle() { ring_.wait_all(); }

  /// Pieces go on from warp to warp, whatever the puts.
  __device__ void put(const NetworkPut& put) {
    next_ = (next_ + copy(put, (group() - next_ + groups) % groups, groups)) % groups;
  }
  __device__ void put_alone(const NetworkPut& put) { (void)copy(put, 0, 1); }

 private:
  /// Pieces first, first + step, ... @return how many there are
  __device__ std::int32_t copy(const NetworkPut& put, std::int32_t first, std::int32_t step) {
    const std::byte* const from = source(put);
    std::byte* const to = target(put);
    const auto bits =
        static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(to) |
                              reinterpret_cast<std::uintptr_t>(from) | put.size_bytes);
    const auto pieces =
        static_cast<std::int32_t>((put.size_bytes + path_piece_bytes - 1) / path_piece_bytes);
    for (std::int32_t i = first; i < pieces; i += step) {
      const std::int64_t offset = std::int64_t{i} * path_piece_bytes;
      const std::int64_t left = put.size_bytes - offset;
      const std::int64_t bytes = left < path_piece_bytes ? left : path_piece_bytes;
      if (bits % 16 == 0) {
        ring_.push(to + offset, from + offset, static_cast<std::uint32_t>(bytes));
      } else {
        copy_bytes<32>(to + offset, from + offset, bytes, thread());
        __threadfence_system();
        __syncwarp();
      }
    }
    return pieces;
  }

  PathRing ring_;
  std::int32_t next_ = 0;  ///< the warp that has the next piece
};

__global__ void __launch_bounds__(path_threads)
    word_path_kernel(const __grid_constant__ PathParams p,
                     const __grid_constant__ PeerAddresses peers) {
  WordBackend backend(p, peers);
  run_path(p, backend);
}

__global__ void __launch_bounds__(path_ring_warps * 32, 1)
    bulk_path_kernel(const __grid_constant__ PathParams p,
                     const __grid_constant__ PeerAddresses peers) {
  extern __shared__ __align__(128) std::byte shared[];
  BulkBackend backend(p, peers, *reinterpret_cast<PathRingMemory*>(shared));
  run_path(p, backend);
}

}  // namespace

cudaError_t prepare_peer_path(bool bulk) {
  if (bulk) {
    return cudaFuncSetAttribute(bulk_path_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                sizeof(PathRingMemory));
  }
  cudaFuncAttributes unused{};
  return cudaFuncGetAttributes(&unused, word_path_kernel);
}

cudaError_t launch_peer_path(const PathParams& params, const PeerAddresses& peers, bool bulk,
                             int num_sms, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(num_sms);
  if (bulk) {
    bulk_path_kernel<<<blocks, path_ring_warps * 32, sizeof(PathRingMemory), stream>>>(params,
                                                                                       peers);
  } else {
    word_path_kernel<<<blocks, path_threads, 0, stream>>>(params, peers);
  }
  return cudaGetLastError();
}

}  // namespace waybill::cuda
