#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

#include "waybill/core/dtype.h"
#include "waybill/core/error.h"

namespace waybill {

/// Extents (or strides), outermost first: at most max_axes of them, held here, so that a copy takes
/// no memory. An empty shape is a scalar (one element). Read and compared like a std::vector.
class Shape {
 public:
  using value_type = std::int64_t;
  using iterator = std::int64_t*;
  using const_iterator = const std::int64_t*;
  static constexpr std::size_t max_axes = 8;

  Shape() = default;
  /// @throws InvalidArgument for more than max_axes; so do all that make a shape longer.
  Shape(std::initializer_list<std::int64_t> extents) : Shape(extents.begin(), extents.end()) {}
  explicit Shape(std::span<const std::int64_t> extents) : Shape(extents.begin(), extents.end()) {}
  template <std::forward_iterator Iterator>
  Shape(Iterator first, Iterator last) {
    for (; first != last; ++first) push_back(static_cast<std::int64_t>(*first));
  }
  /// Extents of 0.
  explicit Shape(std::size_t num_axes) : size_(checked(num_axes)) {}

  void push_back(std::int64_t extent) {
    size_ = checked(size_ + 1);
    extents_[size_ - 1] = extent;
  }
  void pop_back() noexcept { extents_[--size_] = 0; }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] std::int64_t& operator[](std::size_t axis) noexcept { return extents_[axis]; }
  [[nodiscard]] std::int64_t operator[](std::size_t axis) const noexcept { return extents_[axis]; }
  /// The innermost one.
  [[nodiscard]] std::int64_t& back() noexcept { return extents_[size_ - 1]; }
  [[nodiscard]] std::int64_t back() const noexcept { return extents_[size_ - 1]; }
  [[nodiscard]] iterator begin() noexcept { return extents_.data(); }
  [[nodiscard]] iterator end() noexcept { return begin() + size_; }
  [[nodiscard]] const_iterator begin() const noexcept { return extents_.data(); }
  [[nodiscard]] const_iterator end() const noexcept { return begin() + size_; }
  [[nodiscard]] std::int64_t* data() noexcept { return extents_.data(); }
  [[nodiscard]] const std::int64_t* data() const noexcept { return extents_.data(); }

  friend bool operator==(const Shape& a, const Shape& b) noexcept {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  [[noreturn, gnu::cold]] static void throw_too_long();
  static std::size_t checked(std::size_t num_axes) {
    if (num_axes > max_axes) [[unlikely]] {
      throw_too_long();
    }
    return num_axes;
  }

  std::array<std::int64_t, max_axes> extents_{};
  std::size_t size_ = 0;
};

/// Number of elements.
/// @throws InvalidArgument for a negative extent or a product over 2^62; `who` begins the text.
[[nodiscard]] std::int64_t num_elements(std::span<const std::int64_t> shape, const char* who);

/// "[4, 7, 2]"
[[nodiscard]] std::string to_string(std::span<const std::int64_t> shape);

/// Maps -ndim..ndim-1 to 0..ndim-1.
/// @throws InvalidArgument outside of that; `who` begins the text.
[[nodiscard]] std::int64_t normalize_dim(std::int64_t dim, std::int64_t ndim, const char* who);

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

#ifdef __CUDACC__  // nvcc says of a view of constants that it does not convert to itself
#pragma nv_diagnostic push
#pragma nv_diag_suppress 554
#endif
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
#ifdef __CUDACC__
#pragma nv_diagnostic pop
#endif

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

/// A tensor in host memory that owns its elements: contiguous, row-major, the first one on a
/// 64-byte boundary. It starts as zeros; pages that are never written cost nothing on Linux.
class HostTensor {
 public:
  /// Shape [0], uint8.
  HostTensor() = default;

  /// Zeros. @throws InvalidArgument for a negative extent or more than 2^62 bytes; std::bad_alloc.
  HostTensor(DType dtype, Shape shape);

  HostTensor(const HostTensor& other);
  HostTensor& operator=(const HostTensor& other);
  HostTensor(HostTensor&&) noexcept = default;
  HostTensor& operator=(HostTensor&&) noexcept = default;
  ~HostTensor() = default;

  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] const Shape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::int64_t size_bytes() const noexcept { return size_bytes_; }

  [[nodiscard]] std::span<std::byte> bytes() noexcept {
    return {first_, static_cast<std::size_t>(size_bytes_)};
  }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
    return {first_, static_cast<std::size_t>(size_bytes_)};
  }

  /// The elements as T. @throws InvalidArgument when T has another size than the dtype.
  template <class T>
  [[nodiscard]] std::span<T> as() {
    check_element_size(sizeof(T));
    return {reinterpret_cast<T*>(first_), static_cast<std::size_t>(size_bytes_) / sizeof(T)};
  }
  template <class T>
  [[nodiscard]] std::span<const T> as() const {
    check_element_size(sizeof(T));
    return {reinterpret_cast<const T*>(first_), static_cast<std::size_t>(size_bytes_) / sizeof(T)};
  }

  /// Valid while *this lives and is not assigned to.
  [[nodiscard]] TensorView view() { return {first_, dtype_, shape_}; }
  [[nodiscard]] ConstTensorView view() const { return {first_, dtype_, shape_}; }

 private:
  struct Free {
    void operator()(void* memory) const noexcept { std::free(memory); }
  };
  void check_element_size(std::size_t bytes) const;

  DType dtype_ = DType::uint8;
  Shape shape_{0};
  std::int64_t size_bytes_ = 0;
  std::unique_ptr<void, Free> memory_;
  std::byte* first_ = nullptr;
};

}  // namespace waybill
