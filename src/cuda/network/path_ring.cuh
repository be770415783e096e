#pragma once

#include <cstddef>
#include <cstdint>

#include "../device/bulk.cuh"

namespace waybill::cuda {

inline constexpr int path_ring_warps = 8;  ///< of a block
inline constexpr int path_ring_stages = 3;
inline constexpr int path_piece_bytes = 8192;

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
  /// Of the pieces begun, those that may not have arrived behind wait_but_few().
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

}  // namespace waybill::cuda
