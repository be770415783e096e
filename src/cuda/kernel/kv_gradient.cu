#include <type_traits>

#include "../device/bulk.cuh"
#include "../device/number.cuh"
#include "launch.h"
#include "meet.cuh"

namespace waybill::cuda {
namespace {

constexpr int warps = 12;
constexpr int stages = 8;
constexpr int piece_bytes = max_gradient_chunk_bytes;
constexpr int word_bytes = 16;
constexpr int words_a_lane = piece_bytes / word_bytes / 32;

struct alignas(16) Word {
  std::uint32_t parts[4];
};

template <class Number>
struct alignas(16) Elements {
  static constexpr int count = word_bytes / static_cast<int>(sizeof(typename Number::Stored));
  typename Number::Stored values[count];
};

__device__ inline const std::byte* place_of(const SequenceParams& p, std::uint64_t place) {
  return p.windows[place >> place_rank_shift] + (place & place_offset_mask);
}

/// Where byte `offset` of a chunk (counted in the addends) goes in the output.
template <class In, class Out>
__device__ std::byte* output_of(const SequenceParams& p, const RowChunk& chunk, int offset) {
  constexpr auto in_bytes = static_cast<int>(sizeof(typename In::Stored));
  constexpr auto out_bytes = static_cast<int>(sizeof(typename Out::Stored));
  const TensorParams& output = p.outputs[chunk.tensor];
  const int row = chunk.rows == 1 ? 0 : offset / chunk.part_bytes;
  const int col = chunk.col_bytes + offset - row * chunk.part_bytes;
  return output.data + (chunk.row + row) * output.pitch_bytes + col / in_bytes * out_bytes;
}

/// One lane's share of a chunk: words lane, lane + 32, ...
template <class In, class Out>
struct Sums {
  using Stored = typename In::Stored;
  using Sum = typename In::Sum;
  static constexpr int elements = Elements<In>::count;

  __device__ void add(const std::byte* addend, int bytes, bool first) {
#pragma unroll
    for (int w = 0; w < words_a_lane; ++w) {
      const int offset = (w * 32 + static_cast<int>(threadIdx.x % 32)) * word_bytes;
      if (offset >= bytes) continue;
      const auto in = *reinterpret_cast<const Elements<In>*>(addend + offset);
#pragma unroll
      for (int e = 0; e < elements; ++e) {
        const Sum value = In::load(in.values[e]);
        sums[w][e] = first ? value : sums[w][e] + value;
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

  __device__ void write(const SequenceParams& p, const RowChunk& chunk) const {
    const int bytes = chunk.rows * chunk.part_bytes;
#pragma unroll
    for (int w = 0; w < words_a_lane; ++w) {
      const int offset = (w * 32 + static_cast<int>(threadIdx.x % 32)) * word_bytes;
      if (offset >= bytes) continue;
      struct alignas(16) Rounded {
        typename Out::Stored values[elements];
      } out;
#pragma unroll
      for (int e = 0; e < elements; ++e) out.values[e] = Out::round(sums[w][e]);
      *reinterpret_cast<Rounded*>(output_of<In, Out>(p, chunk, offset)) = out;
    }
  }

  Sum sums[words_a_lane][elements];
};

/// Where a warp is in its list of addends: chunk by chunk, and in each the copies in their order.
struct Cursor {
  std::int64_t chunk;  ///< >= num_chunks: at the end
  int copy;
  RowChunk at;

  __device__ void read(const SequenceParams& p, std::int64_t num_chunks) {
    if (chunk < num_chunks) at = p.chunks[chunk];
  }
  __device__ void next_chunk(const SequenceParams& p, std::int64_t num_chunks, std::int64_t step) {
    chunk += step;
    copy = 0;
    read(p, num_chunks);
  }
  /// To the next chunk that has addends, this one included.
  __device__ void skip_empty(const SequenceParams& p, std::int64_t num_chunks, std::int64_t step) {
    while (chunk < num_chunks && at.num_places == 0) next_chunk(p, num_chunks, step);
  }
  __device__ void next(const SequenceParams& p, std::int64_t num_chunks, std::int64_t step) {
    if (++copy < at.num_places) return;
    next_chunk(p, num_chunks, step);
    skip_empty(p, num_chunks, step);
  }
};

struct BulkMemory {
  alignas(128) std::byte stage[warps][stages][piece_bytes];
  std::uint64_t loaded[warps][stages];
};

/// Pulls the addends of a warp's chunks through a ring of stages.
template <class In, class Out>
__device__ void sum_bulk(const SequenceParams& p, BulkMemory& memory) {
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  auto& stage = memory.stage[warp];
  std::uint64_t* const loaded = memory.loaded[warp];
  const std::int64_t num_chunks = p.head->num_chunks;
  const std::int64_t step = std::int64_t{gridDim.x} * warps;
  if (lane == 0) {
    for (int s = 0; s < stages; ++s) barrier_init(&loaded[s]);
  }
  fence_async_proxy();  // what the ranks wrote before they came here, and the barriers
  __syncwarp();
  Cursor ahead{blockIdx.x + std::int64_t{warp} * gridDim.x, 0, {}};
  ahead.read(p, num_chunks);
  Cursor here = ahead;
  ahead.skip_empty(p, num_chunks, step);
  std::uint32_t asked = 0;
  const auto ask = [&] {
    if (ahead.chunk >= num_chunks) return;
    if (lane == 0) {
      const auto bytes = static_cast<std::uint32_t>(ahead.at.rows * ahead.at.part_bytes);
      barrier_expect(&loaded[asked % stages], bytes);
      bulk_load(stage[asked % stages], place_of(p, p.places[ahead.at.first_place + ahead.copy]),
                bytes, &loaded[asked % stages]);
    }
    ++asked;
    ahead.next(p, num_chunks, step);
  };
  for (int s = 0; s < stages - 1; ++s) ask();
  Sums<In, Out> sums;
  std::uint32_t taken = 0;
  for (; here.chunk < num_chunks; here.next_chunk(p, num_chunks, step)) {
    const int bytes = here.at.rows * here.at.part_bytes;
    if (here.at.num_places == 0) sums.clear();
    for (int copy = 0; copy < here.at.num_places; ++copy, ++taken) {
      barrier_wait(&loaded[taken % stages], taken / stages % 2);
      sums.add(stage[taken % stages], bytes, copy == 0);
      __syncwarp();  // all lanes have read the stage before it, which is filled next
      ask();
    }
    sums.write(p, here.at);
  }
}

/// Without bulk copies, or for addresses that do not suit them.
template <class In, class Out>
__device__ void sum_elements(const SequenceParams& p) {
  using Stored = typename In::Stored;
  constexpr auto in_bytes = static_cast<int>(sizeof(Stored));
  const std::int64_t num_chunks = p.head->num_chunks;
  const std::int64_t step = std::int64_t{gridDim.x} * warps;
  for (std::int64_t c = blockIdx.x + std::int64_t{threadIdx.x / 32} * gridDim.x; c < num_chunks;
       c += step) {
    const RowChunk chunk = p.chunks[c];
    const int bytes = chunk.rows * chunk.part_bytes;
    for (int offset = static_cast<int>(threadIdx.x % 32) * in_bytes; offset < bytes;
         offset += 32 * in_bytes) {
      typename In::Sum sum{0};
      for (int copy = 0; copy < chunk.num_places; ++copy) {
        const std::byte* const from = place_of(p, p.places[chunk.first_place + copy]) + offset;
        const typename In::Sum value = In::load(*reinterpret_cast<const Stored*>(from));
        sum = copy == 0 ? value : sum + value;
      }
      *reinterpret_cast<typename Out::Stored*>(output_of<In, Out>(p, chunk, offset)) =
          Out::round(sum);
    }
  }
}

template <class In, class Out, bool Bulk>
__global__ void __launch_bounds__(warps * 32, 1)
    kv_gradient_kernel(const __grid_constant__ SequenceParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  const std::uint64_t epoch = begin_call(p.meet);
  if (threadIdx.x < 32) {
    if (blockIdx.x == 0) publish_to_all(p.meet, epoch);
    await_all(p.meet, epoch);
  }
  __syncthreads();
  if constexpr (Bulk) {
    sum_bulk<In, Out>(p, *reinterpret_cast<BulkMemory*>(shared));
  } else {
    sum_elements<In, Out>(p);
  }
  if (is_last_block(p.meet) && threadIdx.x == 0) end_call(p.meet, epoch);
}

using Kernel = void (*)(SequenceParams);

template <bool Bulk>
Kernel kernel_of(DType from, DType to) {
  using enum DType;
  if (from == bfloat16 && to == bfloat16) return kv_gradient_kernel<BFloat16, BFloat16, Bulk>;
  if (from == bfloat16 && to == float32) return kv_gradient_kernel<BFloat16, Float32, Bulk>;
  if (from == float16 && to == float16) return kv_gradient_kernel<Float16, Float16, Bulk>;
  if (from == float16 && to == float32) return kv_gradient_kernel<Float16, Float32, Bulk>;
  if (from == float32 && to == float32) return kv_gradient_kernel<Float32, Float32, Bulk>;
  if (from == float64 && to == float64) return kv_gradient_kernel<Float64, Float64, Bulk>;
  return nullptr;
}

Kernel kernel_of(DType from, DType to, bool bulk) {
  return bulk ? kernel_of<true>(from, to) : kernel_of<false>(from, to);
}

std::size_t shared_bytes(bool bulk) { return bulk ? sizeof(BulkMemory) : 0; }

}  // namespace

cudaError_t prepare_kv_gradient(bool bulk) {
  using enum DType;
  constexpr DType pairs[][2] = {{bfloat16, bfloat16}, {bfloat16, float32}, {float16, float16},
                                {float16, float32},   {float32, float32},  {float64, float64}};
  for (const auto& [from, to] : pairs) {
    const cudaError_t status = cudaFuncSetAttribute(
        reinterpret_cast<const void*>(kernel_of(from, to, bulk)),
        cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes(bulk)));
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t launch_kv_gradient(const SequenceParams& params, DType from, DType to, bool bulk,
                               int num_sms, cudaStream_t stream) {
  const Kernel kernel = kernel_of(from, to, bulk);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  kernel<<<static_cast<unsigned>(num_sms), warps * 32, shared_bytes(bulk), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
