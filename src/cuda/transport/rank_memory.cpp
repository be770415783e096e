#include "rank_memory.h"

#include <algorithm>

#include "../rank/cuda_check.h"

namespace waybill::cuda {
namespace {

constexpr std::int64_t page_bytes = std::int64_t{2} << 20;

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

}  // namespace waybill::cuda
