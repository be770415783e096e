#pragma once

#include <cstdint>
#include <span>

#include "routes.h"
#include "schedule/sequence_plan.h"

namespace waybill::detail {

/// Segments of pieces that others do not wait for are no longer, so that destinations alternate.
inline constexpr std::int64_t leaf_piece_bytes = std::int64_t{256} << 10;

/// Offsets of plans with batches have 43 bits.
inline constexpr int batched_window_bits = 43;

/// Fills the tables of `plan`, which has its operation, ranks, tensors, cuts and limits, with the
/// rank's part of what goes along the hops of `way`. Windows too.
void compile_batched_dispatch(const char* who, std::span<const SequencePart> parts,
                              const ChosenWay& way, const CompileOptions& options,
                              SequencePlan& plan);
void compile_batched_gradient(const char* who, std::span<const SequencePart> parts,
                              const ChosenWay& way, const CompileOptions& options,
                              SequencePlan& plan);

/// The nodes on which the ranks of a plan are.
[[nodiscard]] Topology topology_of(const SequencePlan& plan, const CompileOptions& options);

/// First tensor of each part, and their number. [parts + 1]
[[nodiscard]] std::vector<std::int32_t> first_tensors(std::span<const SequencePart> parts);

/// Calls visit(part, entry, first row of the entry) for the entries of a rank that have rows.
template <class Visit>
void for_own_entries(std::span<const SequencePart> parts, Rank rank, Visit&& visit) {
  const auto r = static_cast<std::size_t>(to_int(rank));
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const SparseMetadata& metadata = *parts[p].metadata;
    std::int64_t row = 0;
    for (auto j = metadata.rank_offsets[r]; j < metadata.rank_offsets[r + 1]; ++j) {
      const std::int64_t rows = metadata.seq_len[static_cast<std::size_t>(j)];
      if (rows > 0) visit(p, j, row);
      row += rows;
    }
  }
}

}  // namespace waybill::detail
