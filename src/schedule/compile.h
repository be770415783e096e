#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "schedule/sequence_plan.h"
#include "waybill/core/topology.h"
#include "waybill/planner/planner.h"

// The steps of compiling a plan: rows become segments; hops between ranks become routes, batches
// and what the network puts.

namespace waybill::detail {

/// Bytes of a row of all tensors of the part.
[[nodiscard]] std::int64_t row_bytes_of(const SequencePart& part);

/// The format in which rows are added up: float32, float64 for float64.
[[nodiscard]] TensorFormat sum_format(const TensorFormat& format);

/// How rows are cut into chunks of at most `chunk_bytes`.
[[nodiscard]] RowCut cut_rows(std::int64_t row_bytes, std::int64_t chunk_bytes);

/// Rows of a part's tensors in the windows of all ranks: for each part [W].
using PartRows = std::vector<std::vector<std::int64_t>>;

/// Places the tensors of a call in the windows of all ranks and after them, as tensor
/// `num_tensors + t`, the sums on the way of tensor t.
class WindowMap {
 public:
  /// @param sums rows of the sums on the way; empty: none
  /// @throws InvalidArgument when a window would need 2^`bits` bytes.
  WindowMap(const char* who, std::span<const SequencePart> parts, const PartRows& rows,
            const PartRows& sums = {}, int bits = address_rank_shift);

  [[nodiscard]] std::int64_t offset(std::size_t tensor, std::int32_t rank) const {
    return offsets_[tensor][rank];
  }
  /// A row of a tensor in the window of `rank`; the address of a sum says that it is one.
  [[nodiscard]] std::uint64_t address(std::size_t tensor, std::int32_t rank,
                                      std::int64_t row) const {
    return static_cast<std::uint64_t>(rank) << address_rank_shift |
           static_cast<std::uint64_t>(offset(tensor, rank) + row * row_bytes_[tensor]) |
           (tensor >= first_sum_ ? address_sum_bit : 0);
  }
  [[nodiscard]] std::int64_t largest() const;

  /// The offsets of all tensors in the window of the plan's rank.
  void write_offsets(SequencePlan& plan) const;

  /// Makes room after the tensors of each rank's window. [W]
  /// @return where it begins in the window of `rank`
  /// @throws InvalidArgument as above
  std::int64_t add_stage(const char* who, std::span<const std::int64_t> size_bytes,
                         std::int32_t rank);

 private:
  void add(const char* who, const TensorFormat& format, std::span<const std::int64_t> rows);
  void take(const char* who, std::size_t rank, std::int64_t bytes);

  PartRows offsets_;                     ///< [tensors][W]
  std::vector<std::int64_t> row_bytes_;  ///< [tensors]
  std::size_t first_sum_ = 0;            ///< the first tensor that is of sums
  std::vector<std::int64_t> used_;       ///< [W]
  int bits_;
};

/// Rows of all tensors of a part on their way to one place of a window.
struct RowMove {
  std::int32_t tensor = 0;       ///< first of the part
  std::int32_t num_tensors = 0;  ///< as many as the part has: all go the same way
  std::int64_t row = 0;          ///< in this rank's tensor, or in its window
  std::int64_t rows = 0;
  std::int32_t dst_rank = 0;
  std::int64_t dst_row = 0;
};

/// Distance of a rank from the next one after `from`: 0 for that, W - 1 for `from`.
[[nodiscard]] inline std::int32_t distance(std::int32_t from, std::int32_t to,
                                           std::int32_t world_size) {
  const std::int32_t steps = to - from - 1;
  return steps < 0 ? steps + world_size : steps;
}

/// Appends a segment and counts its chunks. The caller sets its bucket and first chunk.
RowSegment& append_segment(SequencePlan& plan, std::int32_t tensor, std::int64_t row,
                           std::int64_t rows, std::span<const std::uint64_t> addresses);

/// Appends rows that stay on the rank to the local segments.
void append_local(SequencePlan& plan, const WindowMap& windows, const RowMove& move);

/// Whether rows that stay on the rank are worth a call to the copy engine of their own.
[[nodiscard]] bool separates_local_rows(std::span<const SequencePart> parts, Rank rank,
                                        std::int32_t num_sms);

/// @throws InvalidArgument for 2^31 chunks or addresses
void check_chunk_numbers(const SequencePlan& plan);

/// Fills the tables of a plan in which every rank is reached by load and store.
/// @param needed rows of the windows
void compile_direct(const char* who, std::span<const SequencePart> parts, const PartRows& needed,
                    const CompileOptions& options, SequencePlan& plan);

/// The rows of the plan's windows that its local segments do not read.
[[nodiscard]] std::vector<RowSegment> rows_to_stage(const SequencePlan& plan);

/// Sums of rows and bytes of a call stay below it, with room for sums that are wider.
inline constexpr double max_call_bytes = 0x1p60;

/// The hops of a part and what they mean for its tables. A hop brings rows to one address on
/// dst_rank: the entry's first copy there, or, where it has none, rows that the rank only passes
/// on.
struct PartRoutes {
  std::vector<RelayHop> hops;           ///< ordered: a hop stands after the one that feeds it
  std::vector<std::int32_t> home;       ///< [entries]
  std::vector<std::uint8_t> has_hops;   ///< [entries] else all copies go straight from home
  std::vector<std::int64_t> receivers;  ///< [entries] ranks with copies but home; 0 without
                                        ///< hops
  std::vector<std::uint8_t> feeds;      ///< [hops] other hops stand on it
  std::vector<std::int32_t> num_destinations;  ///< [hops] of the entry on dst_rank
  std::vector<std::int32_t>
      first_destination;              ///< [hops] the first of these, counted in the entry; or -1
  std::vector<std::int64_t> dst_row;  ///< [hops] of dst's tensor: where the first row goes
  std::vector<std::int64_t> passed_rows;  ///< [W] rows that the rank only passes on
};

/// @param rows_needed [W] of the tensors in the windows; rows that are passed on follow them
/// @throws InvalidArgument when the hops do not fit the metadata
[[nodiscard]] PartRoutes follow_hops(const char* who, const SparseMetadata& metadata,
                                     std::vector<RelayHop> hops,
                                     std::span<const std::int64_t> rows_needed);

/// The way that a plan takes, and the hops of each part on it.
struct ChosenWay {
  PlanLimits limits;
  bool batched = false;                     ///< else every rank is reached by load and store
  std::vector<std::vector<RelayHop>> hops;  ///< [parts]; where batched
};

/// The routes of each part on the way. @param needed rows of the windows
[[nodiscard]] std::vector<PartRoutes> follow_way(const char* who,
                                                 std::span<const SequencePart> parts,
                                                 const PartRows& needed, const ChosenWay& way);

[[nodiscard]] ChosenWay choose_way(const char* who, SequenceOperation operation,
                                   std::span<const SequencePart> parts,
                                   const CompileOptions& options);

/// How the rows that a hop has brought come back along it.
enum class ReturnKind : std::uint8_t {
  read,  ///< the hop's source reads the copies itself: dst_rank is on the node and forwards nothing
  rows,  ///< the only copy, put as it is by dst_rank
  sum,   ///< one sum of all that the destination has and gets back
};

/// @param h a hop of the routes
[[nodiscard]] ReturnKind return_kind(const Topology& topology, const PartRoutes& routes,
                                     std::size_t h);

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

/// Bytes of own rows that each rank puts on other nodes: its stage has room for them. [W]
[[nodiscard]] std::vector<std::int64_t> staged_bytes(std::span<const SequencePart> parts,
                                                     std::span<const PartRoutes> routes,
                                                     const Topology& topology);

/// Takes all that goes to other nodes out of the batches of `plan`, a whole plan without chunks,
/// and writes it into `plan.network`. Rows of the rank's tensors are sent to its stage first,
/// `stage_begin` bytes after the begin of its window, such that rows that are adjacent at the
/// receiver are so in the stage; rows of the window are put from where they are. Rows for which
/// nobody waits go network first, in batches of about `batch_bytes`.
void split_network(SequencePlan& plan, const Topology& topology, std::int64_t stage_begin,
                   std::int64_t batch_bytes);

/// The phases of `rank` in a call whose plans, with split networks, are `plans`. [W]
///
/// A phase has a level and a part of it. The level of a step is the number of crossings that come
/// before it one after another, where a batch also comes after the earlier batches of its rank: so
/// when the phases of lower levels are done on all ranks, the waits of a level end, whatever the
/// number of workers on the batches (docs/decisions/nodes.md). Parts of a level are for
/// pipelining: each takes about `phase_bytes` of each rank's steps.
[[nodiscard]] std::vector<NetworkPhase> network_phases(std::span<const SequencePlan* const> plans,
                                                       const Topology& topology, Rank rank,
                                                       std::int64_t phase_bytes);

}  // namespace waybill::detail
