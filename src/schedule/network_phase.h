#pragma once

#include <cstdint>
#include <vector>

#include "schedule/work_batch.h"

namespace waybill {

/// Adjacent bytes of this rank's window on their way to, or from, a rank on another node.
struct NetworkPiece {
  std::int64_t offset_bytes = 0;  ///< in the own window
  std::int64_t size_bytes = 0;    ///< 0: a message that says only that this phase has come
  std::int32_t peer = 0;
};

/// What a rank sends and receives at once, where both sides must ask for it (NCCL): the steps of
/// the ranks' network programs, put together. Plain data.
///
/// A phase begins on a rank when its waits are over and the rank's earlier phases are done, and is
/// done when all its pieces are. Between two ranks both have the same phases with the same pieces,
/// in the same order.
struct NetworkPhase {
  std::int64_t number = 0;         ///< the same on all ranks; grows
  std::vector<BatchSlot> waits;    ///< as NetworkProgram::waits
  std::vector<NetworkPiece> sent;  ///< by peer, in the order in which it receives them
  std::vector<NetworkPiece> received;
  std::vector<std::int32_t> slots;    ///< of the own pad, raised when the phase is done
  std::vector<std::int32_t> arrived;  ///< ranks on other nodes of which nothing comes any more
                                      ///< (dispatch), or that have come to this call (kv_gradient)
};

}  // namespace waybill
