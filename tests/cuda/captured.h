#pragma once

#include "cuda/device_arena.h"

namespace waybill::test {

/// A CUDA graph of what `calls` queues on a stream.
class Captured {
 public:
  template <class Calls>
  Captured(cudaStream_t stream, const Calls& calls) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    calls();
    cuda_ok(cudaStreamEndCapture(stream, &graph));
    cuda_ok(cudaGraphInstantiate(&ready_, graph, 0));
    cuda_ok(cudaGraphDestroy(graph));
  }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;
  ~Captured() { (void)cudaGraphExecDestroy(ready_); }
  void launch(World& world) const { cuda_ok(cudaGraphLaunch(ready_, stream_), world); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t ready_ = nullptr;
};

}  // namespace waybill::test
