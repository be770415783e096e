#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../device/params.h"
#include "../network/path_params.h"

namespace waybill::cuda {

/// Raise it with every change of the struct below: a library of another build is refused.
inline constexpr int nvshmem_api_version = 6;
inline constexpr const char* nvshmem_api_symbol = "waybill_nvshmem_api";

/// The calls of NVSHMEM that Waybill uses, so that only one shared library needs NVSHMEM. It is
/// loaded with the first such world. A "rank" is NVSHMEM's PE. Those that return int: 0 is good.
struct NvshmemApi {
  int version;                  ///< nvshmem_api_version
  const char* nvshmem_version;  ///< that it was built with
  std::size_t unique_id_bytes;
  int (*make_unique_id)(void* id);
  /// Collective, on the current device, once a process.
  int (*initialize)(int rank, int world_size, const void* id);
  /// After initialize(), the same on all ranks: 1 where NVSHMEM's own waits do more than load the
  /// signal, as its transport may show it before the rows that were put earlier; 0 where a load
  /// with acquire suffices; below 0: NVSHMEM did not answer.
  int (*enforces_consistency)();
  /// Collective: symmetric memory aligned to 256 bytes, not cleared; null: there is none left.
  void* (*allocate)(std::size_t size_bytes);
  void (*free)(void* memory);  ///< collective
  /// Returns this rank's address of another rank's part of symmetric memory; null: there is none.
  void* (*peer)(const void* mine, int rank);
  /// The rest is queued on a stream. Sources of put must be symmetric memory.
  void (*put)(void* to, const void* from, std::size_t size_bytes, int rank, cudaStream_t stream);
  void (*signal)(std::uint64_t* slot, std::uint64_t epoch, int rank, cudaStream_t stream);
  void (*quiet)(cudaStream_t stream);
  cudaError_t (*wait)(const FlagWait* wait, const FaultSink* sink, cudaStream_t stream);
  /// Runs a network path (path_kernel.cuh): the device puts and signals. The window, the slots and
  /// the arrivals are symmetric memory.
  cudaError_t (*path)(const PathParams* params, int num_sms, cudaStream_t stream);
};

using GetNvshmemApi = const NvshmemApi* (*)();

/// Loads libwaybill_nvshmem.so, once a process: the file that WAYBILL_NVSHMEM_LIBRARY names, else
/// the one in the folder of this program or library, else where the system looks. NVSHMEM itself
/// comes from NVSHMEM_HOME/lib where that is set, else from where it was at build time or where the
/// system looks.
/// @throws Unsupported saying what was tried and what to do
[[nodiscard]] const NvshmemApi& nvshmem_api();

}  // namespace waybill::cuda
