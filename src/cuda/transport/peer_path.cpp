#include "peer_path.h"

#include <utility>

#include "../network/path_launch.h"
#include "../rank/cuda_check.h"
#include "network_paths.h"

namespace waybill::cuda {
namespace {

class PeerPath final : public NetworkPath {
 public:
  PeerPath(std::shared_ptr<GpuRank> gpu, Topology topology, int share)
      : gpu_(std::move(gpu)), topology_(topology), share_(share), side_(gpu_) {
    // A block takes a multiprocessor of its own then, beside one of the kernel that it works with.
    bulk_ = gpu_->has_bulk_copies() && 2 * share <= gpu_->num_sms();
    cuda_check(prepare_peer_path(bulk_), "loading kernels");
  }

  [[nodiscard]] bool maps_peers() const override { return true; }

  void start(const NetworkCall& call) override {
    const PathParams params = path_params(call, *gpu_, topology_, share_);
    PeerAddresses peers{};
    peers.windows = peers_of<std::byte>(call.window->table, 0);
    peers.slots = peers_of<std::uint64_t>(call.slots->table,
                                          call.first_slot * std::int64_t{sizeof(std::uint64_t)});
    if (call.arrivals != nullptr) {
      peers.arrivals = peers_of<std::uint64_t>(call.arrivals->table, 0);
    }
    operation_ = call.operation;
    const cudaStream_t side = side_.fork(call.stream, call.operation);
    gpu_->check(launch_peer_path(params, peers, bulk_, call.num_sms, side), "launching a kernel",
                call.operation);
  }

  void join(cudaStream_t stream) override { side_.join(stream, operation_); }

 private:
  std::shared_ptr<GpuRank> gpu_;
  Topology topology_;
  int share_;
  SideStream side_;
  bool bulk_ = false;
  const char* operation_ = "";
};

}  // namespace

std::unique_ptr<NetworkPath> make_peer_path(std::shared_ptr<GpuRank> gpu, Topology topology,
                                            int share) {
  return std::make_unique<PeerPath>(std::move(gpu), topology, share);
}

}  // namespace waybill::cuda
