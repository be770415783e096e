#include "../device/arrive_and_wait.cuh"
#include "../device/word_copy.cuh"
#include "batch.cuh"

namespace waybill::cuda {
namespace {

constexpr int warps = 16;
constexpr int unroll = 4;  // words that a lane has on the way

/// Copies `bytes` to all addresses of a chunk, `offset` bytes after their begin: read once.
template <class Word>
__device__ void copy_words(const SequenceParams& p, const RowChunk& chunk, const std::byte* from,
                           std::int64_t offset, int bytes) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int count = bytes / static_cast<int>(sizeof(Word));
  const auto* const source = reinterpret_cast<const Word*>(from);
  for (int first = lane; first < count; first += 32 * unroll) {
    Word words[unroll];
    load_batch<32>(words, source, first, count);
    for (int k = 0; k < chunk.num_addresses; ++k) {
      const std::uint64_t address = p.addresses[chunk.first_address + k];
      auto* const to = reinterpret_cast<Word*>(place_of(p, address) + offset);
      store_batch<32>(to, words, first, count);
    }
  }
}

__device__ void copy_piece(const SequenceParams& p, const RowChunk& chunk, const std::byte* from,
                           std::int64_t offset, int bytes) {
  std::uint64_t bits = reinterpret_cast<std::uint64_t>(from) | static_cast<std::uint64_t>(bytes) |
                       static_cast<std::uint64_t>(offset);
  // Windows begin at multiples of 256.
  for (int k = 0; k < chunk.num_addresses; ++k) bits |= p.addresses[chunk.first_address + k];
  for_word(common_word(bits),
           [&]<class Word>(Word) { copy_words<Word>(p, chunk, from, offset, bytes); });
}

__device__ void copy_chunk(const SequenceParams& p, const RowChunk& chunk,
                           const TensorParams& tensor) {
  const std::byte* const from = tensor.data + chunk.row * tensor.pitch_bytes + chunk.col_bytes;
  if (chunk.rows == 1 || tensor.pitch_bytes == chunk.part_bytes) {
    copy_piece(p, chunk, from, 0, chunk.rows * chunk.part_bytes);
    return;
  }
  for (int row = 0; row < chunk.rows; ++row) {
    copy_piece(p, chunk, from + row * tensor.pitch_bytes, std::int64_t{row} * chunk.part_bytes,
               chunk.part_bytes);
  }
}

__global__ void __launch_bounds__(warps * 32)
    dispatch_vector_kernel(const __grid_constant__ SequenceParams p) {
  const CallWords words = load_call_words(p.arrive.fingerprint);
  const std::uint64_t epoch = begin_call(p.arrive);
  const std::int64_t num_chunks = p.head->num_chunks;
  const bool batched = p.head->num_batches > 0;
  if (batched && blockIdx.x == 0 && threadIdx.x < 32) {
    send_call_words(p.arrive, epoch, words);
  }
  const std::int64_t step = std::int64_t{gridDim.x} * warps;
  // Block by block, so that the first chunks, for which others wait, are begun first.
  for (std::int64_t c = blockIdx.x + std::int64_t{threadIdx.x / 32} * gridDim.x; c < num_chunks;
       c += step) {
    const RowChunk chunk = p.chunks[c];
    if (!batched) {
      copy_chunk(p, chunk, p.inputs[chunk.tensor]);
      continue;
    }
    const std::int32_t number = p.chunk_batches[c];
    const WorkBatch& batch = p.batches[number];
    wait_batch(p, batch, epoch);
    if (batch.kind == BatchKind::forward) {
      copy_chunk(p, chunk,
                 {p.own_window + p.head->window_offsets[chunk.tensor],
                  p.head->cuts[chunk.tensor].row_bytes});
    } else {
      copy_chunk(p, chunk, p.inputs[chunk.tensor]);
    }
    if (batch.num_signals == 0) continue;
    __threadfence_system();
    __syncwarp();
    if (threadIdx.x % 32 == 0) count_chunks(p, number, 1, epoch);
  }
  if (!is_last_block(p.arrive) || threadIdx.x >= 32) return;
  arrive_and_wait_at_end(p.arrive, epoch, words, batched);
}

}  // namespace

cudaError_t prepare_dispatch_vector() {
  cudaFuncAttributes unused{};
  return cudaFuncGetAttributes(&unused, dispatch_vector_kernel);
}

cudaError_t launch_dispatch_vector(const SequenceParams& params, bool /*batched*/, int num_sms,
                                   cudaStream_t stream) {
  dispatch_vector_kernel<<<static_cast<unsigned>(num_sms), warps * 32, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
