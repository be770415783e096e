#pragma once

#include <cstddef>
#include <limits>
#include <new>
#include <utility>
#include <vector>

namespace waybill::detail {

/// Memory for tables. From 2 MiB on it begins at a multiple of 2 MiB and asks the system for huge
/// pages, since fetching a table in small pages costs more than filling it.
/// @throws std::bad_alloc
[[nodiscard]] void* allocate_table_memory(std::size_t num_bytes);
void free_table_memory(void* memory) noexcept;

/// An allocator of such memory.
template <class T>
class TableAllocator {
 public:
  using value_type = T;  // NOLINT(readability-identifier-naming): the standard's name

  TableAllocator() = default;
  template <class U>
  TableAllocator(const TableAllocator<U>&) noexcept {}  // NOLINT(google-explicit-constructor)

  [[nodiscard]] T* allocate(std::size_t count) {
    if (count > std::numeric_limits<std::size_t>::max() / sizeof(T))
      throw std::bad_array_new_length();
    return static_cast<T*>(allocate_table_memory(count * sizeof(T)));
  }
  void deallocate(T* memory, std::size_t) noexcept { free_table_memory(memory); }

  friend bool operator==(const TableAllocator&, const TableAllocator&) { return true; }
};

/// A std::vector of such memory; elements start as zero.
template <class T>
using TableVector = std::vector<T, TableAllocator<T>>;

}  // namespace waybill::detail

namespace waybill {

/// An allocator whose vectors leave plain elements unwritten on resize: tables of millions of
/// entries that are filled right after should not be cleared first.
template <class T>
class UninitializedAllocator : public detail::TableAllocator<T> {
 public:
  template <class U>
  struct rebind {  // NOLINT(readability-identifier-naming): the standard's name
    using other = UninitializedAllocator<U>;
  };
  UninitializedAllocator() = default;
  template <class U>
  explicit UninitializedAllocator(const UninitializedAllocator<U>&) noexcept {}

  template <class U>
  void construct(U* at) noexcept {
    ::new (static_cast<void*>(at)) U;
  }
  template <class U, class... Args>
  void construct(U* at, Args&&... args) {
    ::new (static_cast<void*>(at)) U(std::forward<Args>(args)...);
  }
};

/// A std::vector whose resize() leaves new elements indeterminate.
template <class T>
using UninitializedVector = std::vector<T, UninitializedAllocator<T>>;

}  // namespace waybill
