#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "waybill/planner/planner.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill {

/// Tokens [begin, end) of a document, at home on one rank, whose queries one rank attends to.
struct DocumentPiece {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int32_t document = 0;
  std::int32_t home = 0;
  std::int32_t q_dst = 0;
};

/// The plan in which each piece is a shard; on a rank they lie by document, then by position.
/// Empty pieces are left out. Causal, per_rank.
/// @param pieces every token of a document in one of them, in any order
/// @throws InvalidArgument for ranks and documents out of range, begin > end, and what
///   QkvPlan::check refuses; gaps and overlaps are the caller's to avoid.
[[nodiscard]] QkvPlan plan_of_pieces(std::vector<DocumentPiece> pieces, std::int64_t num_documents,
                                     std::int32_t world_size);

/// How static plans cut.
struct StaticPlanOptions {
  std::int32_t world_size = 8;
  std::int64_t tokens_per_rank = 65536;
  std::int32_t degree = 8;  ///< ranks of a context-parallel group; a divisor of world_size
  /// Cuts are the same for all, but for those where prefixes end; a plan needs whole documents
  /// under a full mask, prefixes and all keys before a query under one with prefixes, else all keys
  /// before a query.
  AttentionMask mask = {};
  std::vector<std::int64_t> prefixes = {};  ///< [D] as PlannerOptions::prefixes; empty: mask.prefix

  /// The tokens at the beginning of a document that all meet each other: 0, or 2 and more.
  [[nodiscard]] std::int64_t prefix_of(std::size_t document) const {
    const std::int64_t given = prefixes.empty() ? mask.prefix : prefixes[document];
    return given > 1 ? given : 0;
  }

  /// The default degree of a world: its largest divisor of at most `ranks_per_node`.
  [[nodiscard]] static std::int32_t degree_of(std::int32_t world_size, std::int32_t ranks_per_node);

  /// @throws InvalidArgument "who: field = got, expected ...", of these and of documents that are
  ///   not >= 1 token each, or more than the ranks hold
  void check(std::span<const std::int64_t> doc_lengths, const char* who) const;
};

/// Static context parallelism over packed sequences (zigzag, head and tail): the tokens of a group
/// of `degree` ranks are one sequence, cut into 2 * degree equal chunks wherever documents lie;
/// rank i has the i-th chunk and the i-th from the end. Queries stay at home, keys are gathered.
/// Even for one long document; uneven for several, as chunks have as many tokens but not as many
/// keys.
/// @param doc_lengths tokens, each >= 1, in order; at most world_size * tokens_per_rank in all
/// @throws InvalidArgument naming the option or document.
[[nodiscard]] QkvPlan zigzag_plan(std::span<const std::int64_t> doc_lengths,
                                  const StaticPlanOptions& options);

/// Static context parallelism by document: every document lies on the group in which it begins
/// and is cut into 2 * degree chunks of its own, dealt in the same way. Even inside a group, with
/// many short shards; all ranks of the group need the keys of all its documents.
/// @throws InvalidArgument as zigzag_plan.
[[nodiscard]] QkvPlan per_document_plan(std::span<const std::int64_t> doc_lengths,
                                        const StaticPlanOptions& options);

}  // namespace waybill
