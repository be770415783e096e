#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "waybill/planner/planner.h"
#include "waybill/planner/planner_options.h"

namespace waybill::detail {

/// Tokens [begin, end) of a document that lie on one rank in the MLP layout.
struct HomePiece {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int32_t doc = 0;
  std::int32_t rank = 0;
  std::int64_t doc_len = 0;
};

/// Where documents lie. Pieces are numbered by document, then by position. Where documents are
/// packed in order that is the order of the ranks and their rows too (`by_rank` is 0, 1, 2, ...).
struct HomeLayout {
  std::int32_t world_size = 0;
  std::int64_t tokens_per_rank = 0;  ///< as packed; of lists: the most that a rank has
  std::vector<HomePiece> pieces;
  std::vector<std::int32_t> by_rank;      ///< [pieces]: rank by rank, in the order of the rows
  std::vector<std::int32_t> rank_pieces;  ///< [W + 1]: into by_rank
  std::vector<std::int32_t> doc_pieces;   ///< [D + 1]
  std::vector<std::int64_t> tokens;       ///< [W]

  [[nodiscard]] std::int64_t num_docs() const {
    return static_cast<std::int64_t>(doc_pieces.size()) - 1;
  }
  /// The pieces of a rank, in the order of its rows.
  [[nodiscard]] std::span<const std::int32_t> pieces_of(std::int32_t rank) const {
    const auto r = static_cast<std::size_t>(rank);
    return std::span(by_rank).subspan(
        static_cast<std::size_t>(rank_pieces[r]),
        static_cast<std::size_t>(rank_pieces[r + 1] - rank_pieces[r]));
  }
};

/// Packs flat documents in order into the ranks. @throws InvalidArgument, see plan_attention.
void lay_out(std::span<const std::int64_t> doc_lengths, const PlannerOptions& options,
             HomeLayout& home);

/// Documents that lie on a rank each. @throws InvalidArgument, see plan_attention.
void lay_out(std::span<const std::vector<std::int64_t>> rank_doc_lengths,
             const PlannerOptions& options, HomeLayout& home);

/// Pieces anywhere. @throws InvalidArgument, see plan_pieces.
void lay_out(std::span<const std::vector<DocumentRange>> rank_pieces, const PlannerOptions& options,
             HomeLayout& home);

}  // namespace waybill::detail
