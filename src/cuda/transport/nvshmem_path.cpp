#include "nvshmem_path.h"

#include <utility>

#include "network_paths.h"

namespace waybill::cuda {
namespace {

class NvshmemPath final : public NetworkPath {
 public:
  NvshmemPath(const NvshmemApi& api, std::shared_ptr<GpuRank> gpu, Topology topology)
      : api_(api), gpu_(std::move(gpu)), topology_(topology), side_(gpu_) {}

  void start(const NetworkCall& call) override {
    operation_ = call.operation;
    PathParams params = path_params(call, *gpu_, topology_, 1);
    params.tables.one_block_of_peer = posts(*call.window);
    const cudaStream_t side = side_.fork(call.stream, operation_);
    gpu_->check(api_.path(&params, call.num_sms, side), "launching a kernel", operation_);
  }

  void join(cudaStream_t stream) override { side_.join(stream, operation_); }

 private:
  /// Whether puts to other nodes go through a network card. Else they are copies, for which one
  /// block does not suffice.
  [[nodiscard]] bool posts(const SymmetricBuffer& window) const {
    for (std::int32_t r = 0; r < topology_.world_size; ++r) {
      const bool of_node =
          r / topology_.ranks_per_node == to_int(gpu_->rank()) / topology_.ranks_per_node;
      if (!of_node && api_.peer(window.local, r) != nullptr) return false;
    }
    return true;
  }

  const NvshmemApi& api_;
  std::shared_ptr<GpuRank> gpu_;
  Topology topology_;
  SideStream side_;
  const char* operation_ = "";
};

}  // namespace

std::unique_ptr<NetworkPath> make_nvshmem_path(const NvshmemApi& api, std::shared_ptr<GpuRank> gpu,
                                               Topology topology) {
  return std::make_unique<NvshmemPath>(api, std::move(gpu), topology);
}

}  // namespace waybill::cuda
