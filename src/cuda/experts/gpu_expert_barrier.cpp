#include "gpu_expert_barrier.h"

#include <utility>

#include "../rank/cuda_check.h"
#include "core/to_size.h"
#include "launch.h"
#include "waybill/core/error.h"

namespace waybill::cuda {

namespace {

constexpr const char* operation = "ep_barrier_all";

}  // namespace

GpuExpertBarrier::GpuExpertBarrier(Transport& transport, std::shared_ptr<GpuRank> gpu, int share)
    : transport_(transport), gpu_(std::move(gpu)), share_(share) {
  cuda_check(prepare_barrier(), "loading kernels");
  epochs_ = device_memory(2 * sizeof(std::uint64_t), gpu_->stream());
}

GpuExpertBarrier::~GpuExpertBarrier() { transport_.defer_release({epochs_}); }

void GpuExpertBarrier::run(const ExpertBarrier& call) {
  BarrierParams params{};
  params.rank = to_int(transport_.rank());
  params.first = call.first;
  params.count = call.count;
  params.epoch = static_cast<std::uint64_t*>(epochs_.get()) + (call.first_slot > 0 ? 1 : 0);
  params.sink = gpu_->sink(share_);
  params.own = call.signals->local + call.first_slot;
  for (std::int32_t i = 0; i < call.count; ++i) {
    // Also of ranks on another logical node, where their memory is mapped.
    const auto& pad = call.signals->memory[waybill::detail::to_size(call.first + i)];
    if (pad == nullptr) return run_on_host(call);
  }
  params.peers = peers_of<std::uint64_t>(call.signals->table,
                                         call.first_slot * std::int64_t{sizeof(std::uint64_t)});
  gpu_->check(launch_barrier(params, stream_of(call.stream)), "launching a kernel", operation);
}

/// Where nodes reach each other over a network.
void GpuExpertBarrier::run_on_host(const ExpertBarrier& call) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  gpu_->check(cudaStreamIsCapturing(stream_of(call.stream), &status), "asking a stream", operation);
  if (status != cudaStreamCaptureStatusNone) {
    throw Unsupported(concat(operation, ": the host waits for ranks of other nodes, which a graph ",
                             "cannot hold: expected intra_node_only = true, or no capture"));
  }
  gpu_->wait_for(stream_of(call.stream), "waiting for a stream", operation);
  transport_.barrier(operation);
}

}  // namespace waybill::cuda
