#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/fingerprint.h"

// Parameters that the kernels of all modules share.
namespace waybill::cuda {

/// The work of a kernel when it gave up.
enum class FaultKind : std::uint32_t {
  none,
  dispatch,
  kv_gradient,
  arrive,
  wait,
  parity,
  moe_dispatch,
  moe_combine,
  barrier,
  expert_weights,
  expert_gradients,
  disagreement,
  // Wrong inputs of a dispatch or combine of experts, see report_input() in experts/call.cuh.
  expert_id,
  scatter_size,
  scatter_position,
  scatter_twice,
  combine_rows,
  expert_times
};

inline constexpr int fault_words = 4;

/// Written by a kernel into pinned host memory, once; the host reads it when a call fails.
struct FaultRecord {
  volatile FaultKind kind;  ///< written last
  volatile FaultKind call;  ///< the rank's work, for kinds that are no call; else none
  volatile std::int32_t rank;
  volatile std::int32_t peer;
  volatile std::uint64_t wanted;
  volatile std::uint64_t seen;
  volatile std::uint64_t waited_ns;
  // disagreement: the fingerprints of call `wanted` on the two ranks. From expert_id on: values
  // that describe the wrong input.
  volatile std::uint64_t mine[fault_words];
  volatile std::uint64_t theirs[fault_words];
  /// The host writes it, and kernels that have waited for long read it: not 0: the rank has given
  /// up.
  volatile std::uint32_t given_up;
};

/// Says where a kernel reports a wait that failed, and when a wait has failed.
struct FaultSink {
  FaultRecord* record = nullptr;          ///< host memory, as the device sees it
  unsigned long long* claimed = nullptr;  ///< device memory: 0 until a thread reports
  std::uint64_t timeout_ns = 0;
  std::uint64_t look_after_ns = 0;  ///< from then on waits look at FaultRecord::given_up as well;
                                    ///< at most timeout_ns
  std::uint64_t grace_ns = 0;  ///< between the report and the trap: ranks that share the device
                               ///< lose it with the trap, and report as well
  bool traps = true;  ///< false where processes share the device: a thread that waits leaves the
                      ///< kernel, which ends as if it had succeeded
};

static_assert(fault_words == fingerprint_words);

/// The packed CallFingerprint of this rank's call, and the place of those that other ranks send:
/// slots [2][W] of fault_words, by parity of the epoch and rank, in the pad of the arrivals.
struct FingerprintParams {
  std::uint64_t words[fault_words];  ///< without tags
  /// Words 1 and 2, in device memory: a plan that is replaced takes them along. Null: as above.
  const std::uint64_t* plan;
  std::int32_t first_slot;  ///< words from a rank's arrivals to the slots
  /// Ranks of other nodes send theirs, too: the network path carries them.
  bool crosses_nodes;
};

/// A part of symmetric memory on each rank: a table of addresses on the device, which lives as long
/// as the memory (SymmetricBuffer::table), and the offset of the part.
/// docs/decisions/sequences.md
template <class T>
struct Peers {
  std::byte* const* bases;  ///< [ranks]
  std::int64_t offset;      ///< bytes
};

/// Addresses without a load to wait for: those of the first ranks are constants of the kernel;
/// those of further ranks come from the table.
inline constexpr std::int32_t max_near_peers = 64;
template <class T>
struct NearPeers {
  T* near[max_near_peers];
  Peers<T> all;
};

/// @param bases SymmetricBuffer::table or SignalPad::table, from some rank on
template <class T, class Element>
Peers<T> peers_of(Element* const* bases, std::int64_t offset_bytes) {
  return {reinterpret_cast<std::byte* const*>(bases), offset_bytes};
}

/// @param memory SymmetricBuffer or SignalPad; of its ranks `count` from `first` on
template <class T, class Symmetric>
NearPeers<T> near_peers_of(const Symmetric& memory, std::int64_t offset_bytes, std::int32_t first,
                           std::int32_t count) {
  NearPeers<T> peers{{}, peers_of<T>(memory.table + first, offset_bytes)};
  for (std::int32_t i = 0; i < count && i < max_near_peers; ++i) {
    const std::int32_t rank = first + i;
    void* const base = memory.memory[static_cast<std::size_t>(rank)].get();
    if (base == nullptr) continue;  // not mapped here
    peers.near[i] = reinterpret_cast<T*>(static_cast<std::byte*>(base) + offset_bytes);
  }
  return peers;
}

/// A world on GPUs has at most so many ranks: words that hold a rank and a row have no more bits.
inline constexpr int max_gpu_ranks = 1 << 15;

/// Counters of one dispatcher on its rank's device. They move on when a call ends, so that the
/// same launch can be replayed.
struct CallState {
  std::uint64_t epoch;          ///< the last call that has ended
  unsigned long long blocks;    ///< blocks of the running call that are done
  unsigned long long taken[2];  ///< chunks of each queue that the running call has taken
};

/// Every kernel of a call synchronizes with the other ranks by these.
struct ArriveParams {
  std::int32_t rank;
  std::int32_t world_size;
  std::uint32_t parity;  ///< the epoch's, for which the windows were chosen
  FaultKind kind;
  CallState* state;
  FaultSink sink;
  std::int32_t first_rank;  ///< the node's first: its ranks raise each other's slots, the network
                            ///< path raises those of the others
  std::int32_t node_ranks;
  std::uint64_t* own_arrivals;        ///< [W]: slot r is raised by rank r
  NearPeers<std::uint64_t> arrivals;  ///< [W]: the same of each rank
  FingerprintParams fingerprint;      ///< ranks compare it when they synchronize
};

/// One rank's wait for a flag that another raises.
struct FlagWait {
  const std::uint64_t* flag;
  std::uint64_t wanted;
  std::int32_t rank;
  std::int32_t peer;
  std::uint64_t* seen;  ///< pinned host memory: gets the last value of the flag
};

}  // namespace waybill::cuda
