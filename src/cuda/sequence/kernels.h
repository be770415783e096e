#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../device/params.h"
#include "schedule/work.h"
#include "waybill/core/dtype.h"

// The parameters of the kernels for sequences, and their launches.

namespace waybill::cuda {

inline constexpr int max_call_tensors = 16;
inline constexpr int max_bulk_chunk_bytes = 8192;      ///< largest chunk that bulk copies send
inline constexpr int max_gradient_chunk_bytes = 2048;  ///< largest chunk that is summed

/// Where a tensor of this rank lies.
struct TensorParams {
  std::byte* data;
  std::int64_t pitch_bytes;  ///< from row to row
};

/// A plan in device memory: the head says how much of the tables is used, and how segments become
/// chunks. With batches the tables have values for the sums on the way, too, after those of the
/// tensors.
struct PlanHead {
  std::int64_t num_chunks;
  std::int64_t num_wire_chunks;
  std::uint64_t fingerprint[2];  ///< packed words of the plan and of its formats
  std::int32_t world_size;
  std::int32_t num_tensors;
  std::int32_t num_batches;       ///< 0: a plan without
  std::int32_t sum_scale;         ///< bytes of a sum on the way per byte of the tensors: 1 or 2
  std::int32_t num_network_puts;  ///< in the plan's NetworkProgram
  RowCut cuts[2 * max_call_tensors];
  std::int64_t window_offsets[2 * max_call_tensors];  ///< bytes, with batches
};

struct SequenceParams {
  ArriveParams arrive;
  const PlanHead* head;
  const RowChunk* chunks;
  const std::uint64_t* addresses;
  // For plans with batches:
  const WorkBatch* batches;
  const BatchSlot* waits;
  const BatchSlot* signals;
  const std::int32_t* chunk_batches;  ///< [chunks]
  unsigned* done;                     ///< [batches]: chunks that have arrived; 0 between calls
  std::uint64_t* own_slots;
  NearPeers<std::uint64_t> slots;  ///< [W]: the same slots of each rank
  std::uint64_t* ready;            ///< counters for the plan's NetworkProgram
  std::byte* own_window;
  NearPeers<std::byte> windows;  ///< [W]
  TensorParams inputs[max_call_tensors];
  TensorParams outputs[max_call_tensors];  ///< gradients have some
};
static_assert(sizeof(SequenceParams) <= 4096);

/// Sends the chunks with bulk copies (sm_90 and later): tensors, pitches and rows are multiples of
/// 16 bytes, no chunk over max_bulk_chunk_bytes.
/// @param batched whether the plan has batches
cudaError_t launch_dispatch_tma(const SequenceParams& params, bool batched, int num_sms,
                                cudaStream_t stream);

/// The same with loads and stores of the threads, for any address and size.
cudaError_t launch_dispatch_vector(const SequenceParams& params, bool batched, int num_sms,
                                   cudaStream_t stream);

/// Sums the chunks; the windows hold the addends once all ranks have come to this call.
/// @param bulk needs what launch_dispatch_tma needs, of windows and outputs; chunks up to
///   max_gradient_chunk_bytes. Without it elements must be aligned to their size
cudaError_t launch_kv_gradient(const SequenceParams& params, DType from, DType to, bool bulk,
                               bool batched, int num_sms, cudaStream_t stream);

/// Rows of 16-bit numbers that become float32; elements are aligned to their size.
struct WidenParams {
  const std::byte* from;
  std::byte* to;
  std::int64_t from_pitch;  ///< bytes
  std::int64_t to_pitch;
  std::int64_t rows;
  std::int64_t elements;  ///< in each row
};

/// @param from float16 or bfloat16
cudaError_t launch_widen_rows(const WidenParams& params, DType from, int num_sms,
                              cudaStream_t stream);

/// The tables from which the device makes chunks and addresses: its part of compiling a plan.
struct ExpandParams {
  const PlanHead* head;
  const std::int64_t* bucket_chunks;  ///< [W], without batches
  const RowSegment* segments;
  const std::uint64_t* segment_addresses;
  RowChunk* chunks;
  std::uint64_t* addresses;
  std::int32_t* chunk_batches;
};

/// Makes the chunks and addresses of a plan, as expand_chunks() of the runtime does.
cudaError_t launch_expand_plan(const ExpandParams& params, std::int64_t num_segments,
                               cudaStream_t stream);

/// Each loads kernels into the context of the current device, so that no launch has to wait for a
/// device on which another rank's kernel waits for this one's.
cudaError_t prepare_dispatch_tma();
cudaError_t prepare_dispatch_vector();
cudaError_t prepare_kv_gradient(bool bulk);
cudaError_t prepare_widen_rows();
cudaError_t prepare_expand_plan();

}  // namespace waybill::cuda
