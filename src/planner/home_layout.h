#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "waybill/planner/planner.h"

namespace waybill::detail {

/// Queries [begin, end) of a document.
struct Slab {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  /// Tokens of the document, and of its prefix as given: 0, or 2 and more. Masks may look at them.
  std::int64_t doc_len = 0;
  std::int64_t prefix = 0;

  [[nodiscard]] std::int64_t rows() const { return end - begin; }
  /// Other queries of the document.
  [[nodiscard]] Slab part(std::int64_t from, std::int64_t to) const {
    return {from, to, doc_len, prefix};
  }
};

/// Tokens of a document that lie on one rank in the MLP layout.
struct HomePiece : Slab {
  std::int32_t doc = 0;
  std::int32_t rank = 0;
};

/// Queries of a home piece, positions in the document, that another rank attends to.
struct Move {
  Slab slab;
  std::int32_t piece = 0;
  std::int32_t dst = 0;
};

/// Where documents lie. Of a mask with chunks each chunk is a document here. Pieces are numbered by
/// document, then by position. Where documents are packed in order that is the order of the ranks
/// and their rows too (`by_rank` is 0, 1, 2, ...).
struct HomeLayout {
  std::int32_t world_size = 0;
  std::int64_t tokens_per_rank = 0;  ///< as packed; of lists: the most that a rank has
  std::vector<HomePiece> pieces;
  std::vector<std::int32_t> by_rank;      ///< [pieces]: rank by rank, in the order of the rows
  std::vector<std::int32_t> rank_pieces;  ///< [W + 1]: into by_rank
  std::vector<std::int32_t> doc_pieces;   ///< [D + 1]
  /// [documents as given + 1] The documents here that are chunks of one; empty: all are as given.
  std::vector<std::int32_t> doc_chunks;
  std::vector<std::int64_t> tokens;  ///< [W]

  [[nodiscard]] std::int64_t num_docs() const { return std::ssize(doc_pieces) - 1; }
  /// The pieces of a rank, in the order of its rows.
  [[nodiscard]] std::span<const std::int32_t> pieces_of(std::int32_t rank) const {
    return std::span(by_rank).subspan(rank_pieces[rank], rank_pieces[rank + 1] - rank_pieces[rank]);
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

/// Sets kv_begin and kv_end where the mask needs them: the first and the last shard that have a key
/// of the queries. Shards lie within the prefix of their document or after it.
/// @param prefixes [D] mask.prefix of each document; empty: of none
void write_ranges(const AttentionMask& mask, std::span<const std::int64_t> prefixes, QkvPlan& plan);

/// Puts the chunks of each document together again, in a plan that write_plan made.
void join_chunks(const HomeLayout& home, QkvPlan& plan);

/// Turns moves, ordered by piece and position, into shards. Neighbours with the same destination
/// are one shard. Keys are cut where the queries that travel begin to need them.
void write_plan(const HomeLayout& home, std::span<const Move> moves, const PlannerOptions& options,
                QkvPlan& plan);

}  // namespace waybill::detail
