#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace waybill::cuda {

/// Zeros on the device in pages of their own: what one handle opens. The driver hands out smaller
/// blocks from one page, and a peer would map the neighbours as well.
[[nodiscard]] std::shared_ptr<void> make_shared_block(std::int64_t size_bytes, cudaStream_t stream);

/// The memory of another process, mapped for `device` while it is held. @throws CudaError
[[nodiscard]] std::shared_ptr<void> open_shared(const cudaIpcMemHandle_t& handle, std::size_t rank,
                                                int device);

}  // namespace waybill::cuda
