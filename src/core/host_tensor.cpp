#include "waybill/core/host_tensor.h"

#include <cstring>
#include <new>
#include <utility>

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
