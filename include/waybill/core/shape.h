#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <span>
#include <string>

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

}  // namespace waybill
