#include "kernels.h"

namespace waybill::cuda {
namespace {

constexpr unsigned threads = 256;

/// Chunks of a bucket of `chunks` whose address among `total` is below `end`: expand_chunks() of
/// the runtime puts chunk k at (k + 1/2) * total / chunks, in 32.32 fixed point, rounded down.
__device__ std::int64_t count_below(std::uint64_t end, std::int64_t chunks, std::int64_t total) {
  if (chunks == 0) return 0;
  const std::uint64_t step =
      (static_cast<std::uint64_t>(total) << 32) / static_cast<std::uint64_t>(chunks);
  const std::uint64_t limit = end << 32;
  if (limit <= step / 2) return 0;
  const auto below = static_cast<std::int64_t>((limit - step / 2 + step - 1) / step);
  return below < chunks ? below : chunks;
}

/// The position of chunk k of a bucket in the order in which chunks are begun.
__device__ std::int64_t position_of(const PlanHead& head, const std::int64_t* bucket_chunks,
                                    int bucket, std::int64_t k) {
  const std::int64_t total = head.num_wire_chunks;
  const bool local_last = total < head.num_chunks;
  if (local_last && bucket == head.world_size - 1) return total + k;
  const std::uint64_t step =
      (static_cast<std::uint64_t>(total) << 32) / static_cast<std::uint64_t>(bucket_chunks[bucket]);
  const std::uint64_t where = (step / 2 + static_cast<std::uint64_t>(k) * step) >> 32;
  std::int64_t position = k;
  for (int b = 0; b < head.world_size - (local_last ? 1 : 0); ++b) {
    if (b == bucket) continue;
    position += count_below(b < bucket ? where + 1 : where, bucket_chunks[b], total);
  }
  return position;
}

__global__ void __launch_bounds__(threads) expand_plan_kernel(ExpandParams p) {
  const RowSegment segment = p.segments[blockIdx.x];
  const RowCut cut = p.head->cuts[segment.tensor];
  const bool batched = p.head->num_batches > 0;
  const std::int64_t steps = (segment.rows + cut.rows_each - 1) / cut.rows_each;
  for (std::int64_t i = blockIdx.y * threads + threadIdx.x; i < steps * cut.parts;
       i += std::int64_t{gridDim.y} * threads) {
    const std::int64_t k = i / cut.parts * cut.rows_each;
    const auto col = static_cast<std::int32_t>(i % cut.parts * cut.part_bytes);
    RowChunk chunk;
    chunk.row = segment.row + k;
    chunk.rows = static_cast<std::int32_t>(segment.rows - k < cut.rows_each ? segment.rows - k
                                                                            : cut.rows_each);
    chunk.tensor = segment.tensor;
    chunk.col_bytes = col;
    chunk.part_bytes = static_cast<std::int32_t>(
        cut.row_bytes - col < cut.part_bytes ? cut.row_bytes - col : cut.part_bytes);
    chunk.first_address =
        static_cast<std::int32_t>(segment.first_address + i * segment.num_destinations);
    chunk.num_addresses = segment.num_destinations;
    const std::int64_t number = segment.first_chunk + i;
    p.chunks[batched ? number : position_of(*p.head, p.bucket_chunks, segment.bucket, number)] =
        chunk;
    if (batched) p.chunk_batches[number] = segment.bucket;
    const auto offset = static_cast<std::uint64_t>(k * cut.row_bytes + col);
    for (std::int32_t c = 0; c < segment.num_destinations; ++c) {
      const std::uint64_t address = p.segment_addresses[segment.first_destination + c];
      const bool is_sum = batched && (address & address_sum_bit) != 0;
      p.addresses[chunk.first_address + c] =
          address + offset * (is_sum ? static_cast<unsigned>(p.head->sum_scale) : 1U);
    }
  }
}

}  // namespace

cudaError_t prepare_expand_plan() {
  cudaFuncAttributes unused{};
  return cudaFuncGetAttributes(&unused, expand_plan_kernel);
}

cudaError_t launch_expand_plan(const ExpandParams& params, std::int64_t num_segments,
                               cudaStream_t stream) {
  if (num_segments == 0) return cudaSuccess;
  // Few long segments or many short ones: about as many blocks.
  constexpr std::int64_t blocks = 512;
  const auto each = static_cast<unsigned>(num_segments < blocks ? blocks / num_segments : 1);
  const dim3 grid(static_cast<unsigned>(num_segments), each);
  expand_plan_kernel<<<grid, threads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
