#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "core/batch_bytes.h"
#include "schedule/work_batch.h"

namespace waybill {

/// Adjacent bytes of this rank's window on their way into the window of a rank on another node.
struct NetworkPut {
  std::int64_t from_bytes = 0;  ///< in the own window
  std::int64_t to_bytes = 0;    ///< in the peer's
  std::int64_t size_bytes = 0;  ///< 0 and more
  std::int32_t peer = 0;
  std::int32_t step = 0;  ///< into NetworkProgram::steps
};
static_assert(sizeof(NetworkPut) == 32 && std::is_trivially_copyable_v<NetworkPut>);

/// Puts that may begin when all waits are over; when they have arrived the signals are raised.
struct NetworkStep {
  std::int32_t first_wait = 0;  ///< into NetworkProgram::waits
  std::int32_t num_waits = 0;
  std::int32_t first_put = 0;     ///< into NetworkProgram::puts
  std::int32_t num_puts = 0;      ///< at least one
  std::int32_t first_signal = 0;  ///< into NetworkProgram::signals
  std::int32_t num_signals = 0;
};
static_assert(sizeof(NetworkStep) == 24 && std::is_trivially_copyable_v<NetworkStep>);

/// All that one rank puts on other nodes in one call, beside the batches of its plan. Plain data.
///
/// Steps are in the order of the plan's batches: any number of workers may take the puts, each the
/// next one, and wait for its step; over all ranks no step and no batch waits for what stands
/// behind it.
struct NetworkProgram {
  std::vector<NetworkStep> steps;
  std::vector<NetworkPut> puts;  ///< step by step, none larger than max_put_bytes
  /// A wait with `rank` = world_size is for the rank's own counter `slot` of 0..num_ready-1, which
  /// a batch of its plan raises (a signal with `rank` = world_size there); any other for a slot of
  /// its pad, as the waits of batches.
  std::vector<BatchSlot> waits;
  std::vector<BatchSlot> signals;  ///< to ranks on other nodes, as the signals of batches
  std::int32_t num_ready = 0;
  std::int64_t stage_bytes = 0;  ///< of the window, behind its tensors: rows that wait to be put

  [[nodiscard]] bool empty() const { return steps.empty(); }
};

inline constexpr std::int64_t max_put_bytes = detail::max_put_bytes;

}  // namespace waybill
