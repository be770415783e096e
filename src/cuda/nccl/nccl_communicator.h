#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "../rank/gpu_rank.h"
#include "nccl_api.h"
#include "waybill/transport/bootstrap.h"

namespace waybill::cuda {

/// Bytes of this rank's device memory, on their way to or from a rank.
struct NcclPiece {
  std::byte* data = nullptr;
  std::int64_t size_bytes = 0;
  std::int32_t peer = 0;
};

/// All ranks of a world in one communicator of NCCL, connected to those of other nodes. NCCL is
/// asked without blocking, so that every wait of the host has a deadline. Its waits on the device
/// have none of their own: a kernel that has one must wait for their effect. What it reports ends
/// the context, or where it does not (FaultSink::traps), all that NCCL has under way is given up.
class NcclCommunicator {
 public:
  /// Collective. Starts NCCL and sends a message between every two ranks of different nodes, after
  /// which NCCL allocates and loads nothing more.
  /// @throws Unsupported as nccl_api(), on all ranks; TransportError with NCCL's words, naming the
  ///   rank, on all ranks
  NcclCommunicator(Bootstrap& bootstrap, const Topology& topology, std::shared_ptr<GpuRank> gpu);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  /// Waits for no other rank: what is under way is given up.
  ~NcclCommunicator();

  /// Queues pieces in one step, in which NCCL moves all of them at once. Between two ranks pieces
  /// are matched in their order and must be of the same sizes. Returns when all are queued.
  /// @throws TransportError in NCCL's words, or when NCCL has not queued them within the deadline
  void exchange(std::span<const NcclPiece> sent, std::span<const NcclPiece> received,
                cudaStream_t stream, std::string_view operation);

  /// @throws TransportError when NCCL has noticed an error by itself, such as a broken connection
  void check(std::string_view operation) const;

  /// Ends what is under way, here and sooner or later on the other ranks; waits for that so long.
  void give_up(double patience_s) noexcept;

  /// Host memory that devices see: 0 until this object has given up what is under way, so that
  /// kernels behind it know.
  [[nodiscard]] const std::uint32_t* given_up() const noexcept {
    return static_cast<const std::uint32_t*>(given_up_.get());
  }

 private:
  void start(Bootstrap& bootstrap);
  void connect(const Topology& topology);
  void settle(std::string_view doing) const;
  void require_alive(std::string_view doing) const;
  void watch(const std::stop_token& stop);
  [[noreturn]] void fail(NcclResult result, std::string_view doing) const;

  std::shared_ptr<GpuRank> gpu_;
  Rank rank_;
  double patience_s_;  ///< below the deadline of the others, so that they hear what went wrong here
  const NcclApi* api_ = nullptr;
  mutable std::mutex mutex_;  ///< of comm_
  NcclComm comm_ = nullptr;
  std::shared_ptr<void> given_up_;
  std::shared_ptr<void> messages_;  ///< of connect(): not to be freed while they are under way
  std::jthread watch_;
};

}  // namespace waybill::cuda
