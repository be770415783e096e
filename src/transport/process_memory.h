#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/shared_file.h"
#include "waybill/transport/bootstrap.h"

namespace waybill::detail {

/// Blocks of POSIX shared memory that ranks that are processes of one host make together, one each.
/// They have names only while they are made: all of them go with the last process that has them.
class ProcessMemory {
 public:
  /// Collective. @throws Timeout
  explicit ProcessMemory(Bootstrap& bootstrap);

  /// Collective: [W] blocks of size_bytes >= 0 zeros, mapped here, by rank.
  /// @throws InvalidArgument when sizes differ; TransportError on all ranks when the host has not
  ///   so much shared memory; Timeout
  [[nodiscard]] std::vector<std::shared_ptr<void>> make(Bootstrap& bootstrap,
                                                        std::int64_t size_bytes,
                                                        std::string_view name);

  /// Collective: the next blocks, without bytes yet.
  [[nodiscard]] std::vector<SharedFile> open(Bootstrap& bootstrap, const std::string& operation);

 private:
  /// What a rank says of itself.
  struct ProcessId {
    std::array<std::byte, 16> random;
    std::int64_t process;
  };

  [[nodiscard]] std::vector<std::string> names_of(std::int64_t number) const;

  std::vector<ProcessId> all_;
  std::int64_t num_blocks_ = 0;
};

}  // namespace waybill::detail
