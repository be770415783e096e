#pragma once

#include <cstddef>
#include <cstdint>

#include "../device/call_words.h"
#include "waybill/runtime/row_chunk.h"
#include "waybill/runtime/work_batch.h"

namespace waybill::cuda {

inline constexpr int max_gpu_ranks = 64;  ///< that reach each other by load and store
inline constexpr int max_call_tensors = 16;

/// Counters of one dispatcher on its rank's device. They move on when a call ends, so that the
/// same launch can be replayed.
struct CallState {
  std::uint64_t epoch;          ///< of the last call that has ended
  unsigned long long blocks;    ///< of the running call, that have done their part
  unsigned long long taken[2];  ///< of the running call: chunks of each queue taken by ticket
};

/// What every kernel of a call needs to meet the others.
struct MeetParams {
  std::int32_t rank;
  std::int32_t world_size;
  std::uint32_t parity;  ///< of the epoch for which the windows below were chosen
  FaultKind kind;
  CallState* state;
  FaultSink sink;
  std::uint64_t* own_arrivals;                  ///< [W]: slot r is raised by rank r
  std::uint64_t* peer_arrivals[max_gpu_ranks];  ///< [W]: the same of each rank of the node; else
                                                ///< null: the leg raises those
  FingerprintParams fingerprint;                ///< compared where ranks meet
};

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
  std::int64_t bucket_chunks[max_gpu_ranks];          ///< without batches
};

/// The tables of a plan with batches.
struct BatchTables {
  const WorkBatch* batches;
  const BatchSlot* waits;
  const BatchSlot* signals;
  const std::int32_t* chunk_batches;  ///< [chunks]
  unsigned* done;  ///< [batches]: chunks whose rows have arrived; 0 between calls
};

/// What makes chunks and places from segments: the device's part of compiling a plan.
struct ExpandParams {
  const PlanHead* head;
  const RowSegment* segments;
  const std::uint64_t* segment_places;
  RowChunk* chunks;
  std::uint64_t* places;
  std::int32_t* chunk_batches;
};

struct SequenceParams {
  MeetParams meet;
  const PlanHead* head;
  const RowChunk* chunks;
  const std::uint64_t* places;
  BatchTables batches;
  std::uint64_t* slots[max_gpu_ranks];  ///< [W]: of the batches, of each rank of the node
  std::uint64_t* ready;                 ///< counters for the plan's NetworkProgram
  std::byte* windows[max_gpu_ranks];    ///< [W], as above
  TensorParams inputs[max_call_tensors];
  TensorParams outputs[max_call_tensors];  ///< of a gradient
};
static_assert(sizeof(SequenceParams) <= 4096);

}  // namespace waybill::cuda
