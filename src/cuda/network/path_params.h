#pragma once

#include <cstddef>
#include <cstdint>

#include "../device/params.h"
#include "schedule/work.h"

namespace waybill::cuda {

/// Counters of one dispatcher's network path on its rank's device, zeros at first. They advance
/// when a network path ends, so that the same launch can be replayed.
struct PathState {
  std::uint64_t epoch;        ///< the last network path that has ended
  unsigned long long blocks;  ///< blocks of the running one that are done
};

/// When a network path raises its rank's slot of the arrivals at all ranks of other nodes.
enum class PathArrival : std::uint32_t {
  none,
  first,  ///< before its puts, which wait for that of their peer
  last,   ///< when all of them have arrived
};

/// A NetworkProgram in device memory. Kernels may write it as long as the waits of a step are not
/// over, and so put what only the device knows.
struct PathTables {
  const std::int32_t* num_puts;  ///< null: see below
  const NetworkStep* steps;
  const NetworkPut* puts;
  const BatchSlot* waits;
  const BatchSlot* signals;
  unsigned* done;        ///< [steps]: parts of puts that have arrived; 0 between calls
  std::uint64_t* ready;  ///< [num_ready]: counters of the rank's own, raised to the epoch
  // Without num_puts blocks take whole steps, which may have no puts: first those of first_steps,
  // then the others, steps_of_peer after each other for each peer.
  std::int32_t num_steps;
  std::int32_t first_steps;
  std::int32_t steps_of_peer;
  bool one_block_of_peer;  ///< a block has all of a peer's, as it only posts them
};

/// Every backend's kernel of a network path takes these. Memory is the rank's own part.
struct PathParams {
  std::int32_t rank;
  std::int32_t world_size;
  std::int32_t ranks_per_node;
  std::uint32_t parity;  ///< the epoch's, for which the window was chosen
  FaultKind kind;
  PathArrival arrival;
  PathState* state;
  FaultSink sink;
  PathTables tables;
  std::byte* window;
  std::uint64_t* slots;           ///< slot 0
  std::uint64_t* arrivals;        ///< [W]
  FingerprintParams fingerprint;  ///< sent with the arrivals
};

}  // namespace waybill::cuda
