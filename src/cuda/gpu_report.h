#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace waybill {

/// Describes a GPU of this host as this process sees it.
struct GpuFacts {
  int device = 0;
  std::string name;
  int major = 0;  ///< compute capability
  int minor = 0;
  std::int64_t memory_bytes = 0;
  int num_sms = 0;
  int shared_bytes = 0;      ///< a block may have so much
  bool bulk_copies = false;  ///< rows move by them, not by loads and stores of threads
  bool ipc = false;          ///< its memory can be shared between processes
  std::string trouble;       ///< why this build cannot use it; empty: it can
};

/// Describes the parts that worlds of GPUs need.
struct GpuReport {
  std::string runtime;  ///< CUDA of this build, "13.0"
  std::string driver;   ///< the newest CUDA that the driver knows; empty: there is none
  std::vector<GpuFacts> gpus;
  std::vector<std::vector<bool>> peer_access;  ///< [from][to]
  std::string nccl;                            ///< its version; empty: it cannot be used
  std::string nccl_trouble;
  bool nvshmem = false;
  std::string nvshmem_trouble;
};

/// Says that the driver is too old for this build, with both versions; empty: it is not, or there
/// is none.
[[nodiscard]] std::string driver_trouble();

/// Asks; throws nothing but std::bad_alloc. Makes a context on each device.
[[nodiscard]] GpuReport report_gpus();

}  // namespace waybill
