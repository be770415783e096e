#include "nvshmem_path.h"

#include <utility>

#include "side_stream.h"

namespace waybill::cuda {
namespace {

class NvshmemPath final : public NetworkPath {
 public:
  NvshmemPath(const NvshmemApi& api, std::shared_ptr<GpuRank> gpu, Topology topology)
      : api_(api), gpu_(std::move(gpu)), topology_(topology), side_(gpu_) {}

  void start(const NetworkCall& call) override {
    operation_ = call.operation;
    const PathParams params = path_params(call, *gpu_, topology_, 1);
    const cudaStream_t side = side_.fork(call.stream, operation_);
    gpu_->check(api_.path(&params, call.num_sms, side), "launching a kernel", operation_);
  }

  void join(cudaStream_t stream) override { side_.join(stream, operation_); }

 private:
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
