#pragma once

#include <cstdint>
#include <memory>

#include "../rank/gpu_rank.h"
#include "experts/expert_executor.h"
#include "transport/transport.h"

namespace waybill::cuda {

/// The barriers of a layer on a rank of a GPU world.
class GpuExpertBarrier {
 public:
  /// @param share ranks on this device
  GpuExpertBarrier(Transport& transport, std::shared_ptr<GpuRank> gpu, int share);
  GpuExpertBarrier(const GpuExpertBarrier&) = delete;
  GpuExpertBarrier& operator=(const GpuExpertBarrier&) = delete;
  ~GpuExpertBarrier();

  void run(const ExpertBarrier& call);

 private:
  void run_on_host(const ExpertBarrier& call);

  Transport& transport_;
  std::shared_ptr<GpuRank> gpu_;
  int share_;
  std::shared_ptr<void> epochs_;  ///< [2] on the device: of the node's barriers and the world's
};

}  // namespace waybill::cuda
