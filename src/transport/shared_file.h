#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace waybill::detail {

/// POSIX shared memory that processes of one host open by name. The name may go as soon as all have
/// opened it; the memory lives as long as somebody has it open or mapped, a process that is killed
/// included.
class SharedFile {
 public:
  SharedFile() = default;
  SharedFile(SharedFile&& other) noexcept;
  SharedFile& operator=(SharedFile&& other) noexcept;
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;
  ~SharedFile();

  /// Makes it, empty, for this user alone. @throws TransportError, also when there is one
  [[nodiscard]] static SharedFile create(const std::string& name);
  /// @throws TransportError unless it is of this user and still empty
  [[nodiscard]] static SharedFile open(const std::string& name);

  /// Does nothing when there is none.
  static void unlink(const std::string& name) noexcept;

  /// Makes it so many zeros, all of them there: no later write can fail for want of memory.
  /// @throws TransportError when the host has not that much
  void reserve(std::int64_t size_bytes) const;

  /// Marks it as this process', until that ends or the object goes. @return false where the host
  /// has no such marks
  [[nodiscard]] bool mark() const noexcept;

  /// Whether another process has marked it and is there.
  [[nodiscard]] bool is_marked() const noexcept;

  /// This process' view of size_bytes > 0 bytes, which outlives the object. @throws TransportError
  /// also when fewer have been reserved, as using them would end the process
  [[nodiscard]] std::shared_ptr<void> map(std::int64_t size_bytes) const;

 private:
  explicit SharedFile(int descriptor) : descriptor_(descriptor) {}

  int descriptor_ = -1;
};

}  // namespace waybill::detail
