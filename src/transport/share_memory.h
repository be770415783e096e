#pragma once

#include "transport/bootstrap/wire.h"

namespace waybill {

/// Collective, for ranks that are threads of one process: every rank gives one block and holds all
/// of them afterwards. All must give the same `size`.
/// @throws InvalidArgument on all ranks when sizes differ; Unsupported when a rank is another
///   process; Timeout.
[[nodiscard]] std::vector<std::shared_ptr<void>> share_memory(Bootstrap& bootstrap,
                                                              std::shared_ptr<void> mine,
                                                              std::int64_t size,
                                                              std::string_view name);

/// @throws InvalidArgument naming a rank that asks for another size than this one
template <class Info, class Size>
void require_same_size(const std::vector<Info>& infos, Size Info::*size, std::int64_t mine,
                       std::string_view operation) {
  for (std::size_t r = 0; r < infos.size(); ++r) {
    require(infos[r].*size == mine, operation, ": size_bytes = ", mine, ", but ", infos[r].*size,
            " on rank ", r);
  }
}

namespace detail {

/// POSIX shared memory that processes of one host open by name. The name may go as soon as all have
/// opened it; the memory lives until no process has it open or mapped, however processes end.
class SharedFile {
 public:
  SharedFile() = default;

  /// Makes it, empty, for this user alone. @throws TransportError, also when there is one
  [[nodiscard]] static SharedFile create(const std::string& name);
  /// @throws TransportError unless it is of this user and still empty
  [[nodiscard]] static SharedFile open(const std::string& name);

  /// Does nothing when there is none.
  static void unlink(const std::string& name) noexcept;

  /// Reserves so many zeros: no later write can fail for want of memory.
  /// @throws TransportError when the host has too little
  void reserve(std::int64_t size_bytes) const;

  /// Marks it as this process', until the process ends or the object is destroyed. @return false if
  /// the host has no such marks
  [[nodiscard]] bool mark() const noexcept;

  /// Says whether another process has marked it and exists.
  [[nodiscard]] bool is_marked() const noexcept;

  /// Maps size_bytes > 0 bytes, which outlive the object. @throws TransportError also when fewer
  /// are reserved, as using them would end the process
  [[nodiscard]] std::shared_ptr<void> map(std::int64_t size_bytes) const;

 private:
  explicit SharedFile(int descriptor) : descriptor_(descriptor) {}

  Descriptor descriptor_;
};

/// Blocks of POSIX shared memory, one per rank, for ranks that are processes of one host. They have
/// names only while they are made, so they end with the last process that has them.
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

  /// Collective: opens the next blocks, which have no bytes yet.
  [[nodiscard]] std::vector<SharedFile> open(Bootstrap& bootstrap, const std::string& operation);

 private:
  struct ProcessId {
    std::array<std::byte, 16> random;
    std::int64_t process;
  };

  [[nodiscard]] std::vector<std::string> names_of(std::int64_t number) const;

  std::vector<ProcessId> all_;
  std::int64_t num_blocks_ = 0;
};

}  // namespace detail
}  // namespace waybill
