#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "waybill/core/table_allocator.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::detail {

/// Where the shards of a plan live in the MLP layout.
struct Homes {
  UninitializedVector<std::int32_t> rank;   ///< [N]
  UninitializedVector<std::int64_t> begin;  ///< [N]: first row at home
  std::vector<std::int64_t> rank_rows;      ///< [W]
};

/// The shards of a document, in the order of its tokens.
[[nodiscard]] inline std::span<const std::int32_t> shards_of(const QkvPlan& plan,
                                                             std::int64_t document) {
  const std::int64_t first = plan.doc_shard_offsets[document];
  return std::span(plan.doc_shards).subspan(first, plan.doc_shard_offsets[document + 1] - first);
}

/// Calls visit(document, position in it, its first token there, shard) for all shards of a plan,
/// document by document.
template <class Visit>
void for_each_place(const QkvPlan& plan, const Visit& visit) {
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    std::int32_t position = 0;
    std::int64_t token = 0;
    for (const std::int32_t shard : shards_of(plan, d)) {
      visit(d, position++, token, shard);
      token += plan.shard_len[shard];
    }
  }
}

/// The rank that each shard (or entry) belongs to. [N]
/// @param rank_offsets [W + 1]: rank w has shards [o[w], o[w + 1])
[[nodiscard]] inline std::vector<std::int32_t> homes_of(
    std::span<const std::int64_t> rank_offsets) {
  if (rank_offsets.empty()) return {};
  std::vector<std::int32_t> homes(rank_offsets.back());
  for (std::size_t w = 0; w + 1 < rank_offsets.size(); ++w) {
    std::fill(homes.begin() + rank_offsets[w], homes.begin() + rank_offsets[w + 1],
              static_cast<std::int32_t>(w));
  }
  return homes;
}

/// Where the items of each key begin when they are sorted by it.
/// @param offsets [keys + 1]: keeps its memory
template <class Keys>
void offsets_by(const Keys& keys, std::int64_t num_keys, std::vector<std::int64_t>& offsets) {
  offsets.assign(num_keys + 1, 0);
  for (const auto key : keys) ++offsets[key + 1];
  std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
}

/// The size of the largest part. @param offsets [parts + 1], ascending
[[nodiscard]] inline std::int64_t largest_part(std::span<const std::int64_t> offsets) {
  std::int64_t largest = 0;
  for (std::size_t i = 1; i < offsets.size(); ++i)
    largest = std::max(largest, offsets[i] - offsets[i - 1]);
  return largest;
}

inline void find_homes(const QkvPlan& plan, Homes& homes) {
  homes.rank.resize(plan.num_shards());
  homes.begin.resize(plan.num_shards());
  homes.rank_rows.resize(plan.world_size);
  for (std::int32_t w = 0; w < plan.world_size; ++w) {
    std::int64_t rows = 0;
    for (std::int64_t s = plan.rank_shard_offsets[w]; s < plan.rank_shard_offsets[w + 1]; ++s) {
      homes.rank[s] = w;
      homes.begin[s] = rows;
      rows += plan.shard_len[s];
    }
    homes.rank_rows[w] = rows;
  }
}

/// A routing with more copies of KV shards has tables for which a host may lack the memory.
inline constexpr std::int64_t max_kv_copies = std::int64_t{1} << 28;

/// The document with which the plan's copies of KV shards may be more than max_kv_copies. Each
/// shard is counted for every holder that its document can have. Does not check the plan.
[[nodiscard]] std::optional<std::int64_t> document_of_too_many_copies(const QkvPlan& plan);

/// Calls visit(home rank, first row there, entry) for all entries.
template <class Visit>
void for_each_entry(const SparseMetadata& metadata, const Visit& visit) {
  for (std::int32_t w = 0; w < metadata.world_size; ++w) {
    std::int64_t row = 0;
    for (auto j = metadata.rank_offsets[w]; j < metadata.rank_offsets[w + 1]; ++j) {
      visit(w, row, j);
      row += metadata.seq_len[j];
    }
  }
}

/// Builds RecvCounts rank by rank. Ranks that exchange no rows give no pair.
class RecvCounter {
 public:
  RecvCounter(std::int32_t world_size, RecvCounts& result)
      : result_(result), tokens_from_(static_cast<std::size_t>(world_size)) {
    result_.offsets.assign(1, 0);
    result_.src_rank.clear();
    result_.tokens.clear();
    result_.total.clear();
  }

  /// Rows that the current rank receives from `sender`.
  void add(std::int32_t sender, std::int64_t rows) {
    std::int64_t& tokens = tokens_from_[sender];
    if (tokens == 0 && rows > 0) senders_.push_back(sender);
    tokens += rows;
  }

  /// Ends the current rank; the next one follows.
  void end_rank() {
    if (!std::is_sorted(senders_.begin(), senders_.end())) {
      std::sort(senders_.begin(), senders_.end());
    }
    std::int64_t total = 0;
    for (const std::int32_t sender : senders_) {
      std::int64_t& tokens = tokens_from_[sender];
      result_.src_rank.push_back(sender);
      result_.tokens.push_back(tokens);
      total += tokens;
      tokens = 0;
    }
    senders_.clear();
    result_.offsets.push_back(std::ssize(result_.src_rank));
    result_.total.push_back(total);
  }

 private:
  RecvCounts& result_;
  std::vector<std::int64_t> tokens_from_;  ///< [W], all 0 between ranks
  std::vector<std::int32_t> senders_;      ///< those with tokens
};

/// The counts of the way back: [i][r] from [r][i].
inline void transpose_counts(const RecvCounts& counts, RecvCounts& result) {
  const std::int64_t world_size = std::ssize(counts.total);
  offsets_by(counts.src_rank, world_size, result.offsets);
  result.total.assign(world_size, 0);
  result.src_rank.resize(counts.src_rank.size());
  result.tokens.resize(counts.tokens.size());
  std::vector<std::int64_t> next(result.offsets.begin(), result.offsets.end() - 1);
  for (std::int64_t r = 0; r < world_size; ++r) {
    for (std::int64_t k = counts.offsets[r]; k < counts.offsets[r + 1]; ++k) {
      const std::size_t i = counts.src_rank[k];
      const std::size_t place = next[i]++;
      result.src_rank[place] = static_cast<std::int32_t>(r);
      result.tokens[place] = counts.tokens[k];
      result.total[i] += counts.tokens[k];
    }
  }
}

}  // namespace waybill::detail
