#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../device/fault.h"
#include "waybill/core/topology.h"
#include "waybill/core/wait.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/runtime/world.h"

namespace waybill::cuda {

[[nodiscard]] inline cudaStream_t stream_of(const Stream& stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

/// What the transport and the executor of one rank share: its device, and where the kernels report
/// a wait that came to its end.
class GpuRank {
 public:
  GpuRank(Rank rank, Topology topology, int device, double timeout_s);
  GpuRank(const GpuRank&) = delete;
  GpuRank& operator=(const GpuRank&) = delete;
  ~GpuRank();

  [[nodiscard]] Rank rank() const noexcept { return rank_; }
  [[nodiscard]] const Topology& topology() const noexcept { return topology_; }
  [[nodiscard]] int device() const noexcept { return device_; }
  /// As the driver calls it: "NVIDIA H200".
  [[nodiscard]] const std::string& device_name() const noexcept { return device_name_; }
  [[nodiscard]] int num_sms() const noexcept { return num_sms_; }
  [[nodiscard]] bool has_bulk_copies() const noexcept { return has_bulk_copies_; }
  void forgo_bulk_copies() noexcept { has_bulk_copies_ = false; }

  /// For the library's own work; it waits for no other stream.
  [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }

  /// Makes the device the current one of the calling thread.
  void use() const;

  /// Other processes use this device too: a wait that lasts too long ends its kernel, not the
  /// context, whose end the other processes would have to wait for.
  void share_with_processes() noexcept { traps_ = false; }

  /// Where kernels report. `share`: ranks on this device.
  [[nodiscard]] FaultSink sink(int share) const;

  /// Waits of this rank's kernels end within a tenth of a second, as at their deadline. On any
  /// thread.
  void give_up() noexcept;

  /// What waits of the host ask beside interrupts, until it is taken away; it throws.
  using PeerCheck = std::function<void(std::string_view operation)>;
  void ask_while_waiting(PeerCheck check) { peer_check_ = std::move(check); }

  /// For a PollingWait for the device. They sleep only when it is for long.
  [[nodiscard]] WaitOptions wait_options(std::string_view operation) const;

  /// Wait until what is on the stream, or before the event, is done, or all of the device is. They
  /// have no deadline: kernels have.
  /// @throws as check; Interrupted; what ask_while_waiting() has been given
  void wait_for(cudaStream_t stream, std::string_view doing, std::string_view operation) const;
  void wait_for(cudaEvent_t event, std::string_view doing, std::string_view operation) const;
  void wait_for_device(std::string_view doing, std::string_view operation) const;

  /// Whether a kernel of this rank has reported.
  [[nodiscard]] bool has_fault() const noexcept;

  /// Names the call that has met it, whichever asks. @throws Timeout, Disagreement,
  ///   InvalidArgument or TransportError when a kernel of this rank has reported
  void throw_fault() const;

  /// Looks for a report first. @throws Timeout; Disagreement; TransportError when a rank that
  /// shares the device
  ///   has reported, as the device is lost with it; CudaError
  void check(cudaError_t status, std::string_view doing, std::string_view operation) const;

 private:
  Rank rank_;
  Topology topology_;
  int device_;
  int num_sms_ = 0;
  std::string device_name_;
  bool has_bulk_copies_ = false;
  double timeout_s_;
  bool traps_ = true;
  cudaStream_t stream_ = nullptr;
  std::shared_ptr<void> record_;   ///< a FaultRecord
  std::shared_ptr<void> claimed_;  ///< device memory
  PeerCheck peer_check_;
};

/// What kernels of the ranks of this process have reported, as device_faults().
[[nodiscard]] std::vector<DeviceFault> reported_faults();

}  // namespace waybill::cuda
