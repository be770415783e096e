#pragma once

#include <cuda_runtime_api.h>

#include <climits>
#include <cstddef>
#include <cstdint>

/// What Waybill uses of NCCL's C interface, declared here, so that a build needs no NCCL and a
/// program takes the one that it finds when it asks for it. NCCL keeps these declarations binary
/// compatible within version 2; where nccl.h is installed, a test compares them with it.
namespace waybill::cuda {

inline constexpr int least_nccl_version = 22800;  ///< as ncclGetVersion counts: 2.28.0
inline constexpr int next_nccl_version = 30000;   ///< no longer the same declarations

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

enum class NcclDataType : int { int8 = 0 };

struct NcclUniqueId {
  char bytes[128];
};

using NcclComm = struct NcclCommunicatorOfNccl*;

/// ncclConfig_t of version 2.28: fields not set keep NCCL's defaults; later versions know it.
struct NcclConfig {
  static constexpr int unset = INT_MIN;

  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = least_nccl_version;
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
  NcclResult (*send)(const void* data, std::size_t count, NcclDataType type, int peer,
                     NcclComm comm, cudaStream_t stream);
  NcclResult (*receive)(void* data, std::size_t count, NcclDataType type, int peer, NcclComm comm,
                        cudaStream_t stream);
};

}  // namespace waybill::cuda
