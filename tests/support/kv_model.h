#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "support/slow_model.h"
#include "waybill/core/random.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::test {

/// Where a shard of a plan lives.
struct ShardPlace {
  std::int64_t rank = 0;
  std::int64_t idx = 0;  ///< on its rank
  std::int64_t doc = 0;
  std::int64_t pos = 0;  ///< in its document
};

inline std::vector<ShardPlace> shard_places(const QkvPlan& plan) {
  std::vector<ShardPlace> places(plan.shard_len.size());
  for (std::size_t w = 0; w + 1 < plan.rank_shard_offsets.size(); ++w) {
    for (std::int64_t s = plan.rank_shard_offsets[w]; s < plan.rank_shard_offsets[w + 1]; ++s) {
      places[static_cast<std::size_t>(s)].rank = static_cast<std::int64_t>(w);
      places[static_cast<std::size_t>(s)].idx = s - plan.rank_shard_offsets[w];
    }
  }
  for (std::size_t d = 0; d + 1 < plan.doc_shard_offsets.size(); ++d) {
    for (std::int64_t p = plan.doc_shard_offsets[d]; p < plan.doc_shard_offsets[d + 1]; ++p) {
      ShardPlace& place =
          places[static_cast<std::size_t>(plan.doc_shards[static_cast<std::size_t>(p)])];
      place.doc = static_cast<std::int64_t>(d);
      place.pos = p - plan.doc_shard_offsets[d];
    }
  }
  return places;
}

/// The shard at a position of a document.
inline std::size_t shard_at(const QkvPlan& plan, std::int64_t doc, std::int64_t pos) {
  const std::int64_t first = plan.doc_shard_offsets[static_cast<std::size_t>(doc)];
  return static_cast<std::size_t>(plan.doc_shards[static_cast<std::size_t>(first + pos)]);
}

inline std::int64_t document_shards(const QkvPlan& plan, std::int64_t doc) {
  return plan.doc_shard_offsets[static_cast<std::size_t>(doc) + 1] -
         plan.doc_shard_offsets[static_cast<std::size_t>(doc)];
}

/// Most shards on a rank.
inline std::int64_t most_shards(const QkvPlan& plan) {
  std::int64_t most = 0;
  for (std::size_t w = 0; w + 1 < plan.rank_shard_offsets.size(); ++w) {
    most = std::max(most, plan.rank_shard_offsets[w + 1] - plan.rank_shard_offsets[w]);
  }
  return most;
}

/// A causal plan in DistCA's dense form, and which copy of a KV shard serves which query.
struct KvCase {
  KvMapping mapping;
  IndexArray seq_len;                                                ///< [W, S]
  IndexArray num_seqs;                                               ///< [W]
  IndexArray q_dispatch;                                             ///< [W, S]
  std::map<std::pair<std::size_t, std::size_t>, std::int64_t> copy;  ///< by (KV shard, query)
};

/// The dense form with `spare` more copies than needed. With `shuffled`, queries sit in any copy
/// slots, with holes between them; else copy c serves the c-th query from the shard on.
inline KvCase kv_case(const QkvPlan& plan, std::int64_t spare, Random* shuffled) {
  const std::vector<ShardPlace> places = shard_places(plan);
  std::int64_t copies = 1;
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    copies = std::max(copies, document_shards(plan, d));
  }
  copies += spare;
  const Shape table{plan.world_size, most_shards(plan)};
  KvCase made;
  made.seq_len = IndexArray(table);
  made.num_seqs = IndexArray(Shape{plan.world_size});
  made.q_dispatch = IndexArray::full(table, -1);
  made.mapping.kv_to_q_mapping = IndexArray::full({table[0], table[1], copies, 2}, -1);
  made.mapping.kv_to_q_rank = IndexArray::full({table[0], table[1], copies}, -1);
  made.mapping.kv_context_size = IndexArray(table);
  made.mapping.q_to_num_kv_seq = IndexArray(table);
  made.mapping.q_to_num_kv_token = IndexArray(table);
  for (std::size_t kv = 0; kv < places.size(); ++kv) {
    const auto [rank, idx, doc, pos] = places[kv];
    element(made.seq_len, {rank, idx}) = plan.shard_len[kv];
    element(made.num_seqs, {rank}) += 1;
    element(made.q_dispatch, {rank, idx}) = plan.q_dst[kv];
    std::int64_t context = 0;
    for (std::int64_t p = 0; p < pos; ++p) context += plan.shard_len[shard_at(plan, doc, p)];
    element(made.mapping.kv_context_size, {rank, idx}) = context;
    element(made.mapping.q_to_num_kv_seq, {rank, idx}) = pos + 1;
    element(made.mapping.q_to_num_kv_token, {rank, idx}) = context + plan.shard_len[kv];
    const std::int64_t queries = document_shards(plan, doc) - pos;
    std::vector<std::int32_t> slots;
    if (shuffled != nullptr) {
      slots = shuffled->permutation(static_cast<std::int32_t>(copies),
                                    static_cast<std::int32_t>(queries));
    }
    for (std::int64_t q = 0; q < queries; ++q) {
      const std::size_t query = shard_at(plan, doc, pos + q);
      const std::int64_t c = slots.empty() ? q : slots[static_cast<std::size_t>(q)];
      element(made.mapping.kv_to_q_mapping, {rank, idx, c, 0}) = places[query].rank;
      element(made.mapping.kv_to_q_mapping, {rank, idx, c, 1}) = places[query].idx;
      element(made.mapping.kv_to_q_rank, {rank, idx, c}) = pos;
      made.copy[{kv, query}] = c;
    }
  }
  return made;
}

/// Where KV shards go when each query has its own context: destination buffers in their order.
inline std::vector<Sent> model_kv_sends(const QkvPlan& plan, const KvCase& dense) {
  const std::vector<ShardPlace> places = shard_places(plan);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(plan.world_size));
  std::vector<Sent> sends;
  for (std::size_t query = 0; query < places.size(); ++query) {
    std::int64_t& filled = rows[static_cast<std::size_t>(plan.q_dst[query])];
    for (std::int64_t p = 0; p <= places[query].pos; ++p) {
      const std::size_t kv = shard_at(plan, places[query].doc, p);
      sends.push_back({places[kv].rank, places[kv].idx, dense.copy.at({kv, query}),
                       plan.q_dst[query], filled, plan.shard_len[kv]});
      filled += plan.shard_len[kv];
    }
  }
  return sends;
}

}  // namespace waybill::test
