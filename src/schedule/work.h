#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "core/batch_bytes.h"

// The work of a rank as executors take it, on the host and on devices. Plain data.

namespace waybill {

/// The unit of work: some rows of one of this rank's tensors, or a part of one row, and the remote
/// addresses in windows that hold (or get) the same bytes.
struct RowChunk {
  std::int64_t row = 0;            ///< first row of this rank's tensor
  std::int32_t rows = 0;           ///< more than one only when part_bytes is the whole row
  std::int32_t tensor = 0;         ///< index of the tensor in the call
  std::int32_t col_bytes = 0;      ///< where the part begins in its row
  std::int32_t part_bytes = 0;     ///< bytes from each row
  std::int32_t first_address = 0;  ///< into SequencePlan::addresses
  std::int32_t num_addresses = 0;
};
static_assert(sizeof(RowChunk) == 32 && std::is_trivially_copyable_v<RowChunk>);

/// Adjacent rows of one of this rank's tensors that go the same way, of any number: chunks are cut
/// from it.
struct RowSegment {
  std::int64_t row = 0;  ///< first row of this rank's tensor
  std::int64_t rows = 0;
  std::int32_t tensor = 0;  ///< index of the tensor in the call
  /// Distance from rank + 1 to its first address's rank. In plans with batches: the batch.
  std::int32_t bucket = 0;
  std::int32_t first_chunk = 0;        ///< counted in its bucket; with batches in the plan
  std::int32_t first_address = 0;      ///< the first of its chunks, into SequencePlan::addresses
  std::int32_t first_destination = 0;  ///< into SequencePlan::segment_addresses
  std::int32_t num_destinations = 0;
};
static_assert(sizeof(RowSegment) == 40 && std::is_trivially_copyable_v<RowSegment>);

/// How the rows of a tensor are cut into chunks: several rows each, or parts of one.
struct RowCut {
  std::int64_t row_bytes = 0;
  std::int32_t rows_each = 1;   ///< rows of a chunk
  std::int32_t part_bytes = 0;  ///< bytes of a row in a chunk
  std::int32_t parts = 1;       ///< chunks across a row
};

/// A remote address is a byte in the window of a rank, in one word: the rank above, the bytes from
/// the window's begin in the lower 44 bits.
inline constexpr int address_rank_shift = 44;
inline constexpr std::uint64_t address_offset_mask = (std::uint64_t{1} << address_rank_shift) - 1;

/// In plans with batches bit 43 of an address says that the bytes there are of the type that sums
/// are made in (float32; float64 for float64): an addend that is a sum itself. Offsets are below
/// it.
inline constexpr std::uint64_t address_sum_bit = std::uint64_t{1} << 43;

/// A chunk that is sent has at most this many addresses; a longer list becomes several chunks.
inline constexpr std::int32_t max_addresses_sent = 8;

/// The work of a batch with each of its segments.
enum class BatchKind : std::int32_t {
  send,     ///< rows of this rank's tensors, to remote addresses in windows
  forward,  ///< rows of this rank's window (RowSegment::row counts in the window's tensor), to
            ///< addresses
  sum,      ///< the values at the addresses, added in their order, to rows of this rank's outputs
  partial,  ///< the same, not rounded, to rows of this rank's window (RowSegment::row, ::tensor)
};

/// Some of a rank's work: adjacent segments, adjacent chunks. It may begin when all its waits are
/// over, and when all its rows have arrived its signals are raised.
///
/// The batches of a rank are in an order in which any number of workers may take them, each the
/// next one, and wait: no batch waits, over any number of ranks, for a later one.
struct WorkBatch {
  BatchKind kind = BatchKind::send;
  std::int32_t first_segment = 0;  ///< into SequencePlan::segments
  std::int32_t num_segments = 0;
  std::int32_t first_wait = 0;  ///< into SequencePlan::waits
  std::int32_t num_waits = 0;
  std::int32_t first_signal = 0;  ///< into SequencePlan::signals
  std::int32_t num_signals = 0;
  /// All of its segments, in SequencePlan::segment_addresses.
  std::int32_t num_addresses = 0;
  std::int64_t first_chunk = 0;  ///< the first of its first segment
  std::int64_t num_chunks = 0;
};
static_assert(sizeof(WorkBatch) == 48 && std::is_trivially_copyable_v<WorkBatch>);

/// A counter of rows that have arrived, in a pad of `world_size * plan.num_slots`. Slot k of rank r
/// has index k * world_size + r, at every rank; only r raises it, to the epoch of the call.
struct BatchSlot {
  /// In a wait: the rank that raises the own slot; in a signal: the rank whose slot is raised.
  /// world_size: not in the pad, but a counter for the rank's own NetworkProgram
  std::int32_t rank = 0;
  std::int32_t slot = 0;  ///< index in the pad
};
static_assert(sizeof(BatchSlot) == 8 && std::is_trivially_copyable_v<BatchSlot>);

/// Adjacent bytes of this rank's window on their way into the window of a rank on another node.
struct NetworkPut {
  std::int64_t from_bytes = 0;  ///< in the own window
  std::int64_t to_bytes = 0;    ///< in the peer's
  std::int64_t size_bytes = 0;  ///< 0 and more
  std::int32_t peer = 0;
  std::int32_t step = 0;  ///< into NetworkProgram::steps
};
static_assert(sizeof(NetworkPut) == 32 && std::is_trivially_copyable_v<NetworkPut>);

/// Puts that may begin when all waits are over; when they have arrived the signals are raised.
struct NetworkStep {
  std::int32_t first_wait = 0;  ///< into NetworkProgram::waits
  std::int32_t num_waits = 0;
  std::int32_t first_put = 0;     ///< into NetworkProgram::puts
  std::int32_t num_puts = 0;      ///< at least one
  std::int32_t first_signal = 0;  ///< into NetworkProgram::signals
  std::int32_t num_signals = 0;
};
static_assert(sizeof(NetworkStep) == 24 && std::is_trivially_copyable_v<NetworkStep>);

/// All that one rank puts on other nodes in one call, apart from the batches of its plan.
///
/// Steps are in the order of the plan's batches: any number of workers may take the puts, each the
/// next one, and wait for its step; over all ranks no step and no batch waits for a later one.
struct NetworkProgram {
  std::vector<NetworkStep> steps;
  std::vector<NetworkPut> puts;  ///< step by step, none larger than max_put_bytes
  /// A wait with `rank` = world_size is for the rank's own counter `slot` of 0..num_ready-1, which
  /// a batch of its plan raises (a signal with `rank` = world_size there); any other for a slot of
  /// its pad, as the waits of batches.
  std::vector<BatchSlot> waits;
  std::vector<BatchSlot> signals;  ///< to ranks on other nodes, as the signals of batches
  std::int32_t num_ready = 0;
  std::int64_t stage_bytes =
      0;  ///< room in the window, after its tensors, for rows that wait to be put

  [[nodiscard]] bool empty() const { return steps.empty(); }
};

inline constexpr std::int64_t max_put_bytes = detail::max_put_bytes;

/// Adjacent bytes of this rank's window on their way to, or from, a rank on another node.
struct NetworkPiece {
  std::int64_t offset_bytes = 0;  ///< in the own window
  std::int64_t size_bytes = 0;    ///< 0: a message that says only that this phase has come
  std::int32_t peer = 0;
};

/// All that a rank sends and receives at once, where both sides must ask for it (NCCL): the steps
/// of the ranks' network programs, put together.
///
/// A phase begins on a rank when its waits are over and the rank's earlier phases are done, and is
/// done when all its pieces are. Between two ranks both have the same phases with the same pieces,
/// in the same order.
struct NetworkPhase {
  std::int64_t number = 0;         ///< the same on all ranks; grows
  std::vector<BatchSlot> waits;    ///< as NetworkProgram::waits
  std::vector<NetworkPiece> sent;  ///< by peer, in the order in which it receives them
  std::vector<NetworkPiece> received;
  std::vector<std::int32_t> slots;    ///< in the own pad, raised when the phase is done
  std::vector<std::int32_t> arrived;  ///< ranks on other nodes of which nothing comes any more
                                      ///< (dispatch), or that have come to this call (kv_gradient)
};

}  // namespace waybill
