#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace waybill::cuda {

/// Zeros in pinned memory that all GPUs of this process read and write at one address.
[[nodiscard]] std::shared_ptr<void> make_pinned_part(std::int64_t size_bytes);

/// Shared memory of processes, pinned and mapped for the current device for as long as it is held
/// here. @return where the device sees it. @throws CudaError
[[nodiscard]] std::shared_ptr<void> pin_part(std::shared_ptr<void> memory, std::int64_t size_bytes);

}  // namespace waybill::cuda
