#pragma once

#include <cstdint>

#include "call_words.h"
#include "peers.h"

namespace waybill::cuda {

/// Of a world on GPUs: what words with a rank and a place in them have bits for.
inline constexpr int max_gpu_ranks = 1 << 15;

/// Counters of one dispatcher on its rank's device. They move on when a call ends, so that the
/// same launch can be replayed.
struct CallState {
  std::uint64_t epoch;          ///< of the last call that has ended
  unsigned long long blocks;    ///< of the running call, that have done their part
  unsigned long long taken[2];  ///< of the running call: chunks of each queue taken by ticket
};

/// What every kernel of a call needs to synchronize with the others.
struct ArriveParams {
  std::int32_t rank;
  std::int32_t world_size;
  std::uint32_t parity;  ///< of the epoch for which the windows below were chosen
  FaultKind kind;
  CallState* state;
  FaultSink sink;
  std::int32_t first_rank;  ///< of the node: its ranks raise each other's slots, the network
                            ///< path those of the others
  std::int32_t node_ranks;
  std::uint64_t* own_arrivals;        ///< [W]: slot r is raised by rank r
  NearPeers<std::uint64_t> arrivals;  ///< [W]: the same of each rank
  FingerprintParams fingerprint;      ///< compared where ranks synchronize
};

}  // namespace waybill::cuda
