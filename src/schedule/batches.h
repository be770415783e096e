#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "routes.h"
#include "schedule/sequence_plan.h"
#include "segments.h"

namespace waybill::detail {

/// Offsets of plans with batches have 43 bits.
inline constexpr int batched_window_bits = 43;

/// Fill the tables of `plan`, which has its operation, ranks, tensors, cuts and limits, with the
/// rank's part of the rows on the hops of `way`. Windows too.
/// @param needed rows of the windows
void compile_batched_dispatch(const char* who, std::span<const SequencePart> parts,
                              const PartRows& needed, const ChosenWay& way,
                              const CompileOptions& options, SequencePlan& plan);
void compile_batched_gradient(const char* who, std::span<const SequencePart> parts,
                              const PartRows& needed, const ChosenWay& way,
                              const CompileOptions& options, SequencePlan& plan);

/// The number of bytes of `total` that a batch should have.
[[nodiscard]] std::int64_t batch_size(std::int64_t total_bytes, std::int64_t batch_bytes);

/// First tensor of each part, and their number. [parts + 1]
[[nodiscard]] std::vector<std::int32_t> first_tensors(std::span<const SequencePart> parts);

/// Work of one rank that others wait for, or that waits for others.
struct BatchJob {
  std::int32_t rank = 0;
  std::int64_t num_bytes = 0;
  // As order_jobs finds them:
  std::int64_t ready = 0;   ///< when all that it waits for has ended
  std::int64_t start = 0;   ///< ready, or later when its rank was busy
  std::int64_t finish = 0;  ///< later than start
};

/// Orders the jobs of all ranks as they can be done, as if every rank did one at a time and each
/// took as long as it has bytes: the job that is ready first comes first. Writes the times of jobs.
/// @param edges (job, job that waits for it), no cycles
[[nodiscard]] std::vector<std::int32_t> order_jobs(
    std::int32_t world_size, std::span<BatchJob> jobs,
    std::span<const std::pair<std::int32_t, std::int32_t>> edges);

/// The hops of all parts grouped into batches. A batch is rows that one rank sends on when the same
/// batch of another has arrived (`after`), or its own (`after` -1).
class HopBatches {
 public:
  /// Own rows are grouped by bytes as the options say, where `groups_own` says so of a hop; other
  /// own hops have no batch.
  HopBatches(std::span<const SequencePart> parts, std::span<const PartRoutes> routes,
             std::int64_t batch_bytes,
             const std::function<bool(const PartRoutes&, std::size_t)>& groups_own);

  /// The batch of `rank` that waits for `batch`; made when it is not there.
  std::int32_t following(std::int32_t batch, std::int32_t rank);

  std::vector<BatchJob> jobs;
  std::vector<std::int32_t> after;            ///< [batches]
  std::vector<std::vector<std::int32_t>> of;  ///< [parts][hops] batch that carries the hop; -1

 private:
  std::int32_t add(std::int32_t rank, std::int32_t before);

  std::vector<std::vector<std::int32_t>> following_;  ///< [batches] those that wait for it
};

/// Begins a batch of the plan. Segments, waits and signals that the plan gets until end_batch() are
/// those of the batch.
void begin_batch(SequencePlan& plan, BatchKind kind);

/// Appends a segment with these addresses to the batch that has begun, unless it has no bytes.
void add_segment(SequencePlan& plan, std::int32_t tensor, std::int64_t row, std::int64_t rows,
                 std::span<const std::uint64_t> addresses);

/// Whether the batch that has begun has neither segments nor signals.
[[nodiscard]] bool is_batch_empty(const SequencePlan& plan);

/// Ends the batch that has begun; an empty one goes.
void end_batch(SequencePlan& plan);

/// Sorts values and leaves each once.
template <class Value>
void sort_unique(std::vector<Value>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
}

/// Calls visit(part, entry, first row of the entry) for the entries of a rank that have rows.
template <class Visit>
void for_own_entries(std::span<const SequencePart> parts, Rank rank, Visit&& visit) {
  const std::size_t r = to_int(rank);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const SparseMetadata& metadata = *parts[p].metadata;
    std::int64_t row = 0;
    for (auto j = metadata.rank_offsets[r]; j < metadata.rank_offsets[r + 1]; ++j) {
      const std::int64_t rows = metadata.seq_len[j];
      if (rows > 0) visit(p, j, row);
      row += rows;
    }
  }
}

}  // namespace waybill::detail
