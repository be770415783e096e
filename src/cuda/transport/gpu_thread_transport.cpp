#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "gpu_transport.h"
#include "transport/share_memory.h"

namespace waybill::cuda {
namespace {

constexpr const char* thread_world = "make_gpu_thread_world";

/// Enables it once per process: a second call is an error, which tools report.
void enable_peer_access(int device, int peer) {
  static std::mutex lock;
  static std::set<std::pair<int, int>> enabled;
  if (device == peer) return;
  const std::scoped_lock hold(lock);
  if (enabled.contains({device, peer})) return;
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {  // another library has enabled it
    (void)cudaGetLastError();
  } else {
    cuda_check(status, "enabling peer access");
  }
  enabled.emplace(device, peer);
}

class GpuThreadTransport final : public GpuTransport {
 public:
  GpuThreadTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node,
                     std::shared_ptr<GpuRank> gpu, const std::vector<GpuPlace>& places, int share)
      : GpuTransport(std::move(bootstrap), ranks_per_node, std::move(gpu), share) {
    const int mine = this->gpu().device();
    const auto peers = all_gather_value(this->bootstrap(), mine, "gpu world: devices");
    use_peer_memory(agree_on_peer_memory(this->bootstrap(), thread_world,
                                         peer_access_wish(std::getenv("WAYBILL_PEER_ACCESS")),
                                         missing_peer_access(places, 0, mine)));
    if (peer_memory() == PeerMemory::host) return;
    for (const int peer : peers) enable_peer_access(mine, peer);
  }

  /// cudaFree waits for the kernels of all ranks on the device, and holds up the driver meanwhile.
  void note_unwinding() noexcept override {
    if (share() > 1) fail("an exception");
  }

 private:
  Parts make_parts(std::int64_t size_bytes, std::string_view name) override {
    gpu().use();
    auto mine = peer_memory() == PeerMemory::host ? pinned_memory(size_bytes)
                                                  : device_memory(size_bytes, gpu().stream());
    return share_memory(bootstrap(), std::move(mine), size_bytes, name);
  }
};

}  // namespace

std::unique_ptr<GpuTransport> make_gpu_thread_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                        std::int32_t ranks_per_node,
                                                        std::shared_ptr<GpuRank> gpu,
                                                        const std::vector<GpuPlace>& places,
                                                        int share) {
  return std::make_unique<GpuThreadTransport>(std::move(bootstrap), ranks_per_node, std::move(gpu),
                                              places, share);
}

}  // namespace waybill::cuda
