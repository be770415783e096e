#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "../network/network_path.h"
#include "../rank/gpu_rank.h"
#include "gpu_place.h"
#include "transport/peer_transport.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill::cuda {

/// The common part of engines whose symmetric memory is device memory that every rank has mapped.
/// Pieces and signals go in the order of the rank's own stream.
class GpuTransport : public PeerTransport {
 public:
  ~GpuTransport() override;
  void put(const SymmetricBuffer& to, const PutRequest& piece) override;
  void signal(Rank peer, SignalSlot slot, std::uint64_t epoch) override;
  std::uint64_t wait(SignalSlot slot, std::uint64_t wanted, Rank peer,
                     std::string_view operation) override;
  void quiet() override;

  /// Makes the path of a call's rows to other nodes. Here every rank has the memory of all mapped,
  /// so it is a kernel.
  [[nodiscard]] virtual std::unique_ptr<NetworkPath> make_network_path();

  /// The place of symmetric memory is the same on all ranks.
  [[nodiscard]] PeerMemory peer_memory() const noexcept { return peer_memory_; }

 protected:
  void give_up(const char* after, std::string_view reason) noexcept override;

  /// Waits until what is on the rank's own stream is done.
  void wait_stream(std::string_view doing, std::string_view operation);

  /// @param share ranks on this rank's device
  GpuTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node,
               std::shared_ptr<GpuRank> gpu, int share);

  /// Call it before memory is allocated. Bulk copies work only with memory of devices.
  void use_peer_memory(PeerMemory where) noexcept;

  [[nodiscard]] int share() const noexcept { return share_; }
  [[nodiscard]] const std::shared_ptr<GpuRank>& shared_gpu() const noexcept { return gpu_; }
  [[nodiscard]] const GpuRank& gpu() const noexcept { return *gpu_; }
  [[nodiscard]] FaultSink sink() const { return gpu_->sink(share_); }
  /// Pinned host memory: the last value that a wait has read.
  [[nodiscard]] std::uint64_t* seen() const { return static_cast<std::uint64_t*>(seen_.get()); }

 private:
  [[nodiscard]] std::shared_ptr<void> make_table(const Parts& parts,
                                                 std::string_view name) override;

  std::shared_ptr<GpuRank> gpu_;
  int share_;
  PeerMemory peer_memory_ = PeerMemory::device;
  std::shared_ptr<void> seen_;
  std::shared_ptr<void> staged_table_;  ///< pinned: [W] a table on its way to the device
  std::shared_ptr<void> ended_;         ///< keeps what is called when the run ends
};

/// Makes the engine of ranks that are threads of one process, in memory of GPUs that reach each
/// other's.
/// @param share ranks on this rank's device
/// @throws Unsupported without peer access where WAYBILL_PEER_ACCESS refuses memory of the host
[[nodiscard]] std::unique_ptr<GpuTransport> make_gpu_thread_transport(
    std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node, std::shared_ptr<GpuRank> gpu,
    const std::vector<GpuPlace>& places, int share);

/// Makes the engine of ranks that are processes. Each maps the device memory of others (CUDA IPC):
/// of all ranks with the backend `peer`, of the ranks of its node with `nccl`.
[[nodiscard]] std::unique_ptr<GpuTransport> make_gpu_process_transport(
    std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node, std::shared_ptr<GpuRank> gpu,
    const std::vector<GpuPlace>& places, NetworkBackend backend);

/// Makes the engine of ranks that are processes with a GPU each, in symmetric memory of NVSHMEM:
/// pointers inside a node, put and signal of NVSHMEM between nodes.
[[nodiscard]] std::unique_ptr<GpuTransport> make_nvshmem_transport(
    std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node, std::shared_ptr<GpuRank> gpu,
    const std::vector<GpuPlace>& places);

}  // namespace waybill::cuda
