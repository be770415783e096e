#pragma once

#include <cstddef>
#include <cstdint>

#include "../device/params.h"
#include "schedule/row_chunk.h"
#include "schedule/work_batch.h"

namespace waybill::cuda {

inline constexpr int max_call_tensors = 16;

/// Where a tensor of this rank lies.
struct TensorParams {
  std::byte* data;
  std::int64_t pitch_bytes;  ///< from row to row
};

/// A plan in device memory: the head says how much of the tables is used, and how segments become
/// chunks. With batches the tables have values for the sums on the way behind those of the tensors.
struct PlanHead {
  std::int64_t num_chunks;
  std::int64_t num_wire_chunks;
  std::uint64_t fingerprint[2];  ///< of the plan and of its formats, packed
  std::int32_t world_size;
  std::int32_t num_tensors;
  std::int32_t num_batches;       ///< 0: a plan without
  std::int32_t sum_scale;         ///< bytes of a sum on the way a byte of the tensors: 1 or 2
  std::int32_t num_network_puts;  ///< of the plan's NetworkProgram
  RowCut cuts[2 * max_call_tensors];
  std::int64_t window_offsets[2 * max_call_tensors];  ///< bytes, with batches
};

/// The tables of a plan with batches.
struct BatchTables {
  const WorkBatch* batches;
  const BatchSlot* waits;
  const BatchSlot* signals;
  const std::int32_t* chunk_batches;  ///< [chunks]
  unsigned* done;  ///< [batches]: chunks whose rows have arrived; 0 between calls
};

/// What makes chunks and addresses from segments: the device's part of compiling a plan.
struct ExpandParams {
  const PlanHead* head;
  const std::int64_t* bucket_chunks;  ///< [W], without batches
  const RowSegment* segments;
  const std::uint64_t* segment_addresses;
  RowChunk* chunks;
  std::uint64_t* addresses;
  std::int32_t* chunk_batches;
};

struct SequenceParams {
  ArriveParams arrive;
  const PlanHead* head;
  const RowChunk* chunks;
  const std::uint64_t* addresses;
  BatchTables batches;
  std::uint64_t* own_slots;        ///< of the batches
  NearPeers<std::uint64_t> slots;  ///< [W]: the same of each rank
  std::uint64_t* ready;            ///< counters for the plan's NetworkProgram
  std::byte* own_window;
  NearPeers<std::byte> windows;  ///< [W]
  TensorParams inputs[max_call_tensors];
  TensorParams outputs[max_call_tensors];  ///< of a gradient
};
static_assert(sizeof(SequenceParams) <= 4096);

}  // namespace waybill::cuda
