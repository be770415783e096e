#include "../device/bulk.cuh"
#include "../device/number.cuh"
#include "launch.h"
#include "meet.cuh"

namespace waybill::cuda {
namespace {

constexpr unsigned all_lanes = 0xFFFFFFFFU;
constexpr int bulk_warps = 6;
constexpr int bulk_stages = 2;
constexpr int slots = 8;  ///< rows of a token that a stage holds
constexpr int piece_bytes = 2048;
constexpr int word_bytes = 16;
constexpr int words_a_lane = piece_bytes / word_bytes / 32;
constexpr int element_warps = 16;

__device__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }

/// One weight as float32.
template <class Weight>
__device__ float weight_of(const std::byte* weights, std::int64_t i) {
  return Weight::load(reinterpret_cast<const typename Weight::Stored*>(weights)[i]);
}

/// Where the rows of one token lie; a lane a choice.
struct TokenRows {
  std::int64_t place;
  float weight;
  unsigned valid;  ///< lanes with a row
};

template <class Weight>
__device__ TokenRows read_token(const CombineParams& p, std::int64_t token) {
  TokenRows rows{-1, 0, 0};
  if (lane_id() < p.shape.topk) {
    const std::int64_t i = token * p.shape.topk + lane_id();
    rows.place = p.places[i];
    if (p.weights != nullptr) rows.weight = weight_of<Weight>(p.weights, i);
  }
  const bool counts = rows.place >= 0 && (rows.place & 0xFFFFFFFF) < p.shape.capacity &&
                      (p.leaders_only == 0 || (rows.place & place_leader_bit) != 0);
  rows.valid = __ballot_sync(all_lanes, counts);
  return rows;
}

__device__ const std::byte* row_at(const CombineParams& p, std::int64_t place) {
  return p.windows[place >> place_dst_shift & 0xFFFF] + (place & 0xFFFFFFFF) * p.row_bytes;
}

template <class Number>
__device__ float sum_with(float sum, typename Number::Stored value, float weight, bool weighted) {
  const float x = Number::load(value);
  return __fadd_rn(sum, weighted ? __fmul_rn(weight, x) : x);
}

template <class Number>
struct alignas(16) Word {
  static constexpr int count = word_bytes / static_cast<int>(sizeof(typename Number::Stored));
  typename Number::Stored values[count];
};

/// One lane's share of a piece: words lane, lane + 32, ...
template <class Number>
struct Sums {
  float sums[words_a_lane][Word<Number>::count];

  __device__ void clear() {
#pragma unroll
    for (int w = 0; w < words_a_lane; ++w) {
#pragma unroll
      for (int e = 0; e < Word<Number>::count; ++e) sums[w][e] = 0;
    }
  }

  __device__ void add(const std::byte* from, int bytes, float weight, bool weighted) {
#pragma unroll
    for (int w = 0; w < words_a_lane; ++w) {
      const int offset = (w * 32 + lane_id()) * word_bytes;
      if (offset >= bytes) continue;
      const auto in = *reinterpret_cast<const Word<Number>*>(from + offset);
#pragma unroll
      for (int e = 0; e < Word<Number>::count; ++e) {
        sums[w][e] = sum_with<Number>(sums[w][e], in.values[e], weight, weighted);
      }
    }
  }

  __device__ void write(std::byte* to, int bytes) const {
#pragma unroll
    for (int w = 0; w < words_a_lane; ++w) {
      const int offset = (w * 32 + lane_id()) * word_bytes;
      if (offset >= bytes) continue;
      Word<Number> out;
#pragma unroll
      for (int e = 0; e < Word<Number>::count; ++e) out.values[e] = Number::round(sums[w][e]);
      *reinterpret_cast<Word<Number>*>(to + offset) = out;
    }
  }
};

struct BulkMemory {
  alignas(128) std::byte stage[bulk_warps][bulk_stages][slots][piece_bytes];
  std::uint64_t loaded[bulk_warps][bulk_stages];
};

/// Where a warp is in its work: piece `item` (of all tokens), and of its rows those from 8 * batch.
template <class Weight>
struct Cursor {
  std::int64_t item;
  int batch;
  TokenRows rows;

  __device__ void read(const CombineParams& p, std::int64_t pieces, std::int64_t count) {
    if (item < count) rows = read_token<Weight>(p, item / pieces);
  }
  __device__ bool is_last_batch() const { return (batch + 1) * slots >= __popc(rows.valid); }
  __device__ void next(const CombineParams& p, std::int64_t pieces, std::int64_t count,
                       std::int64_t step) {
    if (!is_last_batch()) {
      ++batch;
      return;
    }
    batch = 0;
    item += step;
    read(p, pieces, count);
  }
};

/// Pulls the rows of a token, piece by piece, through shared memory.
template <class Number, class Weight>
__device__ void sum_bulk(const CombineParams& p, BulkMemory& memory) {
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const int lane = lane_id();
  std::uint64_t* const loaded = memory.loaded[warp];
  if (lane == 0) {
    for (int s = 0; s < bulk_stages; ++s) barrier_init(&loaded[s]);
  }
  fence_async_proxy();
  __syncwarp();
  const std::int64_t pieces = (p.row_bytes + piece_bytes - 1) / piece_bytes;
  const std::int64_t count = p.shape.num_tokens * pieces;
  const std::int64_t step = std::int64_t{gridDim.x} * bulk_warps;
  const auto bytes_of = [&](std::int64_t item) {
    const std::int64_t left = p.row_bytes - item % pieces * piece_bytes;
    return static_cast<int>(left < piece_bytes ? left : piece_bytes);
  };
  const auto ask = [&](const Cursor<Weight>& at, int stage) {
    const auto bytes = static_cast<std::uint32_t>(bytes_of(at.item));
    const int total = __popc(at.rows.valid) - at.batch * slots;
    const int here = total < slots ? total : slots;
    if (lane == 0) barrier_expect(&loaded[stage], bytes * static_cast<std::uint32_t>(here));
    __syncwarp();
    const int slot = __popc(at.rows.valid & ((1U << lane) - 1)) - at.batch * slots;
    if ((at.rows.valid >> lane & 1U) != 0 && 0 <= slot && slot < slots) {
      bulk_load(memory.stage[warp][stage][slot],
                row_at(p, at.rows.place) + at.item % pieces * piece_bytes, bytes, &loaded[stage]);
    }
  };
  Cursor<Weight> here{blockIdx.x + std::int64_t{warp} * gridDim.x, 0, {}};
  here.read(p, pieces, count);
  Cursor<Weight> ahead = here;
  if (ahead.item < count) ask(ahead, 0);
  Sums<Number> sums;
  const bool weighted = p.weights != nullptr;
  for (std::uint32_t turn = 0; here.item < count; ++turn) {
    const auto stage = static_cast<int>(turn % bulk_stages);
    ahead.next(p, pieces, count, step);
    if (ahead.item < count) ask(ahead, static_cast<int>((turn + 1) % bulk_stages));
    const int bytes = bytes_of(here.item);
    const std::int64_t offset = here.item / pieces * p.row_bytes + here.item % pieces * piece_bytes;
    if (here.batch == 0) {
      sums.clear();
      for (const std::byte* bias : p.biases) {
        if (bias != nullptr) sums.add(bias + offset, bytes, 0, false);
      }
    }
    barrier_wait(&loaded[stage], turn / bulk_stages % 2);
    unsigned left = here.rows.valid;
    for (int i = 0; i < here.batch * slots; ++i) left &= left - 1;
    for (int slot = 0; slot < slots && left != 0; ++slot, left &= left - 1) {
      const float weight =
          __shfl_sync(all_lanes, here.rows.weight, __ffs(static_cast<int>(left)) - 1);
      sums.add(memory.stage[warp][stage][slot], bytes, weight, weighted);
    }
    if (here.is_last_batch()) sums.write(p.output + offset, bytes);
    __syncwarp();  // all lanes have read the stage before it is filled again
    here.next(p, pieces, count, step);
  }
}

/// Without bulk copies, or for addresses that do not suit them.
template <class Number, class Weight>
__device__ void sum_elements(const CombineParams& p) {
  using Stored = typename Number::Stored;
  constexpr auto size = static_cast<int>(sizeof(Stored));
  constexpr int unroll = 4;
  const std::int64_t elements = p.row_bytes / size;
  const std::int64_t pieces = (elements + 32 * unroll - 1) / (32 * unroll);
  const std::int64_t step = std::int64_t{gridDim.x} * element_warps;
  const bool weighted = p.weights != nullptr;
  for (std::int64_t item = blockIdx.x + std::int64_t{threadIdx.x / 32} * gridDim.x;
       item < p.shape.num_tokens * pieces; item += step) {
    const TokenRows rows = read_token<Weight>(p, item / pieces);
    const std::int64_t first = item % pieces * 32 * unroll + lane_id();
    const std::int64_t offset = item / pieces * elements;
    float sums[unroll] = {};
    const auto add = [&](const Stored* from, float weight, bool with_weight) {
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        if (first + u * 32 < elements) {
          sums[u] = sum_with<Number>(sums[u], from[first + u * 32], weight, with_weight);
        }
      }
    };
    for (const std::byte* bias : p.biases) {
      if (bias != nullptr) add(reinterpret_cast<const Stored*>(bias) + offset, 0, false);
    }
    for (unsigned left = rows.valid; left != 0; left &= left - 1) {
      const int k = __ffs(static_cast<int>(left)) - 1;
      const std::int64_t place = __shfl_sync(all_lanes, rows.place, k);
      const float weight = __shfl_sync(all_lanes, rows.weight, k);
      add(reinterpret_cast<const Stored*>(row_at(p, place)), weight, weighted);
    }
    auto* const to = reinterpret_cast<Stored*>(p.output) + offset;
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (first + u * 32 < elements) to[first + u * 32] = Number::round(sums[u]);
    }
  }
}

template <class Number, class Weight, bool Bulk>
__global__ void __launch_bounds__((Bulk ? bulk_warps : element_warps) * 32, 1)
    combine_kernel(const __grid_constant__ CombineParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  const std::uint64_t epoch = begin_moe_call(p.m, 1);
  if (threadIdx.x < 32) {
    if (blockIdx.x == 0) publish_to_all(p.m.meet, epoch);
    await_all(p.m.meet, epoch);
  }
  __syncthreads();
  if constexpr (Bulk) {
    sum_bulk<Number, Weight>(p, *reinterpret_cast<BulkMemory*>(shared));
  } else {
    sum_elements<Number, Weight>(p);
  }
  if (is_last_block(p.m.meet) && threadIdx.x == 0) end_moe_call(p.m, 1, epoch);
}

using Kernel = void (*)(CombineParams);

template <class Number, bool Bulk>
Kernel kernel_for(DType weights) {
  switch (weights) {
    case DType::float32:
      return combine_kernel<Number, Float32, Bulk>;
    case DType::bfloat16:
      return combine_kernel<Number, BFloat16, Bulk>;
    case DType::float16:
      return combine_kernel<Number, Float16, Bulk>;
    default:
      return nullptr;
  }
}

template <bool Bulk>
Kernel kernel_for(DType tokens, DType weights) {
  switch (tokens) {
    case DType::float32:
      return kernel_for<Float32, Bulk>(weights);
    case DType::bfloat16:
      return kernel_for<BFloat16, Bulk>(weights);
    case DType::float16:
      return kernel_for<Float16, Bulk>(weights);
    default:
      return nullptr;
  }
}

Kernel kernel_for(DType tokens, DType weights, bool bulk) {
  return bulk ? kernel_for<true>(tokens, weights) : kernel_for<false>(tokens, weights);
}

}  // namespace

cudaError_t prepare_combine(DType tokens, DType weights, bool bulk) {
  const Kernel kernel = kernel_for(tokens, weights, bulk);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  if (!bulk) {
    cudaFuncAttributes unused{};
    return cudaFuncGetAttributes(&unused, reinterpret_cast<const void*>(kernel));
  }
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(BulkMemory));
}

cudaError_t launch_combine(const CombineParams& params, DType tokens, DType weights, bool bulk,
                           int blocks, cudaStream_t stream) {
  const Kernel kernel = kernel_for(tokens, weights, bulk);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  kernel<<<static_cast<unsigned>(blocks), (bulk ? bulk_warps : element_warps) * 32,
           bulk ? sizeof(BulkMemory) : 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
