#pragma once

#include "params.h"

namespace waybill::cuda {

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
      if constexpr (Batched) batch = p.batches.chunk_batches[chunk];
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
    if constexpr (Batched) upcoming_batch = p.batches.chunk_batches[chunk + step];
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

}  // namespace waybill::cuda
