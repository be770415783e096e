#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "waybill/core/topology.h"

namespace waybill {

/// How K and V lie on a rank after the forward dispatch.
enum class KvLayout : std::uint8_t {
  per_query,  ///< DistCA's: every query shard has a contiguous copy of its whole context
  per_rank,   ///< one copy of each KV shard on a rank; query shards read ranges of it
};

[[nodiscard]] std::string_view to_string(KvLayout layout);

/// The inverse. @throws InvalidArgument "who: kv_layout = ..., expected ..."
[[nodiscard]] KvLayout kv_layout_from_name(const char* who, std::string_view name);

/// A dispatch plan: which shard of which document lives where, and which rank attends to it. The
/// library's own sparse form; everything else is computed from it. N = shards, D = documents.
///
/// Shards are numbered in the global order: rank by rank, and on a rank in the order of their rows
/// in the MLP layout. A document is a list of shards in the order of its tokens; they may lie on
/// different ranks. A query shard needs the KV shards at positions [kv_begin, kv_end) of its
/// document, itself among them. Which keys a query meets of these is the mask's affair: routing
/// knows ranges alone.
struct QkvPlan {
  std::int32_t world_size = 0;
  KvLayout kv_layout = KvLayout::per_rank;
  std::vector<std::int64_t> rank_shard_offsets;  ///< [W + 1]: rank w has shards [o[w], o[w + 1])
  std::vector<std::int64_t> shard_len;           ///< [N]: tokens
  std::vector<std::int32_t> q_dst;               ///< [N]: rank that attends to the shard's queries
  std::vector<std::int64_t> doc_shard_offsets;   ///< [D + 1]: into doc_shards
  std::vector<std::int32_t> doc_shards;          ///< [N]: shards, document by document
  /// [N] by shard number, or empty for all 0: first needed KV shard, a position in the document.
  /// Along a document it must not decrease (a sliding window never moves back).
  std::vector<std::int32_t> kv_begin;
  /// [N] by shard number: the position after the last needed KV shard, all keys of which its
  /// queries meet. 0: the shard needs none after itself, and its queries meet none after
  /// themselves. Along a document the needed end must not decrease. Empty: all 0.
  std::vector<std::int32_t> kv_end = {};

  /// The first position in its document that a query shard needs, and the one after the last.
  /// `position` is that of the shard.
  [[nodiscard]] std::int32_t first_needed(std::int32_t shard) const {
    return kv_begin.empty() ? 0 : kv_begin[shard];
  }
  [[nodiscard]] std::int32_t end_needed(std::int32_t shard, std::int32_t position) const {
    return is_causal(shard) ? position + 1 : kv_end[shard];
  }
  /// Whether a shard's queries meet no keys after themselves.
  [[nodiscard]] bool is_causal(std::int32_t shard) const {
    return kv_end.empty() || kv_end[shard] == 0;
  }

  /// Sets the ranges: every query shard needs all of its document.
  void need_whole_documents();
  /// Whether kv_end says so for every shard, and there is no kv_begin.
  [[nodiscard]] bool needs_whole_documents() const;

  [[nodiscard]] std::int64_t num_shards() const {
    return static_cast<std::int64_t>(shard_len.size());
  }
  [[nodiscard]] std::int64_t num_documents() const {
    return doc_shard_offsets.empty() ? 0 : static_cast<std::int64_t>(doc_shard_offsets.size()) - 1;
  }

  /// Throws unless every rule above holds (lengths >= 0, 0 <= q_dst < W, each shard in exactly one
  /// document, at most 2^40 tokens in all). Linear. `who` begins the text.
  /// @throws InvalidArgument naming the field, the place, got and expected.
  void check(const char* who) const;

  friend bool operator==(const QkvPlan&, const QkvPlan&) = default;
};

/// (query, key) pairs of each shard's queries with all keys of its range. [N]
/// `q_len * kv_len - q_len * (q_len - 1) / 2` for a context of kv_len rows that ends with the
/// shard; `q_len * kv_len` where kv_end is not 0. Exact for causal, full and prefix masks; of
/// others whole blocks.
/// @throws InvalidArgument when plan.check() does, or for a document of over 2^31 tokens.
[[nodiscard]] std::vector<std::int64_t> shard_work(const QkvPlan& plan);

/// The sum of shard_work by attending rank. [W]
[[nodiscard]] std::vector<std::int64_t> rank_work(const QkvPlan& plan);

}  // namespace waybill
