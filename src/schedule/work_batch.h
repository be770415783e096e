#pragma once

#include <cstdint>
#include <type_traits>

namespace waybill {

/// What a batch does with each of its segments.
enum class BatchKind : std::int32_t {
  send,     ///< rows of this rank's tensors, to remote addresses in windows
  forward,  ///< rows of this rank's window (RowSegment::row counts in the window's tensor), to
            ///< addresses
  sum,  ///< what stands at the addresses, added up in their order, to rows of this rank's outputs
  partial,  ///< the same, not rounded, to rows of this rank's window (RowSegment::row, ::tensor)
};

/// Some of a rank's work: adjacent segments, adjacent chunks. It may begin when all its waits are
/// over, and when all its rows have arrived its signals are raised.
///
/// The batches of a rank are in an order in which any number of workers may take them, each the
/// next one, and wait: no batch waits, over any number of ranks, for one that stands behind it.
struct WorkBatch {
  BatchKind kind = BatchKind::send;
  std::int32_t first_segment = 0;  ///< into SequencePlan::segments
  std::int32_t num_segments = 0;
  std::int32_t first_wait = 0;  ///< into SequencePlan::waits
  std::int32_t num_waits = 0;
  std::int32_t first_signal = 0;  ///< into SequencePlan::signals
  std::int32_t num_signals = 0;
  std::int32_t num_addresses =
      0;                         ///< of its segments together, into SequencePlan::segment_addresses
  std::int64_t first_chunk = 0;  ///< of its first segment
  std::int64_t num_chunks = 0;
};
static_assert(sizeof(WorkBatch) == 48 && std::is_trivially_copyable_v<WorkBatch>);

/// A counter of rows that have arrived, in a pad of `world_size * plan.num_slots`. Slot k of rank r
/// has index k * world_size + r, at every rank; only r raises it, to the epoch of the call.
struct BatchSlot {
  /// Of a wait: who raises the own slot; of a signal: whose is raised. world_size: not of the pad,
  /// but a counter for the rank's own NetworkProgram
  std::int32_t rank = 0;
  std::int32_t slot = 0;  ///< index in the pad
};
static_assert(sizeof(BatchSlot) == 8 && std::is_trivially_copyable_v<BatchSlot>);

/// In plans with batches bit 43 of an address says that the bytes there are of the type that sums
/// are made in (float32; float64 for float64): an addend that is a sum itself. Offsets are below
/// it.
inline constexpr std::uint64_t address_sum_bit = std::uint64_t{1} << 43;

}  // namespace waybill
