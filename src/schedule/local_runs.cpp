#include "local_runs.h"

#include <algorithm>
#include <utility>

namespace waybill::detail {
namespace {

/// A copy costs a microsecond or two, in which it moves a megabyte; 16 multiprocessors that read,
/// stage and write move half as much.
constexpr std::int64_t least_piece_bytes = std::int64_t{1} << 19;

/// A second queue costs about what it saves with this many.
constexpr std::int64_t least_bytes = std::int64_t{4} << 20;

/// All runs of a part, also short ones.
std::vector<LocalRun> local_runs(const SparseMetadata& metadata, Rank rank) {
  std::vector<LocalRun> runs;
  bool open = false;
  std::int64_t row = 0;
  const std::size_t r = to_int(rank);
  for (auto j = metadata.rank_offsets[r]; j < metadata.rank_offsets[r + 1]; ++j) {
    const std::int64_t rows = metadata.seq_len[j];
    if (rows == 0) continue;
    const std::int64_t copy = metadata.destination_begin(j);
    const bool stays =
        metadata.destination_end(j) - copy == 1 && metadata.dst_rank[copy] == to_int(rank);
    if (stays) {
      const std::int64_t dst_row = metadata.dst_offset[copy];
      if (!open || runs.back().window_row + runs.back().rows != dst_row) {
        runs.push_back({.first_entry = j, .row = row, .window_row = dst_row});
      }
      runs.back().rows += rows;
      runs.back().end_entry = j + 1;
    }
    open = stays;
    row += rows;
  }
  return runs;
}

}  // namespace

std::vector<std::vector<LocalRun>> long_local_runs(std::span<const SequencePart> parts, Rank rank) {
  std::vector<std::vector<LocalRun>> all;
  std::int64_t total = 0;
  for (const SequencePart& part : parts) {
    std::vector<LocalRun>& runs = all.emplace_back();
    std::int64_t row_bytes = 0;
    for (const TensorFormat& format : part.tensors) row_bytes += format.row_bytes();
    if (row_bytes == 0) continue;
    runs = local_runs(*part.metadata, rank);
    const std::int64_t least = least_piece_bytes * std::ssize(part.tensors);
    std::erase_if(runs, [&](const LocalRun& run) { return run.rows * row_bytes < least; });
    for (const LocalRun& run : runs) total += run.rows * row_bytes;
  }
  if (total >= least_bytes) return all;
  return std::vector<std::vector<LocalRun>>(parts.size());
}

std::vector<StagedRows> rows_to_stage(const SequencePlan& plan) {
  std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>> local(plan.tensors.size());
  for (const RowSegment& segment : plan.local_segments) {
    const std::size_t t = segment.tensor;
    const auto offset = static_cast<std::int64_t>(
        plan.segment_addresses[segment.first_destination] & address_offset_mask);
    const std::int64_t row = (offset - plan.window_offsets[t]) / plan.cuts[t].row_bytes;
    local[t].emplace_back(row, row + segment.rows);
  }
  std::vector<StagedRows> staged;
  for (std::size_t t = 0; t < plan.tensors.size(); ++t) {
    if (plan.tensors[t].row_bytes() == 0) continue;
    std::ranges::sort(local[t]);
    local[t].emplace_back(plan.window_rows[t], plan.window_rows[t]);
    std::int64_t next = 0;
    for (const auto& [begin, end] : local[t]) {
      if (begin > next) staged.push_back({static_cast<std::int32_t>(t), next, begin - next});
      next = std::max(next, end);
    }
  }
  return staged;
}

}  // namespace waybill::detail
