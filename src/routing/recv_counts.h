#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "waybill/routing/sparse_metadata.h"

namespace waybill::detail {

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
    std::int64_t& tokens = tokens_from_[static_cast<std::size_t>(sender)];
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
      std::int64_t& tokens = tokens_from_[static_cast<std::size_t>(sender)];
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
  result.offsets.assign(world_size + 1, 0);
  result.total.assign(world_size, 0);
  result.src_rank.resize(counts.src_rank.size());
  result.tokens.resize(counts.tokens.size());
  for (const std::int32_t i : counts.src_rank) ++result.offsets[i + 1];
  for (std::size_t i = 1; i < result.offsets.size(); ++i) {
    result.offsets[i] += result.offsets[i - 1];
  }
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
