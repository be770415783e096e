#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "../network/network_path.h"
#include "../rank/gpu_rank.h"

namespace waybill::cuda {

/// A stream beside the callers', and the events by which it leaves one and comes back.
class SideStream {
 public:
  explicit SideStream(std::shared_ptr<GpuRank> gpu);
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  ~SideStream();

  /// Behind what is on `from`. @return the side stream
  [[nodiscard]] cudaStream_t fork(cudaStream_t from, const char* operation);
  void join(cudaStream_t to, const char* operation);

 private:
  std::shared_ptr<GpuRank> gpu_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begun_ = nullptr;
  cudaEvent_t done_ = nullptr;
};

/// The parameters of a network path's kernel, but for the peers' memory.
/// @param share ranks on the device
[[nodiscard]] PathParams path_params(const NetworkCall& call, const GpuRank& gpu,
                                     const Topology& topology, int share);

}  // namespace waybill::cuda
