#include "pinned_parts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "../rank/cuda_check.h"

namespace waybill::cuda {

std::shared_ptr<void> make_pinned_part(std::int64_t size_bytes) {
  std::shared_ptr<void> part = pinned_memory(size_bytes);
  std::memset(part.get(), 0, static_cast<std::size_t>(size_bytes));
  return part;
}

std::shared_ptr<void> pin_part(std::shared_ptr<void> memory, std::int64_t size_bytes) {
  const auto room = static_cast<std::size_t>(std::max<std::int64_t>(size_bytes, 1));
  cuda_check(
      cudaHostRegister(memory.get(), room, cudaHostRegisterPortable | cudaHostRegisterMapped),
      "pinning shared memory");
  void* const begin = memory.get();
  std::shared_ptr<void> pinned(begin, [memory = std::move(memory)](void* at) mutable {
    (void)cudaHostUnregister(at);
    memory.reset();
  });
  void* on_device = nullptr;
  cuda_check(cudaHostGetDevicePointer(&on_device, begin, 0), "mapping shared memory");
  return {std::move(pinned), on_device};
}

}  // namespace waybill::cuda
