#pragma once

#include <cstdint>

#include "call_words.h"

namespace waybill::cuda {

inline constexpr int max_gpu_ranks = 64;  ///< that reach each other by load and store

/// Counters of one dispatcher on its rank's device. They move on when a call ends, so that the
/// same launch can be replayed.
struct CallState {
  std::uint64_t epoch;          ///< of the last call that has ended
  unsigned long long blocks;    ///< of the running call, that have done their part
  unsigned long long taken[2];  ///< of the running call: chunks of each queue taken by ticket
};

/// What every kernel of a call needs to meet the others.
struct ArriveParams {
  std::int32_t rank;
  std::int32_t world_size;
  std::uint32_t parity;  ///< of the epoch for which the windows below were chosen
  FaultKind kind;
  CallState* state;
  FaultSink sink;
  std::uint64_t* own_arrivals;                  ///< [W]: slot r is raised by rank r
  std::uint64_t* peer_arrivals[max_gpu_ranks];  ///< [W]: the same of each rank of the node; else
                                                ///< null: the network path raises those
  FingerprintParams fingerprint;                ///< compared where ranks meet
};

}  // namespace waybill::cuda
