#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "waybill/core/dtype.h"
#include "waybill/core/error.h"
#include "waybill/core/shape.h"
#include "waybill/core/tensor_view.h"

namespace waybill {

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
