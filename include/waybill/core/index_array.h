#pragma once

#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "waybill/core/dtype.h"
#include "waybill/core/host_tensor.h"
#include "waybill/core/table_allocator.h"

namespace waybill {

/// An owning, contiguous array of indices, counts or flags: what DistCA keeps in integer
/// tensors. Types: bool, int32, uint32, int64 (the default), uint64.
class IndexArray {
 public:
  /// Shape [0], int64.
  IndexArray();

  /// Zero-filled. @throws InvalidArgument for a negative extent, more than 2^62 bytes or an
  ///   unsupported dtype; std::bad_alloc.
  explicit IndexArray(Shape shape, DType dtype = DType::int64);

  /// Holds `values`, row-major. @throws InvalidArgument if their number does not fit `shape`.
  IndexArray(Shape shape, const std::vector<std::int64_t>& values);

  /// A copy of elements that lie in memory, row-major: as many as `shape` has, of `dtype`.
  /// @throws InvalidArgument for a negative extent or an unsupported dtype.
  [[nodiscard]] static IndexArray copy_of(const void* elements, Shape shape, DType dtype);

  /// From (nested) lists: `IndexArray::matrix({{1, 2, -1}, {0, 3, 4}})`.
  /// @throws InvalidArgument when the rows differ in length.
  using Row = std::initializer_list<std::int64_t>;
  using Matrix = std::initializer_list<Row>;
  using Cube = std::initializer_list<Matrix>;
  [[nodiscard]] static IndexArray vector(Row values);
  [[nodiscard]] static IndexArray matrix(Matrix values);
  [[nodiscard]] static IndexArray cube(Cube values);

  /// Every element equal to `value`, int64.
  [[nodiscard]] static IndexArray full(Shape shape, std::int64_t value);

  [[nodiscard]] const Shape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::int64_t dim(std::int64_t axis) const;
  [[nodiscard]] std::int64_t ndim() const noexcept {
    return static_cast<std::int64_t>(shape_.size());
  }
  [[nodiscard]] std::int64_t size() const noexcept;
  [[nodiscard]] DType dtype() const noexcept;

  /// Elements of an int64 array. @throws InvalidArgument for another dtype.
  [[nodiscard]] std::span<const std::int64_t> i64() const;
  [[nodiscard]] std::span<std::int64_t> i64();

  /// First byte of the elements, for upload and for zero-copy views.
  [[nodiscard]] const void* data() const noexcept;
  [[nodiscard]] void* data() noexcept;

  /// One element, widened. Indices are not negative.
  /// @throws InvalidArgument out of bounds, or for a uint64 value over 2^63 - 1.
  [[nodiscard]] std::int64_t at(std::initializer_list<std::int64_t> idx) const;
  [[nodiscard]] std::int64_t flat_at(std::int64_t element_idx) const;

  /// All elements, widened to int64.
  [[nodiscard]] std::vector<std::int64_t> to_vector() const;

  /// Converts, checking that every value fits. A value for bool must be 0 or 1.
  /// @throws InvalidArgument "name[1, 3] = ... does not fit int32": the first element that does
  /// not.
  [[nodiscard]] IndexArray to(DType dtype, const char* name = "array") const;

  /// The same elements under another shape of equal size.
  [[nodiscard]] IndexArray reshaped(Shape shape) const;

  /// Row `idx` along the first axis, as an array of its own.
  [[nodiscard]] IndexArray row(std::int64_t idx) const;

  /// Equal when shape, dtype and elements are.
  friend bool operator==(const IndexArray&, const IndexArray&) = default;

 private:
  // Bytes are bools: vector<bool> packs bits and has no data().
  using Storage =
      std::variant<detail::TableVector<std::int64_t>, detail::TableVector<std::int32_t>,
                   detail::TableVector<std::uint32_t>, detail::TableVector<std::uint64_t>,
                   detail::TableVector<std::uint8_t>>;
  static Storage make_storage(DType dtype, std::int64_t size);

  Shape shape_{0};
  Storage storage_;
};

/// Nested brackets, as Python prints a tensor: "[[1, 2], [3, -1]]".
[[nodiscard]] std::string to_string(const IndexArray& array);
std::ostream& operator<<(std::ostream& out, const IndexArray& array);

/// A read-only int64 view of an IndexArray of any dtype; converts only when it must.
class Int64View {
 public:
  explicit Int64View(const IndexArray& array);
  [[nodiscard]] std::span<const std::int64_t> span() const noexcept { return span_; }
  [[nodiscard]] std::int64_t operator[](std::int64_t idx) const {
    return span_[static_cast<std::size_t>(idx)];
  }
  Int64View(const Int64View&) = delete;
  Int64View& operator=(const Int64View&) = delete;

 private:
  std::vector<std::int64_t> converted_;
  std::span<const std::int64_t> span_;
};

}  // namespace waybill
