#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "waybill/core/dtype.h"
#include "word_size.h"

namespace waybill::cuda {

// How each dtype is stored, and what it is summed in. The roundings are those of float_convert.h;
// only the payload of a NaN that a sum makes may differ from the host's.

struct Float32 {
  using Stored = float;
  using Sum = float;
  __device__ static Sum load(Stored value) { return value; }
  __device__ static Stored round(Sum value) { return value; }
};

struct Float64 {
  using Stored = double;
  using Sum = double;
  __device__ static Sum load(Stored value) { return value; }
  __device__ static Stored round(Sum value) { return value; }
};

struct BFloat16 {
  using Stored = std::uint16_t;
  using Sum = float;
  __device__ static Sum load(Stored value) {
    return __uint_as_float(static_cast<unsigned>(value) << 16);
  }
  __device__ static Stored round(Sum value) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
};

struct Float16 {
  using Stored = std::uint16_t;
  using Sum = float;
  __device__ static Sum load(Stored value) { return __half2float(__ushort_as_half(value)); }
  __device__ static Stored round(Sum value) { return __half_as_ushort(__float2half_rn(value)); }
};

/// The number with index `i` of those that lie there.
template <class Number>
__device__ inline typename Number::Sum number_at(const std::byte* numbers, std::int64_t i) {
  return Number::load(reinterpret_cast<const typename Number::Stored*>(numbers)[i]);
}

/// Numbers that are loaded and stored together.
template <class Number, int Count>
struct alignas(Count * sizeof(typename Number::Stored)) Pack {
  static constexpr int count = Count;
  typename Number::Stored values[Count];
};
/// As many as a thread loads at once.
template <class Number>
using WidePack = Pack<Number, widest_word / static_cast<int>(sizeof(typename Number::Stored))>;

/// Calls `make` with the Number of a dtype that rows are summed in or weighted by: for the choice
/// of a kernel. @return what it returns; for another dtype a null pointer of that type
template <class Make>
auto for_number(DType dtype, Make&& make) -> decltype(make(Float32{})) {
  switch (dtype) {
    case DType::float32:
      return make(Float32{});
    case DType::bfloat16:
      return make(BFloat16{});
    case DType::float16:
      return make(Float16{});
    default:
      return nullptr;
  }
}

}  // namespace waybill::cuda
