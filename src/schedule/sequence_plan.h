#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/work.h"
#include "waybill/core/table_allocator.h"
#include "waybill/core/topology.h"
#include "waybill/schedule/sequence_part.h"

namespace waybill {

/// One rank's work for one operation, ready to be run any number of times: the entries of a
/// SparseMetadata that begin at this rank, cut into chunks. Plain data.
///
/// A window is the memory of a rank that other ranks write to or read from. Its tensors follow each
/// other, each on a 256-byte boundary, rows without gaps.
struct SequencePlan {
  SequenceOperation operation = SequenceOperation::dispatch;
  std::int32_t world_size = 1;
  Rank rank{};
  std::vector<TensorFormat> tensors;             ///< those of all parts, in order
  std::vector<std::int64_t> own_rows;            ///< [tensors]: rows of this rank's tensor
  std::vector<std::int64_t> window_rows;         ///< [tensors]: rows in this rank's window
  std::vector<std::int64_t> window_offsets;      ///< [tensors]: bytes, in this rank's window
  std::int64_t window_bytes = 0;                 ///< the largest window of all ranks
  std::int64_t chunk_bytes = 0;                  ///< no chunk is larger
  std::vector<RowSegment> segments;              ///< all work but local_segments, in any order
  std::vector<std::uint64_t> segment_addresses;  ///< where the first row of each copy goes
  /// With `separate_local_copies`: rows that stay on the rank. kv_gradient: their sums are the rows
  /// at their address in the window, and this rank copies them from its gradients to its outputs.
  std::vector<RowSegment> local_segments;
  /// kv_gradient: gradients that sums read in the window; rows of the tensor, and the same of the
  /// window.
  std::vector<RowSegment> staged;
  std::vector<RowCut> cuts;                 ///< [tensors]
  std::vector<std::int64_t> bucket_chunks;  ///< [W]: chunks by distance from rank + 1
  std::int64_t num_chunks = 0;
  std::int64_t num_wire_chunks = 0;  ///< dispatch: the first ones, that go to another rank (too);
                                     ///< those that only stay follow. kv_gradient: all
  std::int64_t num_addresses = 0;
  UninitializedVector<RowChunk> chunks;  ///< in the order in which they should be begun
  UninitializedVector<std::uint64_t> addresses;
  std::vector<std::int64_t> wire_bytes;  ///< [W]: to (or from) each rank; the own one is local

  /// Empty: all segments at once, in any order; addresses are in reach of their ranks. Else all
  /// work is in batches, one after another: the chunks of a segment are adjacent from its
  /// first_chunk on, `bucket` is the segment's batch, and the rows of a tensor in the window are
  /// followed by rows that this rank passes on. kv_gradient: `window_offsets` and `cuts` have twice
  /// as many values, entry tensors + t for the sums on the way of tensor t, in float32 (float64 for
  /// float64).
  std::vector<WorkBatch> batches;
  std::vector<BatchSlot> waits;
  std::vector<BatchSlot> signals;
  std::int32_t min_batches = 0;      ///< for which there is room in any case
  std::int32_t num_slots = 0;        ///< that the rank with the most needs, or min_batches
  NetworkProgram network;            ///< with `split_network`: the puts that are not in batches
  std::vector<NetworkPhase> phases;  ///< with `two_sided_network`: the same, with arrivals

  // The same on all ranks when all compile the same: they compare these in each call.
  std::uint64_t fingerprint = 0;  ///< hash of the entries and copies of all ranks and of their way
  std::uint64_t formats = 0;      ///< hash of the parts' tensors
  PlanLimits limits;
};

/// How plans are compiled: as the user says, and as the world and its executor need them.
struct CompileOptions {
  SequencePlanOptions plan = {};
  bool chunks = true;  ///< false: chunks and addresses are left to expand_chunks() or the executor
  /// Rows that stay on the rank are no chunks. dispatch: where they are many in long pieces and
  /// `num_sms` multiprocessors have enough to do with the others; kv_gradient: those with one copy,
  /// in pieces of 512 KiB and more that are 4 MiB together, where no sums are made on the way.
  bool separate_local_copies = false;
  std::int32_t num_sms = 16;
  std::int32_t ranks_per_node = 0;  ///< 0: all ranks on one node
  /// Rows for other nodes are in SequencePlan::network, and no batch has addresses there: for
  /// executors whose kernels stay on the node.
  bool split_network = false;
  /// With split_network: also SequencePlan::phases, for networks in which the receiver must ask for
  /// the rows. The plans of all ranks are compiled for it, on all cores.
  bool two_sided_network = false;

  [[nodiscard]] Topology topology(std::int32_t world_size) const {
    return {world_size, ranks_per_node == 0 ? world_size : ranks_per_node};
  }
};

/// Calls visit(name, value) with the options that must be the same on all ranks.
template <class Visit>
void for_common_options(const SequencePlanOptions& plan, Visit&& visit) {
  visit("plan.relay", static_cast<std::int32_t>(plan.relay));
  visit("plan.batch_bytes", plan.batch_bytes);
  visit("plan.phase_bytes", plan.phase_bytes);
  visit("plan.nvlink_bytes_per_second", plan.nvlink_bytes_per_second);
  visit("plan.network_bytes_per_second", plan.network_bytes_per_second);
}

/// Makes the chunks and addresses of a plan from its segments.
void expand_chunks(SequencePlan& plan);

/// Compiles the rows that `rank` sends, in time linear in the entries and copies of all ranks and,
/// with `chunks`, in this rank's chunks. Chunks to different ranks alternate, in proportion to
/// their number, beginning with rank + 1, those that stay come last; a chunk with several addresses
/// is read once.
/// @throws InvalidArgument for metadata whose tables do not fit each other, ranks and offsets out
///   of range, parts of different worlds, windows of 2^44 bytes and more, and copies or relay hops
///   of 2^60 bytes in all. Rows that two entries write are not looked for: see validate.
[[nodiscard]] SequencePlan compile_dispatch(std::span<const SequencePart> parts, Rank rank,
                                            const CompileOptions& options = {});

/// Compiles the sums for `rank`: `metadata` are those of the forward dispatch of K and V. Row x of
/// the result is the sum of the copies of row x, in the order of the copies, 0 without copies.
/// With batches sums are made on the way: docs/decisions/numbers.md says in which order.
/// Tensors of float16, bfloat16, float32 or float64, all of one dtype. Chunks are of at most 2048
/// bytes.
/// @throws InvalidArgument as above and for other dtypes.
[[nodiscard]] SequencePlan compile_kv_gradient(std::span<const SequencePart> parts, Rank rank,
                                               const CompileOptions& options = {});

}  // namespace waybill
