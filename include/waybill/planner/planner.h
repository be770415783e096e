#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "waybill/planner/attention_plan.h"
#include "waybill/planner/planner_options.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill {

/// Decides which rank attends to which queries, so that the work is even and few bytes move.
///
/// Queries stay at home where work allows. A rank with too much gives contiguous slabs of its
/// longest documents away, cut so that the bytes of Q and KV for the work are least; the rank with
/// the most room takes the slab that ends last, ranks that hold KV of the document first. Near
/// linear in documents and ranks, deterministic. docs/decisions/planner.md tells why.
///
/// @param doc_lengths tokens, each >= 1, packed in order into the ranks: a document may lie across
///   ranks. Their sum at most world_size * tokens_per_rank.
/// @throws InvalidArgument naming the option or the document, got and expected; and "infeasible:"
///   with rank, tokens needed and tokens there are, when no plan within max_tokens_per_rank is
///   found; and for a relay schedule of more than 2^24 hops.
[[nodiscard]] AttentionPlan plan_attention(std::span<const std::int64_t> doc_lengths,
                                           const PlannerOptions& options);

/// The same for documents that already have a rank: one list per rank, which may be empty.
/// [W][docs]
[[nodiscard]] AttentionPlan plan_attention(
    std::span<const std::vector<std::int64_t>> rank_doc_lengths, const PlannerOptions& options);

/// Plans one step after another in memory that it keeps. Results equal plan_attention's.
class Planner {
 public:
  Planner();
  ~Planner();
  Planner(Planner&&) noexcept;
  Planner& operator=(Planner&&) noexcept;

  /// The result is valid until the next call; a call that throws does not change it.
  const AttentionPlan& plan(std::span<const std::int64_t> doc_lengths,
                            const PlannerOptions& options);
  const AttentionPlan& plan(std::span<const std::vector<std::int64_t>> rank_doc_lengths,
                            const PlannerOptions& options);

  /// Moves the latest result out.
  [[nodiscard]] AttentionPlan take();

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

/// Tokens [offset, offset + length) of a document, as a rank holds them.
struct DocumentRange {
  std::int64_t document = 0;  ///< any number; the same on all ranks
  std::int64_t offset = 0;
  std::int64_t length = 0;
};

/// plan_attention for documents whose tokens lie anywhere: each rank holds pieces, back to back in
/// its rows. The plan alone, without figures and without a relay.
///
/// @param rank_pieces [W][pieces]: every token of a document in one of them
/// @throws InvalidArgument naming rank and piece, or the document whose pieces do not add up; for
///   options as plan_attention, and for max_tokens_per_rank and byte_weight, which need figures.
[[nodiscard]] QkvPlan plan_pieces(std::span<const std::vector<DocumentRange>> rank_pieces,
                                  const PlannerOptions& options);

}  // namespace waybill
