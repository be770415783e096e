#include "../device/bulk.cuh"
#include "launch.h"
#include "meet.cuh"

namespace waybill::cuda {
namespace {

constexpr int warps = 6;
constexpr int stages = 4;
constexpr int batch = 16;  // descriptors that a warp fetches at a time
constexpr int ring = 2 * batch;

/// A chunk with its places, as the warp's loops read it.
struct Descriptor {
  RowChunk chunk;
  std::uint64_t places[max_places_sent];
};

struct WarpMemory {
  Descriptor ring_[ring];
  std::uint64_t loaded[stages];  ///< barriers
};

struct BlockMemory {
  alignas(128) std::byte stage[warps][stages][max_bulk_chunk_bytes];
  WarpMemory warp[warps];
};

/// The chunks of one warp, in turn: number i is chunk first + i * step.
class WarpWork {
 public:
  __device__ WarpWork(const SequenceParams& p, BlockMemory& memory)
      : p_(p),
        lane_(static_cast<int>(threadIdx.x % 32)),
        memory_(memory.warp[threadIdx.x / 32]),
        stage_(memory.stage[threadIdx.x / 32]),
        first_(blockIdx.x + std::int64_t{threadIdx.x / 32} * gridDim.x),
        step_(std::int64_t{gridDim.x} * warps) {
    const std::int64_t left = p.head->num_chunks - first_;
    count_ = left <= 0 ? 0 : (left + step_ - 1) / step_;
    if (lane_ == 0) {
      for (int s = 0; s < stages; ++s) barrier_init(&memory_.loaded[s]);
      fence_async_proxy();
    }
    __syncwarp();
  }

  __device__ void run() {
    fetch_chunk(0);
    fetch_places();
    keep(0);
    for (std::int64_t i = 0; i < stages - 1 && i < count_; ++i) load(i);
    for (std::int64_t i = 0; i < count_; ++i) {
      const auto in_batch = static_cast<int>(i % batch);
      // The next batch comes in three steps, far enough apart that nobody waits for memory.
      if (in_batch == 0) fetch_chunk(i + batch);
      if (in_batch == batch / 4) fetch_places();
      if (in_batch == batch / 2) keep(i - in_batch + batch);
      store(i);
      if (i + stages - 1 < count_) {
        if (lane_ == 0) bulk_wait_read_but_one();
        __syncwarp();
        load(i + stages - 1);
      }
    }
    if (lane_ == 0) bulk_wait_all();
    fence_async_proxy();
  }

 private:
  /// Each of the first lanes asks for one descriptor of the batch that begins with number i.
  __device__ void fetch_chunk(std::int64_t i) {
    has_next_ = lane_ < batch && i + lane_ < count_;
    if (has_next_) next_ = p_.chunks[first_ + (i + lane_) * step_];
  }
  __device__ void fetch_places() {
    if (!has_next_) return;
#pragma unroll
    for (int k = 0; k < max_places_sent; ++k) {
      if (k < next_.num_places) next_places_[k] = p_.places[next_.first_place + k];
    }
  }
  __device__ void keep(std::int64_t i) {
    if (has_next_) {
      Descriptor& to = memory_.ring_[(i + lane_) % ring];
      to.chunk = next_;
#pragma unroll
      for (int k = 0; k < max_places_sent; ++k) {
        if (k < next_.num_places) to.places[k] = next_places_[k];
      }
    }
    __syncwarp();
  }

  __device__ void load(std::int64_t i) {
    const RowChunk& chunk = memory_.ring_[i % ring].chunk;
    const TensorParams& tensor = p_.inputs[chunk.tensor];
    std::byte* const to = stage_[i % stages];
    std::uint64_t* const barrier = &memory_.loaded[i % stages];
    const std::byte* const from = tensor.data + chunk.row * tensor.pitch_bytes + chunk.col_bytes;
    const auto bytes = static_cast<std::uint32_t>(chunk.rows * chunk.part_bytes);
    const bool one_piece = chunk.rows == 1 || tensor.pitch_bytes == chunk.part_bytes;
    if (lane_ == 0) {
      barrier_expect(barrier, bytes);
      if (one_piece) bulk_load(to, from, bytes, barrier);
    }
    if (one_piece) return;
    __syncwarp();
    for (int row = lane_; row < chunk.rows; row += 32) {
      bulk_load(to + row * chunk.part_bytes, from + row * tensor.pitch_bytes,
                static_cast<std::uint32_t>(chunk.part_bytes), barrier);
    }
  }

  __device__ void store(std::int64_t i) {
    const Descriptor& descriptor = memory_.ring_[i % ring];
    const auto bytes =
        static_cast<std::uint32_t>(descriptor.chunk.rows * descriptor.chunk.part_bytes);
    if (lane_ == 0) {
      barrier_wait(&memory_.loaded[i % stages], static_cast<std::uint32_t>(i / stages % 2));
      for (int k = 0; k < descriptor.chunk.num_places; ++k) {
        const std::uint64_t place = descriptor.places[k];
        bulk_store(p_.windows[place >> place_rank_shift] + (place & place_offset_mask),
                   stage_[i % stages], bytes);
      }
      bulk_commit();
    }
  }

  const SequenceParams& p_;
  const int lane_;
  WarpMemory& memory_;
  std::byte (*stage_)[max_bulk_chunk_bytes];
  const std::int64_t first_;
  const std::int64_t step_;
  std::int64_t count_ = 0;
  bool has_next_ = false;
  RowChunk next_;
  std::uint64_t next_places_[max_places_sent];
};

/// Compiled for every architecture, of use from sm_90 on.
__global__ void __launch_bounds__(warps * 32, 1)
    dispatch_bulk_kernel(const __grid_constant__ SequenceParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  const std::uint64_t epoch = begin_call(p.meet);
  WarpWork(p, *reinterpret_cast<BlockMemory*>(shared)).run();
  if (!is_last_block(p.meet) || threadIdx.x >= 32) return;
  publish_to_all(p.meet, epoch);
  await_all(p.meet, epoch);
  if (threadIdx.x == 0) end_call(p.meet, epoch);
}

}  // namespace

cudaError_t prepare_dispatch_bulk() {
  return cudaFuncSetAttribute(dispatch_bulk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(sizeof(BlockMemory)));
}

cudaError_t launch_dispatch_bulk(const SequenceParams& params, int num_sms, cudaStream_t stream) {
  dispatch_bulk_kernel<<<static_cast<unsigned>(num_sms), warps * 32, sizeof(BlockMemory), stream>>>(
      params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
