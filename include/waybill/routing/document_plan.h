#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "waybill/routing/qkv_plan.h"

namespace waybill {

/// How documents become a plan.
struct DocumentPlanOptions {
  std::int32_t world_size = 8;
  std::int64_t tokens_per_rank = 65536;  ///< rows of a rank in the MLP layout
  std::int64_t shard_tokens = 4096;      ///< longest query shard
  KvLayout kv_layout = KvLayout::per_rank;
  MaskKind mask = MaskKind::causal;
};

/// Packs documents in order into the ranks (a document may span ranks), cuts them into
/// shards of equal length, at most `shard_tokens`, and gives the shards to ranks, most work first:
/// a shard stays at home if home stays within the mean work of a rank, and goes to the rank with
/// the least work so far otherwise (Graham's longest processing time rule, home first). Work is the
/// exact number of (query, key) pairs under the mask. For demonstrations, tests and
/// benchmarks that need a plan but no planner, and for those who compare planners: plan_attention
/// balances better and sends less.
/// @param doc_lengths tokens, each >= 1; their sum at most world_size * tokens_per_rank
/// @throws InvalidArgument naming the option or the document, got and expected.
[[nodiscard]] QkvPlan plan_documents(std::span<const std::int64_t> doc_lengths,
                                     const DocumentPlanOptions& options);

/// (query, key) pairs of each shard's queries under the plan's mask. [N]
/// `q_len * kv_len - q_len * (q_len - 1) / 2` for a context of kv_len rows that ends with the
/// shard; `q_len * kv_len` for a full mask.
/// @throws InvalidArgument when plan.check() does, or for a document of over 2^31 tokens.
[[nodiscard]] std::vector<std::int64_t> shard_work(const QkvPlan& plan);

/// The sum of shard_work by attending rank. [W]
[[nodiscard]] std::vector<std::int64_t> rank_work(const QkvPlan& plan);

}  // namespace waybill
