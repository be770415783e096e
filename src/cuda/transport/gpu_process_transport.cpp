#include "gpu_process_transport.h"

#include <algorithm>
#include <string>
#include <utility>

#include "../executor/cuda_check.h"
#include "keep_memory.h"
#include "waybill/core/at.h"
#include "waybill/transport/agree.h"

namespace waybill::cuda {
namespace {

using waybill::detail::at;

constexpr const char* who = "make_gpu_process_world";

/// What one handle opens: the driver hands out smaller blocks from pages of this size, and a peer
/// would map the neighbours as well.
constexpr std::int64_t page_bytes = std::int64_t{2} << 20;

/// What a rank tells about the block that it has made.
struct Offer {
  std::int64_t size_bytes;
  cudaIpcMemHandle_t handle;
};

/// Others may have it mapped, and freeing it before they have closed it is not allowed.
std::shared_ptr<void> make_own(std::int64_t size_bytes, cudaStream_t stream) {
  const std::int64_t pages = std::max<std::int64_t>(1, (size_bytes + page_bytes - 1) / page_bytes);
  return keep_until_released(device_memory(pages * page_bytes, stream));
}

std::shared_ptr<void> open_peer(const cudaIpcMemHandle_t& handle, std::size_t rank, int device) {
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

class GpuProcessTransport final : public GpuTransport {
 public:
  GpuProcessTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node,
                      std::shared_ptr<GpuRank> gpu, const std::vector<GpuPlace>& places)
      : GpuTransport(std::move(bootstrap), ranks_per_node, std::move(gpu), 1) {
    require_one_host(this->bootstrap(), who);
    require_own_processes(places, who);
    do_together(this->bootstrap(), who,
                [&] { require_peer_access(places, this->gpu().device(), who); });
  }

 private:
  Parts make_parts(std::int64_t size_bytes, std::string_view name) override {
    const std::string operation = concat("allocate(", name, ")");
    const auto me = at(to_int(rank()));
    gpu().use();
    Parts parts(at(topology().world_size));
    Offer mine{size_bytes, {}};
    do_together(bootstrap(), operation, [&] {
      parts[me] = make_own(size_bytes, gpu().stream());
      cuda_check(cudaIpcGetMemHandle(&mine.handle, parts[me].get()), "making a handle of memory");
    });
    const auto offers = all_gather_value(bootstrap(), mine, operation);
    for (std::size_t r = 0; r < offers.size(); ++r) {
      require(offers[r].size_bytes == size_bytes, operation, ": size_bytes = ", size_bytes,
              ", but ", offers[r].size_bytes, " on rank ", r);
    }
    do_together(bootstrap(), operation, [&] {
      for (std::size_t r = 0; r < offers.size(); ++r) {
        if (r != me) parts[r] = open_peer(offers[r].handle, r, gpu().device());
      }
    });
    return parts;
  }

  void free_parts(Parts parts) override {
    std::shared_ptr<void> own = std::move(parts[at(to_int(rank()))]);
    parts.clear();
    bootstrap().barrier("release");  // nobody has it mapped any more
    note_release(own);
  }
};

}  // namespace

std::unique_ptr<GpuTransport> make_gpu_process_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                         std::int32_t ranks_per_node,
                                                         std::shared_ptr<GpuRank> gpu,
                                                         const std::vector<GpuPlace>& places) {
  return std::make_unique<GpuProcessTransport>(std::move(bootstrap), ranks_per_node, std::move(gpu),
                                               places);
}

}  // namespace waybill::cuda
