#include "network_paths.h"

#include <utility>

#include "../rank/cuda_check.h"

namespace waybill::cuda {

SideStream::SideStream(std::shared_ptr<GpuRank> gpu) : gpu_(std::move(gpu)) {
  gpu_->use();
  int least = 0;
  int greatest = 0;
  cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities");
  cuda_check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
             "making a stream");
  for (cudaEvent_t* event : {&begun_, &done_})
    cuda_check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
}

SideStream::~SideStream() {
  (void)cudaStreamDestroy(stream_);
  (void)cudaEventDestroy(begun_);
  (void)cudaEventDestroy(done_);
}

cudaStream_t SideStream::fork(cudaStream_t from, const char* operation) {
  gpu_->check(cudaEventRecord(begun_, from), "recording an event", operation);
  gpu_->check(cudaStreamWaitEvent(stream_, begun_, 0), "ordering streams", operation);
  return stream_;
}

void SideStream::join(cudaStream_t to, const char* operation) {
  gpu_->check(cudaEventRecord(done_, stream_), "recording an event", operation);
  gpu_->check(cudaStreamWaitEvent(to, done_, 0), "ordering streams", operation);
}

PathParams path_params(const NetworkCall& call, const GpuRank& gpu, const Topology& topology,
                       int share) {
  return {.rank = to_int(gpu.rank()),
          .world_size = topology.world_size,
          .ranks_per_node = topology.ranks_per_node,
          .parity = static_cast<std::uint32_t>(call.epoch % 2),
          .kind = call.kind,
          .arrival = call.arrival,
          .state = call.state,
          .sink = gpu.sink(share),
          .tables = call.tables,
          .window = call.window->local,
          .slots = call.slots->local + call.first_slot,
          .arrivals = call.arrivals == nullptr ? nullptr : call.arrivals->local,
          .fingerprint = call.fingerprint};
}

}  // namespace waybill::cuda
