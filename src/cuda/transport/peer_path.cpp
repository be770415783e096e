#include "peer_path.h"

#include <utility>

#include "../network/peer_path_kernel.h"
#include "../rank/cuda_check.h"
#include "core/to_size.h"
#include "side_stream.h"

namespace waybill::cuda {
namespace {

using waybill::detail::to_size;

class PeerPath final : public NetworkPath {
 public:
  PeerPath(std::shared_ptr<GpuRank> gpu, Topology topology, int share)
      : gpu_(std::move(gpu)), topology_(topology), share_(share), side_(gpu_) {
    cuda_check(prepare_peer_path(), "loading kernels");
  }

  void start(const NetworkCall& call) override {
    if (topology_.world_size > max_gpu_ranks) {
      throw Unsupported(concat(call.operation, ": ", topology_.world_size,
                               " ranks, expected at most ", max_gpu_ranks));
    }
    const PathParams params = path_params(call, *gpu_, topology_, share_);
    const auto me = to_int(gpu_->rank());
    PeerAddresses peers{};
    for (std::int32_t r = 0; r < topology_.world_size; ++r) {
      peers.windows[r] = static_cast<std::byte*>(call.window->memory[to_size(r)].get());
      peers.slots[r] =
          static_cast<std::uint64_t*>(call.slots->memory[to_size(r)].get()) + call.first_slot;
      if (call.arrivals == nullptr) continue;
      peers.arrivals[r] = static_cast<std::uint64_t*>(call.arrivals->memory[to_size(r)].get()) + me;
    }
    operation_ = call.operation;
    const cudaStream_t side = side_.fork(call.stream, call.operation);
    gpu_->check(launch_peer_path(params, peers, call.num_sms, side), "launching a kernel",
                call.operation);
  }

  void join(cudaStream_t stream) override { side_.join(stream, operation_); }

 private:
  std::shared_ptr<GpuRank> gpu_;
  Topology topology_;
  int share_;
  SideStream side_;
  const char* operation_ = "";
};

}  // namespace

std::unique_ptr<NetworkPath> make_peer_path(std::shared_ptr<GpuRank> gpu, Topology topology,
                                            int share) {
  return std::make_unique<PeerPath>(std::move(gpu), topology, share);
}

}  // namespace waybill::cuda
