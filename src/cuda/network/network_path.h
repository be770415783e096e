#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <span>

#include "path_params.h"
#include "schedule/work.h"
#include "transport/transport.h"

namespace waybill::cuda {

/// The part of a call that crosses between nodes.
struct NetworkCall {
  const char* operation = "";  ///< in errors
  FaultKind kind = FaultKind::none;
  PathArrival arrival = PathArrival::none;
  PathTables tables{};
  PathState* state = nullptr;
  /// The tables as phases, for a network path that needs them; they stay until it is joined.
  std::span<const NetworkPhase> phases;
  /// With phases, if it is given: queues work on the rows of a phase before its slots are raised.
  std::function<void(cudaStream_t)> unpack = {};
  const SymmetricBuffer* window = nullptr;  ///< puts go from the own part into the same of peers
  const SignalPad* slots = nullptr;         ///< slot k of the tables is counter first_slot + k
  std::int64_t first_slot = 0;
  const SignalPad* arrivals = nullptr;  ///< [W]: rank r raises slot r; null without arrival
  FingerprintParams fingerprint{};      ///< goes to all ranks of other nodes with the arrival
  std::uint64_t epoch = 0;  ///< as the host counts; a replayed graph may have counted on
  int num_sms = 1;          ///< for a backend with kernels
  cudaStream_t stream = nullptr;
};

/// Moves rows between nodes while a kernel does the rest of a call. With several nodes every call
/// starts one network path, and joins it.
class NetworkPath {
 public:
  NetworkPath() = default;
  NetworkPath(const NetworkPath&) = delete;
  NetworkPath& operator=(const NetworkPath&) = delete;
  virtual ~NetworkPath() = default;

  /// Says whether it runs phases, not tables: then the host queues them, and a graph holds them for
  /// ever.
  [[nodiscard]] virtual bool needs_phases() const { return false; }

  /// Says whether symmetric memory of all ranks is mapped: then a put may come from any memory of
  /// the rank, not only from its part of the window, and kernels may reach any rank themselves.
  [[nodiscard]] virtual bool maps_peers() const { return false; }

  /// Queues the network path after the work on call.stream, concurrent with the next work there;
  /// waits for nothing. Call it before the kernel that it works with is launched, so that it gets
  /// its place on the device. A graph may capture it.
  virtual void start(const NetworkCall& call) = 0;

  /// Lets the stream wait for the network path that was started.
  virtual void join(cudaStream_t stream) = 0;
};

}  // namespace waybill::cuda
