#pragma once

#include "params.h"

namespace waybill::cuda {

/// Returns the address of one rank's part. It is a load, so call it early.
template <class T>
__device__ inline T* peer_at(const Peers<T>& peers, std::int32_t rank) {
  const auto base = __ldg(reinterpret_cast<const unsigned long long*>(peers.bases) + rank);
  return reinterpret_cast<T*>(base + static_cast<std::uint64_t>(peers.offset));
}

template <class T>
__device__ inline T* peer_at(const NearPeers<T>& peers, std::int32_t rank) {
  return rank < max_near_peers ? peers.near[rank] : peer_at(peers.all, rank);
}

/// A table in the registers of a warp: lane i has rank i, so a warp that sends row after row loads
/// nothing. With more ranks than lanes the others come from memory.
template <class T>
class WarpPeers {
 public:
  static constexpr std::int32_t lanes = 32;

  /// All lanes. @param count ranks in the table
  __device__ WarpPeers(const Peers<T>& peers, std::int32_t count) : peers_(&peers), mine_(nullptr) {
    const auto lane = static_cast<std::int32_t>(threadIdx.x % lanes);
    if (lane < count) mine_ = peer_at(peers, lane);
  }

  /// All lanes, each with a rank of its own. @pre it is in the table
  __device__ T* operator[](std::int32_t rank) const {
    auto at = __shfl_sync(0xFFFFFFFFU, reinterpret_cast<std::uint64_t>(mine_), rank);
    if (rank >= lanes) at = reinterpret_cast<std::uint64_t>(peer_at(*peers_, rank));
    return reinterpret_cast<T*>(at);
  }

 private:
  const Peers<T>* peers_;
  T* mine_;
};

}  // namespace waybill::cuda
