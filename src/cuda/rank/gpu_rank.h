#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../device/params.h"
#include "waybill/core/topology.h"
#include "waybill/core/wait.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/runtime/world.h"

namespace waybill::cuda {

/// Throws CudaError with the verb; clears the error unless it is sticky.
inline void cuda_check(cudaError_t status, std::string_view doing) {
  if (status == cudaSuccess) [[likely]] {
    return;
  }
  (void)cudaGetLastError();
  int device = -1;
  (void)cudaGetDevice(&device);
  throw CudaError(concat("CUDA error while ", doing, " on device ", device, ": ",
                         cudaGetErrorName(status), " (", cudaGetErrorString(status), ")"));
}

/// Asks until the answer is not cudaErrorNotReady. @throws as PollingWait::pause
template <class Query>
[[nodiscard]] cudaError_t poll_until_done(Query&& query, WaitOptions options) {
  constexpr int questions_at_once = 16;
  PollingWait wait(std::numeric_limits<double>::infinity(), std::move(options));
  cudaError_t status = query();
  for (int asked = 1; status == cudaErrorNotReady; ++asked) {
    if (asked % questions_at_once == 0) (void)wait.pause();
    status = query();
  }
  if (status == cudaSuccess) (void)cudaGetLastError();  // which may be "not ready"
  return status;
}

/// Makes a device current in the calling thread, for a while.
class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device) {
    (void)cudaGetDevice(&before_);
    if (before_ != device_) (void)cudaSetDevice(device_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() {
    if (before_ != device_) (void)cudaSetDevice(before_);
  }

 private:
  int device_;
  int before_ = 0;
};

/// Makes zeros in the memory of the current device, cleared on `stream` (not the default stream, on
/// which calls may wait for other ranks). They are freed whatever state the device is in.
[[nodiscard]] inline std::shared_ptr<void> device_memory(std::int64_t size_bytes,
                                                         cudaStream_t stream) {
  int device = 0;
  cuda_check(cudaGetDevice(&device), "asking for the current device");
  void* memory = nullptr;
  const auto size = static_cast<std::size_t>(size_bytes > 0 ? size_bytes : 1);
  cuda_check(cudaMalloc(&memory, size), "allocating device memory");
  std::shared_ptr<void> owner(memory, [device](void* at) {
    const OnDevice on(device);
    (void)cudaFree(at);
  });
  cuda_check(cudaMemsetAsync(memory, 0, size, stream), "clearing device memory");
  cuda_check(
      poll_until_done([&] { return cudaStreamQuery(stream); }, {.yields_s = 0.02, .check = {}}),
      "clearing device memory");
  return owner;
}

/// Makes zeros in pinned host memory that devices see as well.
[[nodiscard]] inline std::shared_ptr<void> pinned_memory(std::int64_t size_bytes) {
  void* memory = nullptr;
  const auto size = static_cast<std::size_t>(size_bytes > 0 ? size_bytes : 1);
  cuda_check(cudaHostAlloc(&memory, size, cudaHostAllocPortable | cudaHostAllocMapped),
             "allocating pinned host memory");
  std::memset(memory, 0, size);
  return {memory, [](void* at) { (void)cudaFreeHost(at); }};
}

[[nodiscard]] inline cudaStream_t stream_of(const Stream& stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

/// The transport and the executor of one rank share its device, and the record in which its kernels
/// report waits that failed.
class GpuRank {
 public:
  GpuRank(Rank rank, Topology topology, int device, double timeout_s);
  GpuRank(const GpuRank&) = delete;
  GpuRank& operator=(const GpuRank&) = delete;
  ~GpuRank();

  [[nodiscard]] Rank rank() const noexcept { return rank_; }
  [[nodiscard]] const Topology& topology() const noexcept { return topology_; }
  [[nodiscard]] int device() const noexcept { return device_; }
  /// The driver's name for it: "NVIDIA H200".
  [[nodiscard]] const std::string& device_name() const noexcept { return device_name_; }
  [[nodiscard]] int num_sms() const noexcept { return num_sms_; }
  [[nodiscard]] bool has_bulk_copies() const noexcept { return has_bulk_copies_; }
  void forgo_bulk_copies() noexcept { has_bulk_copies_ = false; }

  /// The stream for the library's own work, which waits for no other stream.
  [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }

  /// Makes the device the current one of the calling thread.
  void use() const;

  /// Other processes use this device too: a wait that lasts too long ends its kernel, not the
  /// context, whose end the other processes would have to wait for.
  void share_with_processes() noexcept { traps_ = false; }

  /// Kernels report there. @param share ranks on this device
  [[nodiscard]] FaultSink sink(int share) const;

  /// Ends waits of this rank's kernels within a tenth of a second, as their deadline does. On any
  /// thread.
  void give_up() noexcept;

  /// Waits of the host call it in addition to interrupts, until it is empty; it throws.
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

  /// Whether a kernel of this rank has reported, and where it does.
  [[nodiscard]] bool has_fault() const noexcept;
  [[nodiscard]] const FaultRecord& record() const noexcept;

  /// Names the call that has met it, whichever asks. @throws Timeout, Disagreement,
  ///   InvalidArgument or TransportError when a kernel of this rank has reported
  void throw_fault() const;

  /// Looks for a report first. @throws Timeout; Disagreement; TransportError when a rank that
  /// shares the device has reported, as the device is lost with it; CudaError
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

/// Returns the reports of the kernels of all ranks of this process, as device_faults().
[[nodiscard]] std::vector<DeviceFault> reported_faults();

}  // namespace waybill::cuda
