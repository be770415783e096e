#include "waybill/core/host_tensor.h"

#include <cstring>
#include <new>

#include "waybill/core/error.h"

namespace waybill {

void Shape::throw_too_long() {
  throw_invalid("Shape: more than ", max_axes, " axes, expected at most ", max_axes);
}

std::int64_t num_elements(std::span<const std::int64_t> shape, const char* who) {
  constexpr std::int64_t limit = std::int64_t{1} << 62;
  std::int64_t product = 1;
  for (const std::int64_t extent : shape) {
    if (extent < 0) {
      throw_invalid(who, ": shape = ", to_string(shape), ", expected no negative extent");
    }
  }
  for (const std::int64_t extent : shape) {
    if (extent == 0) return 0;
  }
  for (const std::int64_t extent : shape) {
    if (extent > limit / product) {
      throw_invalid(who, ": shape = ", to_string(shape), ", expected at most 2^62 elements");
    }
    product *= extent;
  }
  return product;
}

std::string to_string(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string(shape[axis]);
  }
  return text + "]";
}

std::int64_t normalize_dim(std::int64_t dim, std::int64_t ndim, const char* who) {
  require(-ndim <= dim && dim < ndim, who, ": dim = ", dim, ", expected ", -ndim, "..", ndim - 1,
          " for an array of ", ndim, " dimensions");
  return dim < 0 ? dim + ndim : dim;
}

}  // namespace waybill

namespace waybill::detail {

std::int64_t check_view_as(DType dtype, const Shape& shape, const Shape& strides,
                           std::size_t element_bytes) {
  constexpr const char* who = "TensorView::as";
  require(element_bytes == static_cast<std::size_t>(dtype_bytes(dtype)), who, ": elements of ",
          element_bytes, " bytes, expected ", dtype_bytes(dtype), ", as ", dtype, " has");
  require(strides.size() == shape.size(), who, ": ", strides.size(), " strides, expected ",
          shape.size());
  const std::int64_t count = num_elements(shape, who);
  if (count == 0) return 0;
  const Shape contiguous = TensorView::contiguous_strides(shape);
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    require(shape[axis] == 1 || strides[axis] == contiguous[axis], who, ": strides ",
            to_string(strides), " of shape ", to_string(shape), ", expected a contiguous view");
  }
  return count;
}

}  // namespace waybill::detail

namespace waybill {
namespace {

constexpr std::size_t alignment = 64;  // a cache line, and the widest vector load

}  // namespace

HostTensor::HostTensor(DType dtype, Shape shape) : dtype_(dtype), shape_(shape) {
  const std::int64_t element_bytes = dtype_bytes(dtype);
  const std::int64_t elements = num_elements(shape_, "HostTensor");
  require(elements <= (std::int64_t{1} << 62) / element_bytes,
          "HostTensor: shape = ", to_string(shape_), " of ", dtype,
          ", expected at most 2^62 bytes");
  size_bytes_ = elements * element_bytes;
  if (size_bytes_ == 0) return;
  // calloc rather than aligned_alloc and a fill: large blocks come as zero pages, untouched.
  memory_.reset(std::calloc(static_cast<std::size_t>(size_bytes_) + alignment - 1, 1));
  if (!memory_) throw std::bad_alloc();
  void* first = memory_.get();
  std::size_t space = static_cast<std::size_t>(size_bytes_) + alignment - 1;
  first_ = static_cast<std::byte*>(
      std::align(alignment, static_cast<std::size_t>(size_bytes_), first, space));
}

HostTensor::HostTensor(const HostTensor& other) : HostTensor(other.dtype_, other.shape_) {
  if (size_bytes_ > 0) std::memcpy(first_, other.first_, static_cast<std::size_t>(size_bytes_));
}

HostTensor& HostTensor::operator=(const HostTensor& other) {
  if (this != &other) *this = HostTensor(other);
  return *this;
}

void HostTensor::check_element_size(std::size_t bytes) const {
  require(static_cast<std::int64_t>(bytes) == dtype_bytes(dtype_),
          "HostTensor::as: an element type of ", bytes, " bytes, expected ", dtype_bytes(dtype_),
          " for ", dtype_);
}

}  // namespace waybill
