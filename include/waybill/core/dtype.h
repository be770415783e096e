#pragma once

#include <cstdint>
#include <iosfwd>
#include <string_view>

namespace waybill {

/// Element types of tensors. Names as in PyTorch.
enum class DType : std::uint8_t {
  boolean,
  int8,
  uint8,
  int16,
  int32,
  uint32,
  int64,
  uint64,
  float8_e4m3fn,
  float8_e5m2,
  float16,
  bfloat16,
  float32,
  float64,
};

/// Bytes of one element.
[[nodiscard]] std::int64_t dtype_bytes(DType dtype);

/// PyTorch's name without "torch.": "int64", "bfloat16", "bool".
[[nodiscard]] std::string_view dtype_name(DType dtype);

/// The inverse of dtype_name; also takes "fp8", "fp16", "bf16", "fp32", "fp64" and "bytes".
/// @throws InvalidArgument for any other name; the text lists the names.
[[nodiscard]] DType dtype_from_name(std::string_view name);

std::ostream& operator<<(std::ostream& out, DType dtype);

}  // namespace waybill
