#pragma once

#include <cuda_runtime_api.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "../rank/gpu_rank.h"
#include "waybill/transport/bootstrap.h"

namespace waybill::cuda {

/// Waybill declares the part of NCCL's C interface that it uses, so a build needs no NCCL and a
/// program takes the one that it finds. NCCL keeps these declarations binary compatible within
/// version 2; where nccl.h is installed, nccl_library.cpp compares them with it.
inline constexpr int min_nccl_version = 22800;   ///< as ncclGetVersion counts: 2.28.0
inline constexpr int next_nccl_version = 30000;  ///< no longer the same declarations

enum class NcclResult : int {
  success,
  unhandled_cuda_error,
  system_error,
  internal_error,
  invalid_argument,
  invalid_usage,
  remote_error,
  in_progress,
};

inline constexpr int nccl_int8 = 0;  ///< an ncclDataType_t

struct NcclUniqueId {
  char bytes[128];
};

using NcclComm = struct NcclCommunicatorOfNccl*;

/// ncclConfig_t of version 2.28: fields not set keep NCCL's defaults; later versions know it.
struct NcclConfig {
  static constexpr int unset = INT_MIN;

  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = min_nccl_version;
  int blocking = unset;
  int cga_cluster_size = unset;
  int min_ctas = unset;
  int max_ctas = unset;
  const char* net_name = nullptr;
  int split_share = unset;
  int traffic_class = unset;
  const char* comm_name = nullptr;
  int collnet_enable = unset;
  int cta_policy = unset;
  int shrink_share = unset;
  int nvls_ctas = unset;
  int channels_per_net_peer = unset;
  int nvlink_centric_scheduling = unset;
};

struct NcclApi {
  int version;  ///< such as 22809
  NcclResult (*get_unique_id)(NcclUniqueId* id);
  NcclResult (*init_rank)(NcclComm* comm, int world_size, NcclUniqueId id, int rank,
                          NcclConfig* config);
  NcclResult (*abort)(NcclComm comm);
  NcclResult (*get_async_error)(NcclComm comm, NcclResult* error);
  const char* (*error_text)(NcclResult result);
  const char* (*last_error)(NcclComm comm);
  NcclResult (*group_start)();
  NcclResult (*group_end)();
  NcclResult (*send)(const void* data, std::size_t count, int type, int peer, NcclComm comm,
                     cudaStream_t stream);
  NcclResult (*receive)(void* data, std::size_t count, int type, int peer, NcclComm comm,
                        cudaStream_t stream);
};

/// Loads NCCL, once a process: the file that WAYBILL_NCCL_LIBRARY names, else the libnccl.so.2 that
/// the process has loaded already (as torch does), else the one in NCCL_HOME/lib, else where the
/// system looks.
/// @throws Unsupported saying what was tried and what to do, also for versions before 2.28
[[nodiscard]] const NcclApi& nccl_api();

/// 22809: "2.28.9".
[[nodiscard]] std::string nccl_version_text(int version);

/// Bytes of this rank's device memory that go to a rank, or come from it.
struct NcclPiece {
  std::byte* data = nullptr;
  std::int64_t size_bytes = 0;
  std::int32_t peer = 0;
};

/// One communicator of NCCL for all ranks of a world, connected to those of other nodes. Calls of
/// NCCL do not block, so every wait of the host has a deadline. NCCL's waits on the device have
/// none: a kernel with a deadline must wait for their effect. Its report ends the context; if it
/// does not (FaultSink::traps), this object gives up all work of NCCL.
class NcclCommunicator {
 public:
  /// Collective. Starts NCCL and sends a message between every two ranks of different nodes, after
  /// which NCCL allocates and loads nothing more.
  /// @throws Unsupported as nccl_api(), on all ranks; TransportError with NCCL's words, naming the
  ///   rank, on all ranks
  NcclCommunicator(Bootstrap& bootstrap, const Topology& topology, std::shared_ptr<GpuRank> gpu);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  /// Waits for no other rank: it gives up the work that NCCL has not finished.
  ~NcclCommunicator();

  /// Queues pieces in one step, in which NCCL moves all of them at once. Between two ranks pieces
  /// are matched in their order and must be of the same sizes. Returns when all are queued.
  /// @throws TransportError in NCCL's words, or when NCCL has not queued them within the deadline
  void exchange(std::span<const NcclPiece> sent, std::span<const NcclPiece> received,
                cudaStream_t stream, std::string_view operation);

  /// @throws TransportError when NCCL has noticed an error by itself, such as a broken connection
  void check(std::string_view operation) const;

  /// Ends NCCL's work here, and sooner or later on the other ranks. Waits so long for the end.
  void give_up(double patience_s) noexcept;

  /// Host memory that devices see: 0 until this object has given up, which later kernels check.
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
  double
      patience_s_;  ///< below the deadline of the others, so that they learn the error of this rank
  const NcclApi* api_ = nullptr;
  mutable std::mutex mutex_;  ///< guards comm_
  NcclComm comm_ = nullptr;
  std::shared_ptr<void> given_up_;
  std::shared_ptr<void> messages_;  ///< for connect(); they must outlive the exchange
  std::jthread watch_;
};

}  // namespace waybill::cuda
