#pragma once

#include <new>
#include <utility>
#include <vector>

#include "waybill/core/table_allocator.h"

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
