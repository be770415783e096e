#include <span>
#include <tuple>
#include <type_traits>

#include "../device/arrive_and_wait.cuh"
#include "../device/bulk.cuh"
#include "../device/number.cuh"
#include "batch.cuh"

namespace waybill::cuda {
namespace {

/// Warps of a block, each with a ring of stages. A warp's work on one stage is a chain of waits, so
/// many warps with short rings sum more than few with long ones; a plan with batches has addends of
/// twice the bytes, and needs more registers.
template <bool Batched>
constexpr int warps_of = Batched ? 12 : 20;

/// A warp adds up so many bytes of a chunk at a time.
constexpr int piece_bytes = max_gradient_chunk_bytes;
constexpr int words_per_lane = piece_bytes / widest_word / 32;

/// Where byte `offset` of a chunk (counted in the addends) goes.
template <class In, class Out>
__device__ std::byte* output_of(const TensorParams& output, const RowChunk& chunk, int offset) {
  constexpr auto in_bytes = static_cast<int>(sizeof(typename In::Stored));
  constexpr auto out_bytes = static_cast<int>(sizeof(typename Out::Stored));
  const int row = chunk.rows == 1 ? 0 : offset / chunk.part_bytes;
  const int col = chunk.col_bytes + offset - row * chunk.part_bytes;
  return output.data + (chunk.row + row) * output.pitch_bytes + col / in_bytes * out_bytes;
}

/// The rows of the window that keep sums that are not rounded.
__device__ TensorParams sums_on_the_way(const SequenceParams& p, std::int32_t tensor) {
  const std::int32_t entry = p.head->num_tensors + tensor;
  return {p.own_window + p.head->window_offsets[entry], p.head->cuts[entry].row_bytes};
}

/// The number that keeps sums on the way.
template <class In>
using SumOf = std::conditional_t<std::is_same_v<In, Float64>, Float64, Float32>;

/// Values that are loaded and stored 16 bytes at a time.
template <class Value, int Count>
struct alignas(16) Aligned {
  Value values[Count];
};

/// One lane's share of a chunk: words lane, lane + 32, ...
template <class In>
struct Sums {
  using Stored = typename In::Stored;
  using Sum = typename In::Sum;
  static constexpr int elements = WidePack<In>::count;

  template <bool First>
  __device__ void add(const std::byte* addend, int bytes) {
#pragma unroll
    for (int w = 0; w < words_per_lane; ++w) {
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
    for (int w = 0; w < words_per_lane; ++w) {
      const int offset = (w * 32 + static_cast<int>(threadIdx.x % 32)) * widest_word;
      if (offset >= bytes) continue;
      constexpr auto scale = static_cast<int>(sizeof(Sum) / sizeof(Stored));
      const auto in = *reinterpret_cast<const Aligned<Sum, elements>*>(addend + offset * scale);
#pragma unroll
      for (int e = 0; e < elements; ++e) {
        sums[w][e] = First ? in.values[e] : sums[w][e] + in.values[e];
      }
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int w = 0; w < words_per_lane; ++w) {
#pragma unroll
      for (int e = 0; e < elements; ++e) sums[w][e] = Sum{0};
    }
  }

  template <class To>
  __device__ void write(const TensorParams& output, const RowChunk& chunk) const {
    const int bytes = chunk.rows * chunk.part_bytes;
#pragma unroll
    for (int w = 0; w < words_per_lane; ++w) {
      const int offset = (w * 32 + static_cast<int>(threadIdx.x % 32)) * widest_word;
      if (offset >= bytes) continue;
      using Rounded = Aligned<typename To::Stored, elements>;
      Rounded out;
#pragma unroll
      for (int e = 0; e < elements; ++e) out.values[e] = To::round(sums[w][e]);
      *reinterpret_cast<Rounded*>(output_of<In, To>(output, chunk, offset)) = out;
    }
  }

  Sum sums[words_per_lane][elements];
};

/// A warp's chunks in turn; the next one is on its way while one is worked on.
struct ChunkCursor {
  std::int64_t chunk;  ///< >= num_chunks: at the end
  std::int64_t num_chunks;
  std::int64_t step;
  RowChunk at;
  RowChunk upcoming;
  std::int32_t batch;  ///< in plans with batches
  std::int32_t upcoming_batch;

  template <bool Batched>
  __device__ void begin(const SequenceParams& p) {
    if (chunk < num_chunks) {
      at = p.chunks[chunk];
      if constexpr (Batched) batch = p.chunk_batches[chunk];
    }
    fetch_upcoming<Batched>(p);
  }
  template <bool Batched>
  __device__ void next(const SequenceParams& p) {
    chunk += step;
    at = upcoming;
    batch = upcoming_batch;
    fetch_upcoming<Batched>(p);
  }
  [[nodiscard]] __device__ bool at_end() const { return chunk >= num_chunks; }

 private:
  template <bool Batched>
  __device__ void fetch_upcoming(const SequenceParams& p) {
    if (chunk + step >= num_chunks) return;
    upcoming = p.chunks[chunk + step];
    if constexpr (Batched) upcoming_batch = p.chunk_batches[chunk + step];
  }
};

/// A warp's addends in turn: chunk by chunk, and in each the copies in their order. The address of
/// the next one is on its way too.
template <bool Batched>
struct AddendCursor {
  ChunkCursor chunks;
  int copy = 0;
  std::uint64_t address = 0;

  __device__ void begin(const SequenceParams& p) {
    chunks.begin<Batched>(p);
    to_next_with_addends(p);
  }
  __device__ void next(const SequenceParams& p) {
    if (++copy < chunks.at.num_addresses) {
      address = p.addresses[chunks.at.first_address + copy];
      return;
    }
    copy = 0;
    chunks.next<Batched>(p);
    to_next_with_addends(p);
  }

 private:
  /// This chunk included.
  __device__ void to_next_with_addends(const SequenceParams& p) {
    while (!chunks.at_end() && chunks.at.num_addresses == 0) chunks.next<Batched>(p);
    if (!chunks.at_end()) address = p.addresses[chunks.at.first_address];
  }
};

template <bool Batched>
struct BulkMemory {
  static constexpr int ring_bytes = (Batched ? 8 : 4) * piece_bytes;
  alignas(128) std::byte ring[warps_of<Batched>][ring_bytes];
  std::uint64_t loaded[warps_of<Batched>][ring_bytes / piece_bytes];
};

/// Sends a chunk that has one addend on to the output as it is. One lane.
template <class In, class Out>
__device__ void copy_chunk(const SequenceParams& p, const RowChunk& chunk, const std::byte* from) {
  const TensorParams& output = p.outputs[chunk.tensor];
  const bool one_piece = chunk.rows == 1 || output.pitch_bytes == chunk.part_bytes;
  const int pieces = one_piece ? 1 : chunk.rows;
  const int bytes = one_piece ? chunk.rows * chunk.part_bytes : chunk.part_bytes;
  for (int i = 0; i < pieces; ++i) {
    bulk_store(output_of<In, Out>(output, chunk, i * bytes), from + i * bytes,
               static_cast<std::uint32_t>(bytes));
  }
}

/// Pulls the addends of a warp's chunks through a ring of stages. In plans with batches an addend
/// may be a sum, of twice the bytes.
template <class In, class Out, bool Batched>
class BulkSummer {
 public:
  __device__ BulkSummer(const SequenceParams& p, BulkMemory<Batched>& memory, std::uint64_t epoch)
      : p_(p),
        epoch_(epoch),
        lane_(static_cast<int>(threadIdx.x % 32)),
        ring_(memory.ring[threadIdx.x / 32]),
        loaded_(memory.loaded[threadIdx.x / 32]),
        arrived_(p, epoch) {
    if (lane_ == 0) {
      for (int s = 0; s < stages; ++s) barrier_init(&loaded_[s]);
      fence_barrier_init();
    }
    fence_async_global();  // for rows that the ranks wrote before they came here
    __syncwarp();
    const auto warp = static_cast<int>(threadIdx.x / 32);
    here_ = {blockIdx.x + std::int64_t{warp} * gridDim.x,
             p.head->num_chunks,
             std::int64_t{gridDim.x} * warps_of<Batched>,
             {},
             {},
             -1,
             -1};
    here_.template begin<Batched>(p);
    ahead_.chunks = here_;
    ahead_.begin(p);
  }

  __device__ void run() {
    ask();
    Sums<In> sums;
    for (; !here_.at_end(); here_.template next<Batched>(p_)) {
      const bool rounds = !Batched || kind_of(here_.batch) != BatchKind::partial;
      const bool alone = copies && rounds && here_.at.num_addresses == 1 && is_plain_next();
      if (here_.at.num_addresses == 0) sums.clear();
      for (int copy = 0; copy < here_.at.num_addresses; ++copy) take(sums, copy == 0, alone);
      if (alone) continue;
      if (rounds) {
        sums.template write<Out>(p_.outputs[here_.at.tensor], here_.at);
      } else {
        sums.template write<SumOf<In>>(sums_on_the_way(p_, here_.at.tensor), here_.at);
        __threadfence_system();
        __syncwarp();
        if (lane_ == 0) arrived_.add(here_.batch);
      }
    }
    if (Batched && lane_ == 0) arrived_.flush();
    if (copies && lane_ == 0) bulk_wait_all();
    fence_async_global();
  }

 private:
  static constexpr bool copies = std::is_same_v<In, Out>;
  static constexpr int sum_scale =
      static_cast<int>(sizeof(typename In::Sum) / sizeof(typename In::Stored));
  static constexpr int stage_bytes = piece_bytes * (Batched ? sum_scale : 1);
  static constexpr int stages = BulkMemory<Batched>::ring_bytes / stage_bytes;

  [[nodiscard]] __device__ std::byte* stage(std::uint32_t number) const {
    return ring_ + number % stages * stage_bytes;
  }
  [[nodiscard]] __device__ BatchKind kind_of(std::int32_t batch) const {
    return p_.batches[batch].kind;
  }
  [[nodiscard]] __device__ bool is_sum(std::uint32_t number) const {
    return Batched && sum_scale > 1 && (sums_ >> (number % stages) & 1U) != 0;
  }
  /// Whether the next addend has the rows' own type. It may not have been asked for yet.
  __device__ bool is_plain_next() {
    if constexpr (Batched) {
      if (asked_ == taken_) ask_first();
    }
    return !is_sum(taken_);
  }

  /// The next addend into the sums.
  __device__ void take(Sums<In>& sums, bool first, bool alone) {
    if constexpr (Batched) {
      if (asked_ == taken_) ask_first();
    }
    const std::byte* const addend = stage(taken_);
    const int bytes = here_.at.rows * here_.at.part_bytes;
    barrier_wait(&loaded_[taken_ % stages], taken_ / stages % 2);
    if (alone) {
      if (lane_ == 0) copy_chunk<In, Out>(p_, here_.at, addend);
    } else if (is_sum(taken_)) {
      first ? sums.template add_sum<true>(addend, bytes)
            : sums.template add_sum<false>(addend, bytes);
    } else {
      first ? sums.template add<true>(addend, bytes) : sums.template add<false>(addend, bytes);
    }
    if (copies && lane_ == 0) bulk_commit();  // a group, perhaps empty, for each stage
    release_stage();
    ++taken_;
    ask();
  }

  /// Asks for addends as far as there are stages and, with batches, as they are ready.
  __device__ void ask() {
    while (asked_ < taken_ + stages - 1 && !ahead_.chunks.at_end()) {
      if constexpr (Batched) {
        const std::int32_t batch = ahead_.chunks.batch;
        if (batch != ready_ && !is_ready(p_, p_.batches[batch], epoch_)) return;
        ready_ = batch;
      }
      load();
    }
  }

  /// Waits for the addend that is needed next; first it counts all that others wait for.
  __device__ void ask_first() {
    if (lane_ == 0) arrived_.flush();
    __syncwarp();
    ready_ = ahead_.chunks.batch;
    wait_batch(p_, p_.batches[ready_], epoch_);
    load();
    ask();
  }

  __device__ void load() {
    const RowChunk& chunk = ahead_.chunks.at;
    const bool sum = Batched && sum_scale > 1 && (ahead_.address & address_sum_bit) != 0;
    if (Batched && sum_scale > 1) {
      const std::uint32_t bit = 1U << (asked_ % stages);
      sums_ = sum ? sums_ | bit : sums_ & ~bit;
    }
    if (lane_ == 0) {
      if constexpr (copies) bulk_wait_read_but_one();  // the stage may be on its way out
      const auto bytes =
          static_cast<std::uint32_t>(chunk.rows * chunk.part_bytes * (sum ? sum_scale : 1));
      std::uint64_t* const barrier = &loaded_[asked_ % stages];
      barrier_expect(barrier, bytes);
      bulk_load_to_read(stage(asked_),
                        Batched ? addend_at(p_, ahead_.address) : place_of(p_, ahead_.address),
                        bytes, barrier);
    }
    ++asked_;
    ahead_.next(p_);
  }

  const SequenceParams& p_;
  const std::uint64_t epoch_;
  const int lane_;
  std::byte* const ring_;
  std::uint64_t* const loaded_;
  ArrivalCount arrived_;
  ChunkCursor here_;
  AddendCursor<Batched> ahead_;
  std::uint32_t asked_ = 0;
  std::uint32_t taken_ = 0;
  std::uint32_t sums_ = 0;   ///< bit s: stage s holds a sum, or will
  std::int32_t ready_ = -1;  ///< the last batch found ready
};

/// One element of an output, from the addends of a chunk.
template <class In, class Out>
__device__ void sum_element(const SequenceParams& p, const RowChunk& chunk, bool batched,
                            int offset, const TensorParams& output) {
  using Stored = typename In::Stored;
  using Sum = typename In::Sum;
  constexpr auto scale = static_cast<int>(sizeof(Sum) / sizeof(Stored));
  Sum sum{0};
  for (int copy = 0; copy < chunk.num_addresses; ++copy) {
    const std::uint64_t address = p.addresses[chunk.first_address + copy];
    Sum value;
    if (batched && scale > 1 && (address & address_sum_bit) != 0) {
      value = *reinterpret_cast<const Sum*>(addend_at(p, address) + offset * scale);
    } else {
      const std::byte* const from = batched ? addend_at(p, address) : place_of(p, address);
      value = In::load(*reinterpret_cast<const Stored*>(from + offset));
    }
    sum = copy == 0 ? value : sum + value;
  }
  *reinterpret_cast<typename Out::Stored*>(output_of<In, Out>(output, chunk, offset)) =
      Out::round(sum);
}

/// Without bulk copies, or for addresses that do not suit them.
template <class In, class Out>
__device__ void sum_elements(const SequenceParams& p, std::uint64_t epoch) {
  constexpr auto in_bytes = static_cast<int>(sizeof(typename In::Stored));
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const bool batched = p.head->num_batches > 0;
  const std::int64_t step = std::int64_t{gridDim.x} * warps_of<false>;
  for (std::int64_t c = blockIdx.x + std::int64_t{threadIdx.x / 32} * gridDim.x;
       c < p.head->num_chunks; c += step) {
    const RowChunk chunk = p.chunks[c];
    const std::int32_t number = batched ? p.chunk_batches[c] : -1;
    if (batched) wait_batch(p, p.batches[number], epoch);
    const bool rounds = !batched || p.batches[number].kind != BatchKind::partial;
    const int bytes = chunk.rows * chunk.part_bytes;
    for (int offset = lane * in_bytes; offset < bytes; offset += 32 * in_bytes) {
      if (rounds) {
        sum_element<In, Out>(p, chunk, batched, offset, p.outputs[chunk.tensor]);
      } else {
        sum_element<In, SumOf<In>>(p, chunk, batched, offset, sums_on_the_way(p, chunk.tensor));
      }
    }
    if (rounds) continue;
    __threadfence_system();
    __syncwarp();
    if (lane == 0) count_chunks(p, number, 1, epoch);
  }
}

template <class In, class Out, bool Bulk, bool Batched>
__global__ void __launch_bounds__(warps_of<Batched> * 32, 1)
    kv_gradient_kernel(const __grid_constant__ SequenceParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  const CallWords words = load_call_words(p.arrive.fingerprint);
  const std::uint64_t epoch = begin_call(p.arrive);
  if (threadIdx.x < 32) {
    if (blockIdx.x == 0) signal_to_all(p.arrive, epoch, words);
    wait_all(p.arrive, epoch, words);
  }
  __syncthreads();
  end_if_reported(p.arrive.sink);
  if constexpr (Bulk) {
    BulkSummer<In, Out, Batched>(p, *reinterpret_cast<BulkMemory<Batched>*>(shared), epoch).run();
  } else {
    sum_elements<In, Out>(p, epoch);
  }
  if (is_last_block(p.arrive) && threadIdx.x == 0) end_call(p.arrive, epoch);
}

using Kernel = void (*)(SequenceParams);
using KernelOfTypes = std::tuple<DType, DType, Kernel>;  ///< from, to

template <bool Bulk, bool Batched>
std::span<const KernelOfTypes> list_kernels() {
  using enum DType;
  static const KernelOfTypes kernels[] = {
      {bfloat16, bfloat16, kv_gradient_kernel<BFloat16, BFloat16, Bulk, Batched>},
      {bfloat16, float32, kv_gradient_kernel<BFloat16, Float32, Bulk, Batched>},
      {float16, float16, kv_gradient_kernel<Float16, Float16, Bulk, Batched>},
      {float16, float32, kv_gradient_kernel<Float16, Float32, Bulk, Batched>},
      {float32, float32, kv_gradient_kernel<Float32, Float32, Bulk, Batched>},
      {float64, float64, kv_gradient_kernel<Float64, Float64, Bulk, Batched>}};
  return kernels;
}

/// Without bulk copies one kernel does both.
std::span<const KernelOfTypes> list_kernels(bool bulk, bool batched) {
  if (!bulk) return list_kernels<false, false>();
  return batched ? list_kernels<true, true>() : list_kernels<true, false>();
}

std::size_t shared_bytes(bool bulk, bool batched) {
  if (!bulk) return 0;
  return batched ? sizeof(BulkMemory<true>) : sizeof(BulkMemory<false>);
}

}  // namespace

cudaError_t prepare_kv_gradient(bool bulk) {
  for (const bool batched : {false, true}) {
    for (const auto& [from, to, kernel] : list_kernels(bulk, batched)) {
      const cudaError_t status =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes(bulk, batched)));
      if (status != cudaSuccess) return status;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_kv_gradient(const SequenceParams& params, DType from, DType to, bool bulk,
                               bool batched, int num_sms, cudaStream_t stream) {
  const int threads = 32 * (bulk && batched ? warps_of<true> : warps_of<false>);
  for (const auto& [kernel_from, kernel_to, kernel] : list_kernels(bulk, batched)) {
    if (kernel_from != from || kernel_to != to) continue;
    kernel<<<static_cast<unsigned>(num_sms), threads, shared_bytes(bulk, batched), stream>>>(
        params);
    return cudaGetLastError();
  }
  return cudaErrorInvalidValue;
}

}  // namespace waybill::cuda
