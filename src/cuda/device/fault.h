#pragma once

#include <cstdint>

namespace waybill::cuda {

/// What a kernel was doing when it gave up.
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
  disagreement,
  // What a dispatch or combine of experts was given, see report_input() of experts/call.cuh.
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
  volatile FaultKind call;  ///< of kinds that are not a call's: what the rank was doing; else none
  volatile std::int32_t rank;
  volatile std::int32_t peer;
  volatile std::uint64_t wanted;
  volatile std::uint64_t seen;
  volatile std::uint64_t waited_ns;
  // disagreement: what the two ranks say of call `wanted`, see CallFingerprint. From expert_id on:
  // values by which it is described.
  volatile std::uint64_t mine[fault_words];
  volatile std::uint64_t theirs[fault_words];
  /// Written by the host, read by kernels that have waited for long: not 0: the rank has given up.
  volatile std::uint32_t given_up;
};

/// Where a kernel reports to, and how long it waits before it does.
struct FaultSink {
  FaultRecord* record = nullptr;          ///< host memory, as the device sees it
  unsigned long long* claimed = nullptr;  ///< device memory: 0 until a thread reports
  std::uint64_t timeout_ns = 0;
  std::uint64_t look_after_ns = 0;  ///< from then on waits look at FaultRecord::given_up as well;
                                    ///< at most timeout_ns
  std::uint64_t grace_ns = 0;  ///< between the report and the trap: ranks that share the device
                               ///< lose it with the trap, and report as well
  bool traps = true;  ///< else who waits leaves the kernel, which ends as if it had succeeded:
                      ///< where processes share the device
};

}  // namespace waybill::cuda
