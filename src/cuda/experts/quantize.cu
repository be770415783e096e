// Rows are quantised on their own rank before they travel.

#include <cstring>
#include <string_view>

#include "../device/number.cuh"
#include "call.cuh"
#include "kernels.h"
#include "quantize.cuh"

namespace waybill::cuda {
namespace {

constexpr int threads = 256;
constexpr int tile_elements = threads * lane_elements;
constexpr int held_tiles = 4;  ///< tiles that a block loads at once and keeps in registers
constexpr int held_elements = held_tiles * tile_elements;

/// A lane's elements as they are stored, held in words.
template <class Number>
struct Eight {
  static constexpr int num_words = lane_elements *
                                   static_cast<int>(sizeof(typename Number::Stored)) /
                                   static_cast<int>(sizeof(uint4));
  uint4 words[num_words];

  __device__ void unpack(float (&x)[lane_elements]) const {
    Pack<Number, lane_elements> pack;
    std::memcpy(&pack, words, sizeof(words));
#pragma unroll
    for (int e = 0; e < lane_elements; ++e) x[e] = Number::load(pack.values[e]);
  }
};

/// Loads neighbouring elements, which leave the caches first: nobody reads them again soon. @tparam
/// Wide they are aligned to 16 bytes
template <class Number, bool Wide>
__device__ Eight<Number> load_eight(const std::byte* input, std::int64_t at) {
  using Stored = typename Number::Stored;
  const auto* const from = reinterpret_cast<const Stored*>(input) + at;
  Eight<Number> eight;
  if constexpr (Wide) {
#pragma unroll
    for (int w = 0; w < Eight<Number>::num_words; ++w) {
      eight.words[w] = __ldcs(reinterpret_cast<const uint4*>(from) + w);
    }
  } else {
    Pack<Number, lane_elements> pack;
#pragma unroll
    for (int e = 0; e < lane_elements; ++e) pack.values[e] = from[e];
    std::memcpy(eight.words, &pack, sizeof(pack));
  }
  return eight;
}

/// The largest size_bits() of a group's elements. All lanes of a warp.
template <class Format, class Number>
__device__ std::uint32_t largest_of_group(const Eight<Number>& eight) {
  float x[lane_elements];
  eight.unpack(x);
  std::uint32_t largest = 0;
#pragma unroll
  for (const float value : x) largest = max(largest, size_bits(value));
#pragma unroll
  for (int step = Format::group / lane_elements / 2; step > 0; step /= 2) {
    largest = max(largest, __shfl_xor_sync(all_lanes, largest, step));
  }
  return largest;
}

__device__ std::uint32_t largest_of_block(std::uint32_t largest) {
  __shared__ std::uint32_t of_warps[threads / 32];
  largest = __reduce_max_sync(all_lanes, largest);
  if (lane_id() == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < threads / 32; ++w) largest = max(largest, of_warps[w]);
  return largest;
}

/// Elements that one block quantises: a row if the format has a scale of the row, else as many as
/// it holds, of any rows.
struct Span {
  std::int64_t first;
  std::int64_t count;
  std::byte* scales;
};

template <class Format>
__device__ Span own_span(const QuantizeParams& p) {
  const std::int64_t block = blockIdx.x;
  if constexpr (Format::has_row_scale) {
    return {block * p.hidden, p.hidden, p.scales + block * p.scale_bytes};
  } else {
    constexpr std::int64_t scale_bytes =
        held_elements / Format::group * std::int64_t{sizeof(typename Format::Scale)};
    const std::int64_t first = block * held_elements;
    const std::int64_t left = p.num_rows * p.hidden - first;
    return {first, min(left, std::int64_t{held_elements}), p.scales + block * scale_bytes};
  }
}

/// Quantises a lane's elements, which begin at `at` of the span.
template <class Format, class Number>
__device__ void store_eight(const QuantizeParams& p, const Span& span, std::int64_t at,
                            const Eight<Number>& eight, std::uint32_t largest,
                            const typename Format::Row& row) {
  using Elements = typename Format::Elements;
  float x[lane_elements];
  eight.unpack(x);
  const Format group(largest, row);
  reinterpret_cast<Elements*>(p.elements)[(span.first + at) / lane_elements] = group.quantize(x);
  if (at % Format::group == 0) {
    reinterpret_cast<typename Format::Scale*>(span.scales)[at / Format::group] = group.scale();
  }
}

/// Writes the scale of a row, and zeros between it and those of the groups. @see PayloadFormat
template <class Format>
__device__ void store_row_scale(const QuantizeParams& p, const Span& span, float scale) {
  const std::int64_t end = p.scale_bytes - std::int64_t{sizeof(scale)};
  for (std::int64_t i = span.count / Format::group + threadIdx.x; i < end; i += threads) {
    span.scales[i] = std::byte{0};
  }
  if (threadIdx.x == 0) *reinterpret_cast<float*>(span.scales + end) = scale;
}

template <class Format, class Number, bool Wide>
__global__ void __launch_bounds__(threads)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
  const Span span = own_span<Format>(p);
  const auto mine = static_cast<std::int64_t>(threadIdx.x) * lane_elements;
  // Lanes without elements take part in the exchanges of their warps, with zeros.
  const auto load = [&](std::int64_t at) {
    return at < span.count ? load_eight<Number, Wide>(p.input, span.first + at) : Eight<Number>{};
  };
  Eight<Number> held[held_tiles];
  std::uint32_t largest[held_tiles];
#pragma unroll
  for (int t = 0; t < held_tiles; ++t) held[t] = load(t * tile_elements + mine);
#pragma unroll
  for (int t = 0; t < held_tiles; ++t) largest[t] = largest_of_group<Format, Number>(held[t]);
  std::uint32_t of_row = 0;
  if constexpr (Format::has_row_scale) {
    const auto take = [&](std::uint32_t of_group) {
      if (of_group < infinity_bits) of_row = max(of_row, of_group);
    };
#pragma unroll
    for (int t = 0; t < held_tiles; ++t) take(largest[t]);
    for (std::int64_t tile = held_elements; tile < span.count; tile += tile_elements) {
      take(largest_of_group<Format, Number>(load(tile + mine)));
    }
    of_row = largest_of_block(of_row);
  }
  const typename Format::Row row(of_row);
#pragma unroll
  for (int t = 0; t < held_tiles; ++t) {
    const std::int64_t at = t * tile_elements + mine;
    if (at < span.count) store_eight<Format, Number>(p, span, at, held[t], largest[t], row);
  }
  if constexpr (Format::has_row_scale) {
    for (std::int64_t tile = held_elements; tile < span.count; tile += tile_elements) {
      const Eight<Number> eight = load(tile + mine);
      const std::uint32_t of_group = largest_of_group<Format, Number>(eight);
      if (tile + mine < span.count) {
        store_eight<Format, Number>(p, span, tile + mine, eight, of_group, row);
      }
    }
    store_row_scale<Format>(p, span, row.scale);
  }
}

/// A kernel, and whether its blocks take a row each.
struct Quantizer {
  void (*kernel)(QuantizeParams) = nullptr;
  bool by_rows = false;
};

template <class Format>
Quantizer quantizer_to(DType dtype, bool wide) {
  using Kernel = void (*)(QuantizeParams);
  return {for_number(dtype,
                     [&]<class Number>(Number) -> Kernel {
                       return wide ? quantize_kernel<Format, Number, true>
                                   : quantize_kernel<Format, Number, false>;
                     }),
          Format::has_row_scale};
}

/// Formats that GPUs quantise to are named here. Others have no kernel.
Quantizer quantizer_of(std::string_view format, DType dtype, bool wide) {
  if (format == "float8") return quantizer_to<Float8>(dtype, wide);
  if (format == "float8_ue8m0") return quantizer_to<Float8Ue8m0>(dtype, wide);
  if (format == "mxfp8") return quantizer_to<Mxfp8>(dtype, wide);
  if (format == "mxfp8_e5m2") return quantizer_to<Mxfp8E5m2>(dtype, wide);
  if (format == "nvfp4") return quantizer_to<Nvfp4>(dtype, wide);
  return {};
}

}  // namespace

cudaError_t prepare_quantize(std::string_view format, DType dtype) {
  return load_kernels(quantizer_of(format, dtype, false).kernel,
                      quantizer_of(format, dtype, true).kernel);
}

cudaError_t launch_quantize(const QuantizeParams& params, std::string_view format, DType dtype,
                            cudaStream_t stream) {
  const bool wide = reinterpret_cast<std::uintptr_t>(params.input) % 16 == 0;
  const Quantizer quantizer = quantizer_of(format, dtype, wide);
  if (quantizer.kernel == nullptr) return cudaErrorInvalidValue;
  const std::int64_t spans =
      quantizer.by_rows ? params.num_rows
                        : (params.num_rows * params.hidden + held_elements - 1) / held_elements;
  if (spans == 0) return cudaSuccess;
  quantizer.kernel<<<static_cast<unsigned>(spans), threads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
