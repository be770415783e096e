#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace waybill::cuda {

/// Zeros on the device in pages of their own: what one handle opens. The driver hands out smaller
/// blocks from one page, and a peer would map the neighbours as well.
[[nodiscard]] std::shared_ptr<void> make_shared_block(std::int64_t size_bytes, cudaStream_t stream);

/// A rank's block, as it describes it to the others.
struct SharedBlockInfo {
  std::int64_t size_bytes = 0;
  cudaIpcMemHandle_t handle{};
};

/// The memory of another process, mapped for `device` while it is held. @throws CudaError
[[nodiscard]] std::shared_ptr<void> open_shared(const cudaIpcMemHandle_t& handle, std::size_t rank,
                                                int device);

/// Zeros in pinned memory that all GPUs of this process read and write at one address.
[[nodiscard]] std::shared_ptr<void> make_pinned_part(std::int64_t size_bytes);

/// Shared memory of processes, pinned and mapped for the current device for as long as it is held
/// here. @return where the device sees it. @throws CudaError
[[nodiscard]] std::shared_ptr<void> pin_part(std::shared_ptr<void> memory, std::int64_t size_bytes);

/// A deleter of memory that is freed only after a collective release, as other ranks may use it or
/// must free theirs at the same time; otherwise it stays until the process ends.
struct FreeIfReleased {
  std::shared_ptr<void> memory;
  bool released = false;

  void operator()(void* begin);
};

/// Returns the memory with that deleter.
[[nodiscard]] std::shared_ptr<void> keep_until_released(std::shared_ptr<void> memory);

/// Says that all ranks have released what keep_until_released returned.
void note_release(const std::shared_ptr<void>& memory);

}  // namespace waybill::cuda
