#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "runtime/executor.h"
#include "transport/transport.h"
#include "waybill/core/host_tensor.h"
#include "waybill/runtime/world.h"

namespace waybill::test {

inline void cuda_ok(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// The same, but where a kernel of this rank (or of one that shares its device) gave up waiting,
/// with the text that says for whom.
inline void cuda_ok(cudaError_t status, World& world) {
  if (status == cudaSuccess) return;
  world.executor().synchronize({});
  cuda_ok(status);
}

/// For run_gpu_thread_world. WAYBILL_TEST_TIMEOUT_S says how long a rank may be late.
inline ThreadWorldOptions world_options() {
  const char* const seconds = std::getenv("WAYBILL_TEST_TIMEOUT_S");
  return {.timeout_s = seconds != nullptr ? std::strtod(seconds, nullptr) : 20};
}

/// WAYBILL_TEST_RANDOM_CASES says how many random cases a test has at most: tools are slow.
inline int num_random_cases(int wanted) {
  const char* const most = std::getenv("WAYBILL_TEST_RANDOM_CASES");
  return most != nullptr ? std::min(wanted, std::atoi(most)) : wanted;
}

/// Device memory of one rank, taken once and given piece by piece with guard bytes around each:
/// cudaMalloc and cudaFree in the middle could wait for other ranks on the same device.
class DeviceArena {
 public:
  static constexpr std::int64_t guard_bytes = 256;
  static constexpr int guard = 0x5C;

  explicit DeviceArena(World& world, std::int64_t size_bytes = std::int64_t{256} << 20)
      : world_(world), size_(size_bytes) {
    cuda_ok(cudaMalloc(&memory_, size_));
    cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    reset();
  }
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;
  ~DeviceArena() {
    (void)cudaStreamDestroy(stream_);
    (void)cudaFree(memory_);
  }

  [[nodiscard]] cudaStream_t stream() const { return stream_; }

  /// Forgets all pieces.
  void reset() {
    used_ = 0;
    cuda_ok(cudaMemsetAsync(memory_, guard, size_, stream_), world_);
  }

  /// A contiguous tensor. Its rows begin at a multiple of 256 bytes, plus `shift`.
  [[nodiscard]] TensorView take(DType dtype, Shape shape, std::int64_t shift = 0) {
    const TensorView shape_only(nullptr, dtype, shape);
    std::int64_t bytes = dtype_bytes(dtype);
    for (const std::int64_t extent : shape) bytes *= extent;
    used_ += guard_bytes;
    std::byte* const at = static_cast<std::byte*>(memory_) + used_ + shift;
    used_ += (bytes + shift + 255) / 256 * 256;
    if (used_ + guard_bytes > size_) throw std::runtime_error("the arena is too small");
    return {at, dtype, shape};
  }

  /// An empty tensor has no memory, as torch's have none: its pointer is null.
  [[nodiscard]] TensorView upload(const HostTensor& tensor, std::int64_t shift = 0) {
    if (tensor.size_bytes() == 0) return {nullptr, tensor.dtype(), tensor.shape()};
    const TensorView view = take(tensor.dtype(), tensor.shape(), shift);
    copy(view.data, tensor.bytes().data(), tensor.size_bytes());
    synchronize();
    return view;
  }

  /// Of a contiguous view, after all that is on the stream.
  [[nodiscard]] HostTensor download(const TensorView& view) const {
    HostTensor tensor(view.dtype, view.shape);
    read(tensor.bytes().data(), view.data, tensor.size_bytes());
    return tensor;
  }

  /// All bytes outside of `view`, up to the next pieces, are still guards. An empty tensor without
  /// memory has none.
  [[nodiscard]] bool guards_hold(const TensorView& view) const {
    if (view.data == nullptr) return true;
    std::int64_t bytes = dtype_bytes(view.dtype);
    for (const std::int64_t extent : view.shape) bytes *= extent;
    HostTensor around(DType::uint8, {guard_bytes});
    for (const std::byte* from : {view.data - guard_bytes, view.data + bytes}) {
      read(around.bytes().data(), from, guard_bytes);
      for (const std::byte byte : around.bytes()) {
        if (byte != std::byte{guard}) return false;
      }
    }
    return true;
  }

  /// Queues a copy to the device or on it.
  void copy(void* to, const void* from, std::int64_t bytes) const {
    cuda_ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), world_);
  }

  /// Copies to the host, after all that is on the stream. It waits first: a copy to pageable memory
  /// behind a kernel that waits for another rank would keep that rank's thread from copying too.
  void read(void* to, const void* from, std::int64_t bytes) const {
    synchronize();
    copy(to, from, bytes);
    synchronize();
  }

  void synchronize() const { world_.executor().synchronize({stream_}); }

 private:
  World& world_;
  std::int64_t size_;
  std::int64_t used_ = 0;
  void* memory_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

}  // namespace waybill::test
