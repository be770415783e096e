#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace waybill::cuda {

/// Makes zeros on the device in pages of their own. A handle opens whole pages; the driver cuts
/// smaller blocks from one page, so a peer would map the neighbours as well.
[[nodiscard]] std::shared_ptr<void> make_shared_block(std::int64_t size_bytes, cudaStream_t stream);

/// A rank's block, as it describes it to the others.
struct SharedBlockInfo {
  std::int64_t size_bytes = 0;
  cudaIpcMemHandle_t handle{};
};

/// Maps the memory of another process for `device` while the result lives. @throws CudaError
[[nodiscard]] std::shared_ptr<void> open_shared(const cudaIpcMemHandle_t& handle, std::size_t rank,
                                                int device);

/// Pins shared memory of processes and maps it for the current device while the result lives.
/// @return the address for the device. @throws CudaError
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

/// All ranks have released the memory that keep_until_released returned.
void note_release(const std::shared_ptr<void>& memory);

}  // namespace waybill::cuda
