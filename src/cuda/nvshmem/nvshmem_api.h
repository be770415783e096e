#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../device/fault.h"
#include "../network/path_params.h"

namespace waybill::cuda {

/// Changes with the struct below: a library of another build is refused.
inline constexpr int nvshmem_api_version = 5;
inline constexpr const char* nvshmem_api_symbol = "waybill_nvshmem_api";

/// A wait for a slot that a rank on another node raises.
struct NvshmemWait {
  std::uint64_t* flag;  ///< symmetric memory of this rank
  std::uint64_t wanted;
  std::int32_t rank;
  std::int32_t peer;
  std::uint64_t* seen;  ///< pinned host memory: the flag in the end
};

/// All that Waybill takes of NVSHMEM, so that one shared library alone needs it, and is loaded when
/// somebody asks for that world. A "rank" is NVSHMEM's PE. Those that return int: 0 is good.
struct NvshmemApi {
  int version;                  ///< nvshmem_api_version
  const char* nvshmem_version;  ///< that it was built with
  std::size_t unique_id_bytes;
  int (*make_unique_id)(void* id);
  /// Collective, on the current device, once a process.
  int (*initialize)(int rank, int world_size, const void* id);
  /// After initialize(), the same on all ranks: 1 where NVSHMEM's own waits do more than look at a
  /// signal, as its transport may show it before the rows that were put ahead of it; 0 where a look
  /// with acquire will do; below 0: it cannot be asked.
  int (*enforces_consistency)();
  /// Collective: symmetric memory aligned to 256 bytes, not cleared; null: there is none left.
  void* (*allocate)(std::size_t size_bytes);
  void (*free)(void* memory);  ///< collective
  /// Where a rank's part of symmetric memory is seen from here; null: nowhere.
  void* (*peer)(const void* mine, int rank);
  /// The rest is queued on a stream. Sources of put must be symmetric memory.
  void (*put)(void* to, const void* from, std::size_t size_bytes, int rank, cudaStream_t stream);
  void (*signal)(std::uint64_t* slot, std::uint64_t epoch, int rank, cudaStream_t stream);
  void (*quiet)(cudaStream_t stream);
  cudaError_t (*wait)(const NvshmemWait* wait, const FaultSink* sink, cudaStream_t stream);
  /// What crosses between nodes in a call (path_kernel.cuh): put and signal by the device. The
  /// window, the slots and the arrivals are symmetric memory.
  cudaError_t (*path)(const PathParams* params, int num_sms, cudaStream_t stream);
};

using GetNvshmemApi = const NvshmemApi* (*)();

}  // namespace waybill::cuda
