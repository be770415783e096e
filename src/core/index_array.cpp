#include "waybill/core/index_array.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <ostream>
#include <type_traits>
#include <utility>

#include "waybill/core/error.h"
#include "waybill/core/table_allocator.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace waybill::detail {
namespace {

constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

}  // namespace

void* allocate_table_memory(std::size_t num_bytes) {
  const bool huge = num_bytes >= huge_page_bytes;
  void* memory = nullptr;
  if (posix_memalign(&memory, huge ? huge_page_bytes : 64, num_bytes) != 0) throw std::bad_alloc();
#ifdef __linux__
  // Advice only: where it is refused the table lies in small pages. The last, partial page stays
  // small, so that no memory is taken that the table does not have.
  if (huge) madvise(memory, num_bytes / huge_page_bytes * huge_page_bytes, MADV_HUGEPAGE);
#endif
  return memory;
}

void free_table_memory(void* memory) noexcept { std::free(memory); }

}  // namespace waybill::detail

namespace waybill {
namespace {

std::size_t unsigned_size(std::int64_t size) { return static_cast<std::size_t>(size); }

/// Widens any element type; `uint64` values over 2^63 - 1 are refused.
template <class T>
std::int64_t widen(T value) {
  if constexpr (std::is_same_v<T, std::uint64_t>) {
    require(value <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()),
            "IndexArray: uint64 value = ", value, ", expected at most 2^63 - 1");
  }
  return static_cast<std::int64_t>(value);
}

template <class T, class Value>
bool fits(Value value) {
  if constexpr (std::is_same_v<T, std::uint8_t>) {
    return value == 0 || value == 1;  // a bool
  } else {
    return std::in_range<T>(value);
  }
}

// Where the element stands: one index for each axis.
Shape position_of(std::size_t element_idx, const Shape& shape) {
  Shape position(shape.size());
  auto rest = static_cast<std::int64_t>(element_idx);
  for (std::size_t axis = shape.size(); axis-- > 0; rest /= shape[axis])
    position[axis] = rest % shape[axis];
  return position;
}

}  // namespace

IndexArray::Storage IndexArray::make_storage(DType dtype, std::int64_t size) {
  require(size <= (std::int64_t{1} << 62) / dtype_bytes(dtype), "IndexArray: ", size,
          " elements of ", dtype, ", expected at most 2^62 bytes");
  const std::size_t n = unsigned_size(size);
  switch (dtype) {
    case DType::int64:
      return detail::TableVector<std::int64_t>(n);
    case DType::int32:
      return detail::TableVector<std::int32_t>(n);
    case DType::uint32:
      return detail::TableVector<std::uint32_t>(n);
    case DType::uint64:
      return detail::TableVector<std::uint64_t>(n);
    case DType::boolean:
      return detail::TableVector<std::uint8_t>(n);
    default:
      throw_invalid("IndexArray: dtype = ", dtype,
                    ", expected bool, int32, uint32, int64 or uint64");
  }
}

IndexArray::IndexArray() : storage_(detail::TableVector<std::int64_t>{}) {}

IndexArray::IndexArray(Shape shape, DType dtype)
    : shape_(shape), storage_(make_storage(dtype, num_elements(shape_, "IndexArray"))) {}

IndexArray::IndexArray(Shape shape, const std::vector<std::int64_t>& values)
    : shape_(shape), storage_(detail::TableVector<std::int64_t>(values.begin(), values.end())) {
  const std::int64_t expected = num_elements(shape_, "IndexArray");
  require(size() == expected, "IndexArray: got ", size(), " values, expected ", expected,
          " for shape ", to_string(shape_));
}

IndexArray IndexArray::copy_of(const void* elements, Shape shape, DType dtype) {
  const std::size_t size = unsigned_size(num_elements(shape, "IndexArray::copy_of"));
  IndexArray result({0}, dtype);
  std::visit(
      [&](auto& target) {
        using T = typename std::remove_reference_t<decltype(target)>::value_type;
        const auto* first = static_cast<const T*>(elements);
        target.assign(first, first + size);
      },
      result.storage_);
  result.shape_ = shape;
  return result;
}

IndexArray IndexArray::vector(Row values) {
  return {{static_cast<std::int64_t>(values.size())}, std::vector<std::int64_t>(values)};
}

IndexArray IndexArray::matrix(Matrix values) {
  const std::size_t num_columns = values.size() == 0 ? 0 : values.begin()->size();
  std::vector<std::int64_t> flat;
  for (const Row& row : values) {
    require(row.size() == num_columns, "IndexArray::matrix: a row has ", row.size(),
            " values, expected ", num_columns);
    flat.insert(flat.end(), row.begin(), row.end());
  }
  return {{static_cast<std::int64_t>(values.size()), static_cast<std::int64_t>(num_columns)}, flat};
}

IndexArray IndexArray::cube(Cube values) {
  Shape shape{static_cast<std::int64_t>(values.size()), 0, 0};
  std::vector<std::int64_t> flat;
  for (const Matrix& rows : values) {
    const IndexArray plane = matrix(rows);
    if (flat.empty()) {
      shape[1] = plane.dim(0);
      shape[2] = plane.dim(1);
    }
    require(plane.dim(0) == shape[1] && plane.dim(1) == shape[2], "IndexArray::cube: a plane has ",
            "shape ", to_string(plane.shape()), ", expected [", shape[1], ", ", shape[2], "]");
    const auto elements = plane.i64();
    flat.insert(flat.end(), elements.begin(), elements.end());
  }
  return {shape, flat};
}

IndexArray IndexArray::full(Shape shape, std::int64_t value) {
  IndexArray result(shape);
  std::ranges::fill(result.i64(), value);
  return result;
}

std::int64_t IndexArray::dim(std::int64_t axis) const {
  return shape_[unsigned_size(normalize_dim(axis, ndim(), "IndexArray::dim"))];
}

std::int64_t IndexArray::size() const noexcept {
  return std::visit([](const auto& v) { return static_cast<std::int64_t>(v.size()); }, storage_);
}

DType IndexArray::dtype() const noexcept {
  constexpr DType by_alternative[] = {DType::int64, DType::int32, DType::uint32, DType::uint64,
                                      DType::boolean};
  return by_alternative[storage_.index()];
}

std::span<const std::int64_t> IndexArray::i64() const {
  const auto* values = std::get_if<detail::TableVector<std::int64_t>>(&storage_);
  require(values != nullptr, "IndexArray::i64: dtype = ", dtype(), ", expected int64");
  return *values;
}

std::span<std::int64_t> IndexArray::i64() {
  auto* values = std::get_if<detail::TableVector<std::int64_t>>(&storage_);
  require(values != nullptr, "IndexArray::i64: dtype = ", dtype(), ", expected int64");
  return *values;
}

const void* IndexArray::data() const noexcept {
  return std::visit([](const auto& v) -> const void* { return v.data(); }, storage_);
}

void* IndexArray::data() noexcept {
  return std::visit([](auto& v) -> void* { return v.data(); }, storage_);
}

std::int64_t IndexArray::at(std::initializer_list<std::int64_t> idx) const {
  require(static_cast<std::int64_t>(idx.size()) == ndim(), "IndexArray::at: got ", idx.size(),
          " indices, expected ", ndim());
  std::int64_t flat = 0;
  std::size_t axis = 0;
  for (const std::int64_t i : idx) {
    require(0 <= i && i < shape_[axis], "IndexArray::at: index ", i, " on axis ", axis,
            ", expected 0..", shape_[axis] - 1);
    flat = flat * shape_[axis] + i;
    ++axis;
  }
  return flat_at(flat);
}

std::int64_t IndexArray::flat_at(std::int64_t element_idx) const {
  require(0 <= element_idx && element_idx < size(), "IndexArray::flat_at: index ", element_idx,
          ", expected 0..", size() - 1);
  return std::visit([&](const auto& v) { return widen(v[unsigned_size(element_idx)]); }, storage_);
}

std::vector<std::int64_t> IndexArray::to_vector() const {
  return std::visit(
      [](const auto& v) {
        std::vector<std::int64_t> result(v.size());
        std::transform(v.begin(), v.end(), result.begin(),
                       [](const auto& value) { return widen(value); });
        return result;
      },
      storage_);
}

IndexArray IndexArray::to(DType dtype, const char* name) const {
  IndexArray result(shape_, dtype);
  std::visit(
      [&](const auto& source, auto& target) {
        using T = typename std::remove_reference_t<decltype(target)>::value_type;
        for (std::size_t i = 0; i < target.size(); ++i) {
          const auto value = +source[i];  // a byte is no character
          if (!fits<T>(value)) [[unlikely]] {
            throw_invalid(name, to_string(position_of(i, shape_)), " = ", value, " does not fit ",
                          dtype);
          }
          target[i] = static_cast<T>(value);
        }
      },
      storage_, result.storage_);
  return result;
}

IndexArray IndexArray::reshaped(Shape shape) const {
  require(num_elements(shape, "IndexArray::reshaped") == size(),
          "IndexArray::reshaped: shape = ", to_string(shape), ", expected ", size(), " elements");
  IndexArray result = *this;
  result.shape_ = shape;
  return result;
}

IndexArray IndexArray::row(std::int64_t idx) const {
  require(ndim() >= 1 && 0 <= idx && idx < shape_[0], "IndexArray::row: index ", idx,
          " of an array of shape ", to_string(shape_));
  IndexArray result(Shape(shape_.begin() + 1, shape_.end()), dtype());
  const std::int64_t row_size = result.size();
  std::visit(
      [&](auto& target) {
        const auto& source = std::get<std::remove_reference_t<decltype(target)>>(storage_);
        std::copy_n(source.begin() + idx * row_size, row_size, target.begin());
      },
      result.storage_);
  return result;
}

std::string to_string(const IndexArray& array) {
  const Shape& shape = array.shape();
  const auto element = [&](std::int64_t idx) {  // uint64 has values that no int64 has
    if (array.dtype() != DType::uint64) return std::to_string(array.flat_at(idx));
    return std::to_string(static_cast<const std::uint64_t*>(array.data())[idx]);
  };
  std::string text;
  std::int64_t next = 0;
  const auto print = [&](const auto& self, std::size_t axis) -> void {
    if (axis == shape.size()) {
      text += element(next++);
      return;
    }
    text += '[';
    for (std::int64_t i = 0; i < shape[axis]; ++i) {
      if (i > 0) text += ", ";
      self(self, axis + 1);
    }
    text += ']';
  };
  print(print, 0);
  return text;
}

std::ostream& operator<<(std::ostream& out, const IndexArray& array) {
  return out << to_string(array);
}

Int64View::Int64View(const IndexArray& array) {
  if (array.dtype() == DType::int64) {
    span_ = array.i64();
  } else {
    converted_ = array.to_vector();
    span_ = converted_;
  }
}

}  // namespace waybill
