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

  template <bool First>
  __device__ void add(const std::byte* addend, int bytes) {
#pragma unroll
    for (int w = 0; w < words_a_lane; ++w) {
      const int offset = (w * 32 + static_cast<int>(threadIdx.x % 32)) * word_bytes;
      if (offset >= bytes) continue;
      const auto in = *reinterpret_cast<const Elements<In>*>(addend + offset);
#pragma unroll
      for (int e = 0; e < elements; ++e) {
        const Sum value = In::load(in.values[e]);
        sums[w][e] = First ? value : sums[w][e] + value;
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

/// A warp's chunks in turn; the next one is on its way while one is worked on.
struct ChunkCursor {
  std::int64_t chunk;  ///< >= num_chunks: at the end
  std::int64_t num_chunks;
  std::int64_t step;
  RowChunk at;
  RowChunk upcoming;

  __device__ void begin(const SequenceParams& p) {
    if (chunk < num_chunks) at = p.chunks[chunk];
    if (chunk + step < num_chunks) upcoming = p.chunks[chunk + step];
  }
  __device__ void next(const SequenceParams& p) {
    chunk += step;
    at = upcoming;
    if (chunk + step < num_chunks) upcoming = p.chunks[chunk + step];
  }
  [[nodiscard]] __device__ bool at_end() const { return chunk >= num_chunks; }
};

/// A warp's addends in turn: chunk by chunk, and in each the copies in their order. The place of
/// the next one is on its way too.
struct AddendCursor {
  ChunkCursor chunks;
  int copy = 0;
  std::uint64_t place = 0;

  __device__ void begin(const SequenceParams& p) {
    chunks.begin(p);
    to_next_with_addends(p);
  }
  __device__ void next(const SequenceParams& p) {
    if (++copy < chunks.at.num_places) {
      place = p.places[chunks.at.first_place + copy];
      return;
    }
    copy = 0;
    chunks.next(p);
    to_next_with_addends(p);
  }

 private:
  /// This chunk included.
  __device__ void to_next_with_addends(const SequenceParams& p) {
    while (!chunks.at_end() && chunks.at.num_places == 0) chunks.next(p);
    if (!chunks.at_end()) place = p.places[chunks.at.first_place];
  }
};

struct BulkMemory {
  alignas(128) std::byte stage[warps][stages][piece_bytes];
  std::uint64_t loaded[warps][stages];
};

/// Sends a chunk that has one addend on to the output as it is. One lane.
template <class In, class Out>
__device__ void copy_chunk(const SequenceParams& p, const RowChunk& chunk, const std::byte* from) {
  const TensorParams& output = p.outputs[chunk.tensor];
  const bool one_piece = chunk.rows == 1 || output.pitch_bytes == chunk.part_bytes;
  const int pieces = one_piece ? 1 : chunk.rows;
  const int bytes = one_piece ? chunk.rows * chunk.part_bytes : chunk.part_bytes;
  for (int i = 0; i < pieces; ++i) {
    bulk_store(output_of<In, Out>(p, chunk, i * bytes), from + i * bytes,
               static_cast<std::uint32_t>(bytes));
  }
}

/// Pulls the addends of a warp's chunks through a ring of stages.
template <class In, class Out>
__device__ void sum_bulk(const SequenceParams& p, BulkMemory& memory) {
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  constexpr bool copies = std::is_same_v<In, Out>;
  auto& stage = memory.stage[warp];
  std::uint64_t* const loaded = memory.loaded[warp];
  const std::int64_t num_chunks = p.head->num_chunks;
  const std::int64_t step = std::int64_t{gridDim.x} * warps;
  if (lane == 0) {
    for (int s = 0; s < stages; ++s) barrier_init(&loaded[s]);
  }
  fence_async_proxy();  // what the ranks wrote before they came here, and the barriers
  __syncwarp();
  ChunkCursor here{blockIdx.x + std::int64_t{warp} * gridDim.x, num_chunks, step, {}, {}};
  here.begin(p);
  AddendCursor ahead{here};
  ahead.begin(p);
  std::uint32_t asked = 0;
  const auto ask = [&] {
    if (ahead.chunks.at_end()) return;
    if (lane == 0) {
      if constexpr (copies) bulk_wait_read_but_one();  // the stage may be on its way out
      const RowChunk& chunk = ahead.chunks.at;
      const auto bytes = static_cast<std::uint32_t>(chunk.rows * chunk.part_bytes);
      barrier_expect(&loaded[asked % stages], bytes);
      bulk_load(stage[asked % stages], place_of(p, ahead.place), bytes, &loaded[asked % stages]);
    }
    ++asked;
    ahead.next(p);
  };
  for (int s = 0; s < stages - 1; ++s) ask();
  Sums<In, Out> sums;
  std::uint32_t taken = 0;
  for (; !here.at_end(); here.next(p)) {
    const int bytes = here.at.rows * here.at.part_bytes;
    const bool alone = copies && here.at.num_places == 1;
    if (here.at.num_places == 0) sums.clear();
    for (int copy = 0; copy < here.at.num_places; ++copy, ++taken) {
      const std::byte* const addend = stage[taken % stages];
      barrier_wait(&loaded[taken % stages], taken / stages % 2);
      if (alone) {
        if (lane == 0) copy_chunk<In, Out>(p, here.at, addend);
      } else if (copy == 0) {
        sums.template add<true>(addend, bytes);
      } else {
        sums.template add<false>(addend, bytes);
      }
      if (copies && lane == 0) bulk_commit();  // a group, perhaps empty, for each stage
      __syncwarp();  // all lanes have read the stage before it, which is filled next
      ask();
    }
    if (!alone) sums.write(p, here.at);
  }
  if (copies && lane == 0) bulk_wait_all();
  fence_async_proxy();
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
