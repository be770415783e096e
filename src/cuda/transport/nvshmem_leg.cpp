#include "nvshmem_leg.h"

#include <utility>

#include "side_stream.h"

namespace waybill::cuda {
namespace {

class NvshmemLeg final : public NetworkLeg {
 public:
  NvshmemLeg(const NvshmemApi& api, std::shared_ptr<GpuRank> gpu, Topology topology)
      : api_(api), gpu_(std::move(gpu)), topology_(topology), side_(gpu_) {}

  void start(const NetworkCall& call) override {
    operation_ = call.operation;
    const LegParams params = leg_params(call, *gpu_, topology_, 1);
    const cudaStream_t side = side_.fork(call.stream, operation_);
    gpu_->check(api_.leg(&params, call.num_sms, side), "launching a kernel", operation_);
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

std::unique_ptr<NetworkLeg> make_nvshmem_leg(const NvshmemApi& api, std::shared_ptr<GpuRank> gpu,
                                             Topology topology) {
  return std::make_unique<NvshmemLeg>(api, std::move(gpu), topology);
}

}  // namespace waybill::cuda
