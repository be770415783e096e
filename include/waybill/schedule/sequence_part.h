#pragma once

#include <cstdint>
#include <vector>

#include "waybill/core/dtype.h"
#include "waybill/core/link_speeds.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/metadata.h"

namespace waybill {

/// The rows of a tensor [tokens, hidden].
struct TensorFormat {
  DType dtype = DType::bfloat16;
  std::int64_t hidden = 0;  ///< elements of a row

  [[nodiscard]] std::int64_t row_bytes() const { return hidden * dtype_bytes(dtype); }
  friend bool operator==(const TensorFormat&, const TensorFormat&) = default;
};

/// Tensors that go the same way: Q alone, or K and V.
struct SequencePart {
  const SparseMetadata* metadata = nullptr;
  std::vector<TensorFormat> tensors;
  /// The relay of the same plan's K and V: the ranks that may forward rows. A hop's `shard` is the
  /// entry. Null: nobody forwards.
  const RelaySchedule* relay = nullptr;
  /// Rows for which every rank's window has room in any case, and shows: the next tensors then
  /// begin at the same place for all plans that need no more, as CUDA graphs want. 0: as many as
  /// the plan needs.
  std::int64_t min_window_rows = 0;
  /// Batches of each rank for which tables and slots have room in any case, as CUDA graphs want
  /// that replay plans of which some forward: the plan has batches then also where nobody forwards.
  /// 0: as many as the plan needs.
  std::int32_t min_batches = 0;
};

/// Which way the bytes of a plan go.
enum class SequenceOperation : std::uint8_t {
  dispatch,     ///< from this rank's tensors into the windows of others
  kv_gradient,  ///< from the windows of others, summed, into this rank's tensors
};

/// The limits of the links in seconds: the least time of each way at the options' speeds, and the
/// way that was taken. Local rows do not count. On the way back, kv_gradient, sums are in float32,
/// twice as wide as 16-bit rows: they are made in nodes where that takes less time than all rows
/// do.
struct PlanLimits {
  TransferMode way = TransferMode::direct;
  double direct_seconds = 0;
  double once_per_node_seconds = 0;  ///< on one node: direct_seconds
  double relay_seconds = 0;          ///< without a schedule: that of the way without
};

/// When receivers forward to each other, where a part has a relay schedule.
enum class RelayUse : std::uint8_t {
  automatic,  ///< when its limit is at least a tenth below that without; kv_gradient on one node:
              ///< never (docs/performance/gpu_sequences.md)
  never,
  always,
};

/// How a dispatcher's plans are compiled.
struct SequencePlanOptions {
  std::int64_t chunk_bytes = 8192;  ///< a multiple of 16; a chunk has at least one row or this
  RelayUse relay = RelayUse::automatic;
  // For the limits, and the way that is taken.
  double nvlink_bytes_per_second = LinkSpeeds{}.nvlink_bytes_per_second;
  double network_bytes_per_second = LinkSpeeds{}.network_bytes_per_second;
  /// Bytes of a batch that others forward or add up. 0: a sixteenth of what the rank sends to such,
  /// 256 KiB to 2 MiB.
  std::int64_t batch_bytes = 0;
  /// Over networks in which the receiver must ask for what is sent (NCCL): about so much does a
  /// rank send in a phase.
  std::int64_t phase_bytes = std::int64_t{8} << 20;
};

/// Batches with signals that a rank has without the slots having to grow.
inline constexpr std::int32_t least_batch_slots = 64;

}  // namespace waybill
