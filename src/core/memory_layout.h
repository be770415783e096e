#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace waybill::detail {

/// Parts of one block of memory, one after another, each at a multiple of 256 bytes.
class MemoryLayout {
 public:
  /// @param first bytes that are taken before
  explicit MemoryLayout(std::int64_t first = 0) : total_(first) {}

  /// @return the first byte of the next part: `count` elements
  std::int64_t take(std::int64_t count, std::int64_t element_bytes) {
    constexpr std::int64_t alignment = 256;
    const std::int64_t part = total_;
    total_ += (count * element_bytes + alignment - 1) / alignment * alignment;
    return part;
  }
  std::int64_t take(std::int64_t size_bytes) { return take(size_bytes, 1); }

  [[nodiscard]] std::int64_t total() const { return total_; }

 private:
  std::int64_t total_;
};

/// Move assignment for classes whose members must be destroyed in their order, such as memory
/// before the world that it belongs to: destroys `to`, and makes it anew from `from`.
template <class T>
void move_assign(T& to, std::type_identity_t<T>&& from) noexcept {
  static_assert(std::is_nothrow_move_constructible_v<T>);
  if (&to == &from) return;
  std::destroy_at(&to);
  std::construct_at(&to, std::move(from));
}

}  // namespace waybill::detail
