#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

#include "waybill/core/dtype.h"
#include "waybill/core/shape.h"

namespace waybill {

namespace detail {
/// Elements of a view that is read as contiguous ones of `element_bytes`. @throws InvalidArgument
[[nodiscard]] std::int64_t check_view_as(DType dtype, const Shape& shape, const Shape& strides,
                                         std::size_t element_bytes);
}  // namespace detail

/// A non-owning view of a tensor in host memory. Strides count elements, not bytes, and may be
/// anything (also 0 or negative): slices, transposes and padded rows are views like any other.
template <class Byte>
struct BasicTensorView {
  static_assert(std::is_same_v<std::remove_const_t<Byte>, std::byte>);

  Byte* data = nullptr;
  DType dtype = DType::uint8;
  Shape shape;
  Shape strides;  ///< elements; the length of `shape`

  BasicTensorView() = default;

  /// A contiguous, row-major view.
  BasicTensorView(void* first, DType type, Shape extents) requires(!std::is_const_v<Byte>)
      : data(static_cast<Byte*>(first)), dtype(type), shape(extents) {
    strides = contiguous_strides(shape);
  }
  BasicTensorView(const void* first, DType type, Shape extents) requires(std::is_const_v<Byte>)
      : data(static_cast<Byte*>(first)), dtype(type), shape(extents) {
    strides = contiguous_strides(shape);
  }

  /// A writable view may be read.
  operator BasicTensorView<const std::byte>() const  // NOLINT(google-explicit-constructor)
      requires(!std::is_const_v<Byte>) {
    BasicTensorView<const std::byte> view;
    view.data = data;
    view.dtype = dtype;
    view.shape = shape;
    view.strides = strides;
    return view;
  }

  /// The elements as T. @throws InvalidArgument when T has another size than the dtype, or the view
  ///   is not contiguous
  template <class T>
  [[nodiscard]] auto as() const {
    using Element = std::conditional_t<std::is_const_v<Byte>, const T, T>;
    const std::int64_t count = detail::check_view_as(dtype, shape, strides, sizeof(T));
    return std::span<Element>(reinterpret_cast<Element*>(data), static_cast<std::size_t>(count));
  }

  [[nodiscard]] std::int64_t ndim() const { return static_cast<std::int64_t>(shape.size()); }

  /// For extents of any size, as a view is checked after it is made: a stride that does not fit 63
  /// bits is 2^63 - 1.
  [[nodiscard]] static Shape contiguous_strides(const Shape& extents) {
    Shape result(extents.size());
    std::int64_t step = 1;
    for (std::size_t axis = extents.size(); axis-- > 0;) {
      result[axis] = step;
      if (__builtin_mul_overflow(step, extents[axis], &step))
        step = std::numeric_limits<std::int64_t>::max();
    }
    return result;
  }
};

using TensorView = BasicTensorView<std::byte>;
using ConstTensorView = BasicTensorView<const std::byte>;

}  // namespace waybill
