#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "waybill/core/random.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::test {

/// What plans break at. A plan has at most one of these, beside what it has by chance.
enum class PlanEdge {
  rank_without_tokens,       ///< one rank has none, the others have shards
  one_rank_has_all,          ///< all ranks but one have no tokens
  one_token,                 ///< one in all
  empty_documents,           ///< many documents without shards
  one_document,              ///< of all shards, or of all of a rank where documents stay on it
  more_documents_than_rows,  ///< documents of one shard, of which most have no tokens
  exactly_the_maximum,       ///< all ranks have max_shards_per_rank of max_shard_len
  none,
};

/// What random_plan makes. Shares are probabilities, 0..1.
struct RandomPlanOptions {
  std::int32_t world_size = 4;
  std::int64_t max_shards_per_rank = 6;  ///< shards of a rank: uniform in 0..this
  std::int64_t max_shard_len = 20;       ///< tokens of a shard: uniform in 1..this
  double zero_length_share = 0.1;        ///< shards without tokens
  double empty_rank_share = 0.1;         ///< ranks without shards in the MLP layout
  double empty_document_share = 0.1;     ///< documents without shards
  std::int64_t max_document_shards = 7;  ///< shards of a document: uniform in 1..this
  /// Shards of a document are consecutive ones of one rank; else they lie anywhere, in any order.
  bool documents_stay_on_rank = false;
  bool windows = false;           ///< fill kv_begin
  bool ends = false;              ///< fill kv_end
  bool full = false;              ///< a full mask; without windows
  bool prefixes = false;          ///< of some shards of each document; without all of these
  std::int32_t destinations = 0;  ///< q_dst is one of 0..this-1; 0: any rank
  KvLayout kv_layout = KvLayout::per_rank;
  double edge_share = 0.5;  ///< plans with a PlanEdge, of which each is as likely as the others
};

namespace plan_parts {

inline bool chance(Random& random, double share) { return random.uniform_double() < share; }

inline PlanEdge random_edge(Random& random, const RandomPlanOptions& options) {
  if (!chance(random, options.edge_share)) return PlanEdge::none;
  return static_cast<PlanEdge>(random.below(static_cast<std::int64_t>(PlanEdge::none)));
}

/// Tokens of a shard on a rank that may have some.
inline std::int64_t shard_length(Random& random, const RandomPlanOptions& options, PlanEdge edge) {
  const double empty = edge == PlanEdge::more_documents_than_rows ? 0.8 : options.zero_length_share;
  switch (edge) {
    case PlanEdge::one_token:
      return 1;
    case PlanEdge::exactly_the_maximum:
      return options.max_shard_len;
    default:
      return chance(random, empty) ? 0 : 1 + random.below(options.max_shard_len);
  }
}

inline std::int64_t num_rank_shards(Random& random, const RandomPlanOptions& options,
                                    PlanEdge edge) {
  const std::int64_t any =
      chance(random, options.empty_rank_share) ? 0 : random.below(options.max_shards_per_rank + 1);
  switch (edge) {
    case PlanEdge::one_token:
      return 1;
    case PlanEdge::exactly_the_maximum:
      return options.max_shards_per_rank;
    case PlanEdge::rank_without_tokens:
    case PlanEdge::one_rank_has_all:
      return std::max<std::int64_t>(any, 1);
    default:
      return any;
  }
}

inline void random_shards(Random& random, const RandomPlanOptions& options, PlanEdge edge,
                          QkvPlan& plan) {
  const std::int32_t destinations =
      options.destinations > 0 ? options.destinations : options.world_size;
  const auto chosen = static_cast<std::int32_t>(random.below(options.world_size));
  const bool shards_of_none = chance(random, 0.5);  // a rank without tokens has shards without
  plan.rank_shard_offsets.push_back(0);
  for (std::int32_t w = 0; w < options.world_size; ++w) {
    const bool others_only = edge == PlanEdge::rank_without_tokens && w == chosen;
    const bool chosen_only =
        (edge == PlanEdge::one_rank_has_all || edge == PlanEdge::one_token) && w != chosen;
    const bool bare = others_only || chosen_only;
    const std::int64_t shards =
        bare && !shards_of_none ? 0 : num_rank_shards(random, options, edge);
    for (std::int64_t s = 0; s < shards; ++s) {
      plan.shard_len.push_back(bare ? 0 : shard_length(random, options, edge));
      plan.q_dst.push_back(static_cast<std::int32_t>(random.below(destinations)));
    }
    plan.rank_shard_offsets.push_back(plan.num_shards());
  }
}

/// Number of shards of the next document, of `left` that have none yet.
inline std::int64_t document_size(Random& random, const RandomPlanOptions& options, PlanEdge edge,
                                  std::int64_t left) {
  if (edge == PlanEdge::one_document) return left;
  if (edge == PlanEdge::more_documents_than_rows) return 1;
  return std::min(left, 1 + random.below(options.max_document_shards));
}

/// Documents without shards that come before the next one.
inline void add_empty_documents(Random& random, const RandomPlanOptions& options, PlanEdge edge,
                                QkvPlan& plan) {
  const bool many = edge == PlanEdge::empty_documents || edge == PlanEdge::more_documents_than_rows;
  const double share = many ? 0.7 : options.empty_document_share;
  for (int i = 0; i < (many ? 4 : 1); ++i) {
    if (chance(random, share)) plan.doc_shard_offsets.push_back(plan.doc_shard_offsets.back());
  }
}

inline void random_documents(Random& random, const RandomPlanOptions& options, PlanEdge edge,
                             QkvPlan& plan) {
  for (std::int32_t s = 0; s < plan.num_shards(); ++s) plan.doc_shards.push_back(s);
  if (!options.documents_stay_on_rank) {
    for (std::size_t i = plan.doc_shards.size(); i > 1; --i) {
      const auto other = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)));
      std::swap(plan.doc_shards[i - 1], plan.doc_shards[other]);
    }
  }
  std::int64_t at = 0;
  std::size_t rank = 1;
  plan.doc_shard_offsets.push_back(0);
  while (at < plan.num_shards()) {
    add_empty_documents(random, options, edge, plan);
    std::int64_t end = plan.num_shards();
    if (options.documents_stay_on_rank) {
      while (plan.rank_shard_offsets[rank] <= at) ++rank;
      end = plan.rank_shard_offsets[rank];
    }
    at += document_size(random, options, edge, end - at);
    plan.doc_shard_offsets.push_back(at);
  }
  add_empty_documents(random, options, edge, plan);
}

inline void random_windows(Random& random, QkvPlan& plan) {
  plan.kv_begin.resize(plan.shard_len.size());
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const std::int64_t first = plan.doc_shard_offsets[static_cast<std::size_t>(d)];
    const std::int64_t last = plan.doc_shard_offsets[static_cast<std::size_t>(d) + 1];
    std::int64_t begin = 0;
    for (std::int64_t p = 0; p < last - first; ++p) {
      if (chance(random, 0.6)) begin += random.below(p - begin + 1);
      const std::int32_t shard = plan.doc_shards[static_cast<std::size_t>(first + p)];
      plan.kv_begin[static_cast<std::size_t>(shard)] = static_cast<std::int32_t>(begin);
    }
  }
}

inline void random_ends(Random& random, QkvPlan& plan) {
  plan.kv_end.resize(plan.shard_len.size());
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const std::int64_t first = plan.doc_shard_offsets[static_cast<std::size_t>(d)];
    const std::int64_t num = plan.doc_shard_offsets[static_cast<std::size_t>(d) + 1] - first;
    std::int64_t end = 0;
    for (std::int64_t p = 0; p < num; ++p) {
      end = std::max(end, p + 1);
      if (chance(random, 0.4)) end += random.below(num - end + 1);
      const std::int32_t shard = plan.doc_shards[static_cast<std::size_t>(first + p)];
      const bool causal = end == p + 1 && (d + p) % 2 == 0;  // else its queries meet all of its own
      plan.kv_end[static_cast<std::size_t>(shard)] = causal ? 0 : static_cast<std::int32_t>(end);
    }
  }
}

inline void random_prefixes(Random& random, QkvPlan& plan) {
  plan.kv_end.assign(plan.shard_len.size(), 0);
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const std::int64_t first = plan.doc_shard_offsets[static_cast<std::size_t>(d)];
    const std::int64_t num = plan.doc_shard_offsets[static_cast<std::size_t>(d) + 1] - first;
    const std::int64_t end = random.below(num + 1);
    for (std::int64_t p = 0; p < end; ++p) {
      const std::int32_t shard = plan.doc_shards[static_cast<std::size_t>(first + p)];
      plan.kv_end[static_cast<std::size_t>(shard)] = static_cast<std::int32_t>(end);
    }
  }
}

}  // namespace plan_parts

/// A plan that passes QkvPlan::check, the same for the same arguments. With the default options
/// documents lie across ranks in any order, some ranks, shards and documents are empty, and every
/// second plan has a PlanEdge.
inline QkvPlan random_plan(std::uint64_t seed, const RandomPlanOptions& options = {}) {
  Random random(seed);
  QkvPlan plan;
  plan.world_size = options.world_size;
  plan.kv_layout = options.kv_layout;
  const PlanEdge edge = plan_parts::random_edge(random, options);
  plan_parts::random_shards(random, options, edge, plan);
  plan_parts::random_documents(random, options, edge, plan);
  if (options.full) plan.need_whole_documents();
  if (options.windows && !options.full) plan_parts::random_windows(random, plan);
  if (options.ends && !options.full) plan_parts::random_ends(random, plan);
  const bool free = !options.full && !options.windows && !options.ends;
  if (options.prefixes && free) plan_parts::random_prefixes(random, plan);
  return plan;
}

/// Rows of the largest rank in the MLP layout.
inline std::int64_t most_rows_of_a_rank(const QkvPlan& plan) {
  std::int64_t most = 0;
  for (std::int32_t w = 0; w < plan.world_size; ++w) {
    std::int64_t rows = 0;
    for (std::int64_t s = plan.rank_shard_offsets[static_cast<std::size_t>(w)];
         s < plan.rank_shard_offsets[static_cast<std::size_t>(w) + 1]; ++s) {
      rows += plan.shard_len[static_cast<std::size_t>(s)];
    }
    most = std::max(most, rows);
  }
  return most;
}

}  // namespace waybill::test
