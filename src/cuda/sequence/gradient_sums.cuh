#pragma once

#include <type_traits>

#include "../device/number.cuh"
#include "launch.h"

namespace waybill::cuda {

// What a warp adds up: a piece of a chunk's bytes at a time.

inline constexpr int piece_bytes = max_gradient_chunk_bytes;
inline constexpr int words_a_lane = piece_bytes / widest_word / 32;

/// Where byte `offset` of a chunk (counted in the addends) goes.
template <class In, class Out>
__device__ std::byte* output_of(const TensorParams& output, const RowChunk& chunk, int offset) {
  constexpr auto in_bytes = static_cast<int>(sizeof(typename In::Stored));
  constexpr auto out_bytes = static_cast<int>(sizeof(typename Out::Stored));
  const int row = chunk.rows == 1 ? 0 : offset / chunk.part_bytes;
  const int col = chunk.col_bytes + offset - row * chunk.part_bytes;
  return output.data + (chunk.row + row) * output.pitch_bytes + col / in_bytes * out_bytes;
}

/// Where the sums of a batch of this kind go that are not rounded: rows of the window.
__device__ inline TensorParams sums_on_the_way(const SequenceParams& p, std::int32_t tensor) {
  const std::int32_t entry = p.head->num_tensors + tensor;
  return {p.own_window + p.head->window_offsets[entry], p.head->cuts[entry].row_bytes};
}

/// What sums of a number are kept in on the way.
template <class In>
using SumOf = std::conditional_t<std::is_same_v<In, Float64>, Float64, Float32>;

/// One lane's share of a chunk: words lane, lane + 32, ...
template <class In>
struct Sums {
  using Stored = typename In::Stored;
  using Sum = typename In::Sum;
  static constexpr int elements = WidePack<In>::count;

  template <bool First>
  __device__ void add(const std::byte* addend, int bytes) {
#pragma unroll
    for (int w = 0; w < words_a_lane; ++w) {
      const int offset = (w * 32 + static_cast<int>(threadIdx.x % 32)) * widest_word;
      if (offset >= bytes) continue;
      const auto in = *reinterpret_cast<const WidePack<In>*>(addend + offset);
#pragma unroll
      for (int e = 0; e < elements; ++e) {
        const Sum value = In::load(in.values[e]);
        sums[w][e] = First ? value : sums[w][e] + value;
      }
    }
  }

  /// An addend that is a sum itself: `bytes` are those of the chunk in its own type.
  template <bool First>
  __device__ void add_sum(const std::byte* addend, int bytes) {
#pragma unroll
    for (int w = 0; w < words_a_lane; ++w) {
      const int offset = (w * 32 + static_cast<int>(threadIdx.x % 32)) * widest_word;
      if (offset >= bytes) continue;
      struct alignas(16) Values {
        Sum values[elements];
      };
      constexpr auto scale = static_cast<int>(sizeof(Sum) / sizeof(Stored));
      const auto in = *reinterpret_cast<const Values*>(addend + offset * scale);
#pragma unroll
      for (int e = 0; e < elements; ++e) {
        sums[w][e] = First ? in.values[e] : sums[w][e] + in.values[e];
      }
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int w = 0; w < words_a_lane; ++w) {
#pragma unroll
      for (int e = 0; e < elements; ++e) sums[w][e] = Sum{0};
    }
  }

  template <class To>
  __device__ void write(const TensorParams& output, const RowChunk& chunk) const {
    const int bytes = chunk.rows * chunk.part_bytes;
#pragma unroll
    for (int w = 0; w < words_a_lane; ++w) {
      const int offset = (w * 32 + static_cast<int>(threadIdx.x % 32)) * widest_word;
      if (offset >= bytes) continue;
      struct alignas(16) Rounded {
        typename To::Stored values[elements];
      } out;
#pragma unroll
      for (int e = 0; e < elements; ++e) out.values[e] = To::round(sums[w][e]);
      *reinterpret_cast<Rounded*>(output_of<In, To>(output, chunk, offset)) = out;
    }
  }

  Sum sums[words_a_lane][elements];
};

}  // namespace waybill::cuda
