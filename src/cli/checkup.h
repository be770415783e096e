#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace waybill::cli {

enum class Diagnosis : std::uint8_t {
  good,
  note,     ///< something that is missing, or small: worlds that need it say so
  problem,  ///< something that is there and does not work
};

/// One line of `waybill doctor`.
struct CheckLine {
  std::string name;
  Diagnosis state = Diagnosis::good;
  std::string value;
  std::string advice = {};  ///< what to do; empty: nothing
};

/// What Python knows of itself: `python -m waybill doctor` passes it on.
struct PythonFacts {
  std::string python;  ///< its version; empty: the program was called without Python
  std::string torch;   ///< the version; empty: not installed
};

/// The host: cores, shared memory, limits, how its name resolves.
[[nodiscard]] std::vector<CheckLine> check_host();

/// Python and torch, if Python has called.
[[nodiscard]] std::vector<CheckLine> check_python(const PythonFacts& facts);

/// GPUs, peer access, NCCL and NVSHMEM; what is missing where the program was built without CUDA.
/// @param measure also the rates of links and memory
[[nodiscard]] std::vector<CheckLine> check_gpus(bool measure);

/// A line for a folder of shared memory of `size_bytes`, of which `free_bytes` are free.
[[nodiscard]] CheckLine shared_memory_line(std::int64_t size_bytes, std::int64_t free_bytes,
                                           std::int64_t num_cores);

/// A line for a host of this name, and the addresses to which it resolves.
[[nodiscard]] CheckLine host_name_line(const std::string& name,
                                       const std::vector<std::string>& addresses);

/// A line for a limit in force and the most that it may be raised to; nothing: without limit.
[[nodiscard]] CheckLine descriptor_line(std::optional<std::int64_t> limit,
                                        std::optional<std::int64_t> most);
[[nodiscard]] CheckLine memlock_line(std::optional<std::int64_t> limit_bytes);

}  // namespace waybill::cli
