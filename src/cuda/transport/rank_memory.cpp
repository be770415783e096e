#include "rank_memory.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "../rank/gpu_rank.h"

namespace waybill::cuda {
namespace {

constexpr std::int64_t page_bytes = std::int64_t{2} << 20;

void keep_for_good(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<void>>;  // never destroyed
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace

std::shared_ptr<void> make_shared_block(std::int64_t size_bytes, cudaStream_t stream) {
  const std::int64_t pages = std::max<std::int64_t>(1, (size_bytes + page_bytes - 1) / page_bytes);
  return device_memory(pages * page_bytes, stream);
}

std::shared_ptr<void> open_shared(const cudaIpcMemHandle_t& handle, std::size_t rank, int device) {
  void* memory = nullptr;
  cuda_check(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess),
             concat("mapping the memory of rank ", rank));
  return {memory, [device](void* begin) {
            int current = 0;
            (void)cudaGetDevice(&current);
            (void)cudaSetDevice(device);
            (void)cudaIpcCloseMemHandle(begin);
            (void)cudaSetDevice(current);
          }};
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

void FreeIfReleased::operator()(void* /*begin*/) {
  if (!released) keep_for_good(std::move(memory));
  memory.reset();
}

std::shared_ptr<void> keep_until_released(std::shared_ptr<void> memory) {
  void* const begin = memory.get();
  return {begin, FreeIfReleased{std::move(memory)}};
}

void note_release(const std::shared_ptr<void>& memory) {
  if (auto* const keeper = std::get_deleter<FreeIfReleased>(memory)) keeper->released = true;
}

}  // namespace waybill::cuda
