#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "support/kv_model.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::test {

/// What the queries of one shard read: rows of the KV buffer of their rank.
struct QueryRead {
  std::int64_t shard = 0;
  std::int64_t q_begin = 0;
  std::int64_t kv_begin = 0;
  std::int64_t kv_len = 0;
};

/// One KV shard in the buffer of an attention rank.
struct KvHeld {
  std::int64_t shard = 0;
  std::int64_t row = 0;   ///< first row there
  std::int64_t copy = 0;  ///< of the shard
};

/// What lies on one attention rank, in the order of its buffers.
struct RankModel {
  std::vector<QueryRead> queries;
  std::vector<KvHeld> kv;
};

inline std::int64_t window_begin(const QkvPlan& plan, std::size_t shard) {
  return plan.kv_begin.empty() ? 0 : plan.kv_begin[shard];
}

/// The last position that the query shard needs.
inline std::int64_t last_needed(const QkvPlan& plan, const ShardPlace& place) {
  const std::int32_t end =
      plan.kv_end.empty() ? 0 : plan.kv_end[shard_at(plan, place.doc, place.pos)];
  return end == 0 ? place.pos : end - 1;
}

/// Shards that query shard `query` needs, in document order.
inline std::vector<std::size_t> needed_by(const QkvPlan& plan,
                                          const std::vector<ShardPlace>& places,
                                          std::size_t query) {
  std::vector<std::size_t> shards;
  const std::int64_t last = last_needed(plan, places[query]);
  for (std::int64_t p = window_begin(plan, query); p <= last; ++p) {
    shards.push_back(shard_at(plan, places[query].doc, p));
  }
  return shards;
}

namespace model_parts {

inline std::int64_t rows_in(const QkvPlan& plan, const std::vector<std::size_t>& shards) {
  std::int64_t rows = 0;
  for (const std::size_t shard : shards) rows += plan.shard_len[shard];
  return rows;
}

/// per_query: each query's own context, one after another.
inline void hold_per_query(const QkvPlan& plan, const std::vector<ShardPlace>& places,
                           RankModel& rank) {
  std::int64_t row = 0;
  for (QueryRead& read : rank.queries) {
    const auto query = static_cast<std::size_t>(read.shard);
    read.kv_begin = row;
    for (const std::size_t kv : needed_by(plan, places, query)) {
      rank.kv.push_back({static_cast<std::int64_t>(kv), row, 0});
      row += plan.shard_len[kv];
    }
  }
}

/// per_rank: one group per document, of the shards that any of its queries here needs, once.
inline void hold_per_rank(const QkvPlan& plan, const std::vector<ShardPlace>& places,
                          RankModel& rank) {
  std::int64_t row = 0;
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    std::set<std::int64_t> positions;
    for (const QueryRead& read : rank.queries) {
      const auto query = static_cast<std::size_t>(read.shard);
      if (places[query].doc != d) continue;
      const std::int64_t last = last_needed(plan, places[query]);
      for (std::int64_t p = window_begin(plan, query); p <= last; ++p) {
        positions.insert(p);
      }
    }
    for (const std::int64_t p : positions) {
      const std::size_t kv = shard_at(plan, d, p);
      rank.kv.push_back({static_cast<std::int64_t>(kv), row, 0});
      for (QueryRead& read : rank.queries) {
        const auto query = static_cast<std::size_t>(read.shard);
        if (places[query].doc == d && window_begin(plan, query) == p) read.kv_begin = row;
      }
      row += plan.shard_len[kv];
    }
  }
}

}  // namespace model_parts

/// The attention side of a plan, rank by rank; copies are not numbered yet.
inline std::vector<RankModel> model_ranks(const QkvPlan& plan) {
  const std::vector<ShardPlace> places = shard_places(plan);
  std::vector<RankModel> ranks(static_cast<std::size_t>(plan.world_size));
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    std::int64_t row = 0;
    for (std::size_t s = 0; s < places.size(); ++s) {
      if (plan.q_dst[s] != static_cast<std::int32_t>(r)) continue;
      const std::int64_t rows = model_parts::rows_in(plan, needed_by(plan, places, s));
      ranks[r].queries.push_back({static_cast<std::int64_t>(s), row, 0, rows});
      row += plan.shard_len[s];
    }
    if (plan.kv_layout == KvLayout::per_query) {
      model_parts::hold_per_query(plan, places, ranks[r]);
    } else {
      model_parts::hold_per_rank(plan, places, ranks[r]);
    }
  }
  return ranks;
}

/// Numbers the copies of per_rank: by the last query of the document on the holding rank, last
/// first.
inline void number_copies_per_rank(const QkvPlan& plan, std::vector<RankModel>& ranks) {
  const std::vector<ShardPlace> places = shard_places(plan);
  const auto last_query = [&](const RankModel& rank, std::int64_t doc) {
    std::int64_t last = -1;
    for (const QueryRead& read : rank.queries) {
      const ShardPlace& place = places[static_cast<std::size_t>(read.shard)];
      if (place.doc == doc) last = std::max(last, place.pos);
    }
    return last;
  };
  for (RankModel& rank : ranks) {
    for (KvHeld& held : rank.kv) {
      const std::int64_t doc = places[static_cast<std::size_t>(held.shard)].doc;
      for (const RankModel& other : ranks) {
        const bool holds = std::any_of(other.kv.begin(), other.kv.end(),
                                       [&](const KvHeld& kv) { return kv.shard == held.shard; });
        if (holds && last_query(other, doc) > last_query(rank, doc)) ++held.copy;
      }
    }
  }
}

/// Numbers the copies of per_query: the query at position q of the document reads copy q - p of
/// the shard at position p, less the queries between whose windows begin after p, and one more for
/// each query before p whose range holds p.
inline void number_copies_per_query(const QkvPlan& plan, std::vector<RankModel>& ranks) {
  const std::vector<ShardPlace> places = shard_places(plan);
  for (RankModel& rank : ranks) {
    auto held = rank.kv.begin();
    for (const QueryRead& read : rank.queries) {
      const auto query = static_cast<std::size_t>(read.shard);
      for (const std::size_t kv : needed_by(plan, places, query)) {
        for (std::int64_t q = 0; q < places[query].pos; ++q) {
          const std::size_t earlier = shard_at(plan, places[query].doc, q);
          if (window_begin(plan, earlier) <= places[kv].pos &&
              places[kv].pos <= last_needed(plan, places[earlier]))
            ++held->copy;
        }
        ++held;
      }
    }
  }
}

}  // namespace waybill::test
