#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace waybill::detail {

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
