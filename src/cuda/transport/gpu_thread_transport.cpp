#include "gpu_thread_transport.h"

#include <mutex>
#include <set>
#include <utility>

#include "../rank/cuda_check.h"
#include "transport/share_memory.h"

namespace waybill::cuda {
namespace {

/// Once a process: asking again is an error, which tools report.
void enable_peer_access(int device, int peer) {
  static std::mutex lock;
  static std::set<std::pair<int, int>> enabled;
  if (device == peer) return;
  const std::scoped_lock hold(lock);
  if (enabled.contains({device, peer})) return;
  int can = 0;
  cuda_check(cudaDeviceCanAccessPeer(&can, device, peer), "asking for peer access");
  if (can == 0) {
    throw Unsupported(
        concat("gpu world: device ", device, " cannot reach the memory of device ", peer));
  }
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {  // by somebody else
    (void)cudaGetLastError();
  } else {
    cuda_check(status, "enabling peer access");
  }
  enabled.emplace(device, peer);
}

class GpuThreadTransport final : public GpuTransport {
 public:
  GpuThreadTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node,
                     std::shared_ptr<GpuRank> gpu, int share)
      : GpuTransport(std::move(bootstrap), ranks_per_node, std::move(gpu), share) {
    const int mine = this->gpu().device();
    for (const int peer : all_gather_value(this->bootstrap(), mine, "gpu world: devices")) {
      enable_peer_access(mine, peer);
    }
  }

  /// cudaFree waits for the kernels of all ranks on the device, and holds up the driver meanwhile.
  void note_unwinding() noexcept override {
    if (share() > 1) fail("an exception");
  }

 private:
  Parts make_parts(std::int64_t size_bytes, std::string_view name) override {
    gpu().use();
    return share_memory(bootstrap(), device_memory(size_bytes, gpu().stream()), size_bytes, name);
  }
};

}  // namespace

std::unique_ptr<GpuTransport> make_gpu_thread_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                        std::int32_t ranks_per_node,
                                                        std::shared_ptr<GpuRank> gpu, int share) {
  return std::make_unique<GpuThreadTransport>(std::move(bootstrap), ranks_per_node, std::move(gpu),
                                              share);
}

}  // namespace waybill::cuda
