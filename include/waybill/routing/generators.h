#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "waybill/core/index_array.h"
#include "waybill/core/random.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill {

/// A histogram of document lengths.
struct LengthDistribution {
  struct Bucket {
    std::int64_t lo = 0;    ///< tokens, inclusive
    std::int64_t hi = 0;    ///< tokens, exclusive
    std::int64_t docs = 0;  ///< documents counted
    double mean_len = 0;    ///< tokens; 0: not known, taken as the middle
  };
  std::string name;
  std::string source;  ///< where the figures come from
  std::vector<Bucket> buckets;
  std::int64_t max_len = 0;  ///< longest document; 0: not known

  /// @throws InvalidArgument unless buckets are non-empty ranges with counts >= 0, one of them > 0.
  void check() const;
};

/// Draws documents until they fill `num_tokens` exactly; the last one is cut to fit. Lengths are
/// uniform on each side of the bucket's mean, so that the mean is kept; at least 1 token.
/// @throws InvalidArgument when distribution.check() does, or num_tokens < 0.
[[nodiscard]] std::vector<std::int64_t> sample_documents(const LengthDistribution& distribution,
                                                         std::int64_t num_tokens,
                                                         std::uint64_t seed);

/// A plan in DistCA's dense form, one KV copy per query. P = most shards on a rank. int64.
struct RawQkvDispatch {
  IndexArray cp_seq_lens;    ///< [W, P]: rows of each shard; padding 0
  IndexArray num_cp_shards;  ///< [W]: shards on the rank
  IndexArray cp_query_dst;   ///< [W, P]: destination rank; padding -1
  KvMapping kv;              ///< see KvMapping

  friend bool operator==(const RawQkvDispatch&, const RawQkvDispatch&) = default;
};

/// The dense form of a causal plan (its kv_layout is not looked at: this form is per query).
/// C = most queries that a KV shard serves, or `max_cp_degree` when that is larger.
/// @throws InvalidArgument when plan.check() does, or for a plan with other ranges (kv_begin,
/// kv_end).
[[nodiscard]] RawQkvDispatch to_raw_dispatch(const QkvPlan& plan, std::int64_t max_cp_degree = 1);

/// Random sequence lengths: [W, n] int32, every row sums to total_len exactly.
/// With u uniform in [0, 1): share = (u + 0.25/n) / row sum, length = round-half-even(share *
/// total), the last takes the rest. Lengths below `min_len` (but at most total_len / n) are then
/// filled up with rows of the longest. (DistCA returns 0 and negative lengths there.)
/// @throws InvalidArgument unless world_size >= 1, num_seqs >= 1, 0 <= total_len < 2^31,
///   min_len >= 0.
[[nodiscard]] IndexArray gen_seq_lens(std::int64_t world_size, std::int64_t num_seqs,
                                      std::int64_t total_len, std::uint64_t seed = 0,
                                      std::int64_t min_len = 1);

/// The same from given draws: uniforms [world_size * num_seqs] in [0, 1), row-major. The default
/// min_len of 0 repeats what DistCA makes of the same draws, except for negative lengths.
[[nodiscard]] IndexArray gen_seq_lens(std::int64_t world_size, std::int64_t num_seqs,
                                      std::int64_t total_len, std::span<const float> uniforms,
                                      std::int64_t min_len = 0);

/// A random plan in dense form with the lengths of its whole sequences.
struct RawQkvDispatchWithLens {
  RawQkvDispatch raw;
  IndexArray seq_lens;  ///< [W, num_seqs] int64: before sharding
  QkvPlan plan;         ///< the same plan, sparse; layout per_query
};

/// A random plan: gen_seq_lens sequences on every rank; each is cut into cp equal shards (to
/// one row), cp a random power of two up to max_cp_degree, that go to cp different ranks.
/// @param total_seq_len rows on every rank (not over all ranks), a multiple of max_cp_degree
/// @throws InvalidArgument unless world_size, num_seqs, max_cp_degree >= 1, max_cp_degree <=
///   world_size (the shards of a sequence go to different ranks) and total_seq_len fits.
[[nodiscard]] RawQkvDispatchWithLens create_raw_qkv_dispatch(std::int64_t world_size,
                                                             std::int64_t total_seq_len,
                                                             std::int64_t num_seqs,
                                                             std::int64_t max_cp_degree,
                                                             std::uint64_t seed = 0);

/// The same from given draws.
/// @param seq_lens [W, n] int64, rows of each sequence, >= 0
/// @param cp_num [W, n] int64, shards of each sequence, 1..C; the longer ones come first
/// @param cp_dst [W, n, C] int64, destination of each shard; slots from cp_num on are not read
/// @throws InvalidArgument naming rank, sequence, got and expected.
[[nodiscard]] RawQkvDispatchWithLens create_raw_qkv_dispatch(const IndexArray& seq_lens,
                                                             const IndexArray& cp_num,
                                                             const IndexArray& cp_dst);

/// A random plan with all its metadata.
struct QkvDispatch {
  E2eMetadata metadata;
  RawQkvDispatch raw;
  IndexArray seq_lens;  ///< [W, num_seqs]: before sharding
  QkvPlan plan;
};

/// create_raw_qkv_dispatch and compute_e2e_metadata in one call. Arguments and errors are theirs.
[[nodiscard]] QkvDispatch create_qkv_dispatch(std::int64_t world_size, std::int64_t total_seq_len,
                                              std::int64_t num_seqs, std::int64_t max_cp_degree,
                                              std::uint64_t seed = 0,
                                              bool return_intermediate = false);

/// The same for given shards, which may be uneven and share destinations.
/// @param seq_lens [W, n]: zeros only after the last sequence of a rank
/// @param cp_num [W, n]: shards of each sequence
/// @param cp_dst [W, n, C]: destination of each shard, -1 after the first cp_num
/// @param seq_shard_lens [W, n, C]: rows of each shard, > 0 for the first cp_num, 0 after; they
///   sum to seq_lens
/// @throws InvalidArgument naming rank, sequence, got and expected. A rank may be empty.
[[nodiscard]] QkvDispatch create_qkv_dispatch_with_custom_mapping(
    std::int64_t world_size, const IndexArray& seq_lens, const IndexArray& cp_num,
    const IndexArray& cp_dst, const IndexArray& seq_shard_lens, bool return_intermediate = false);

/// DistCA's balanced example: 4 ranks with 16K rows each, as 1 x 16K, 2 x 8K, 4 x 4K and
/// 8 x 2K; the 16K sequence is cut into 8 shards that go to ranks 0, 1, 2, 3, 3, 2, 1, 0, so that
/// first and last shards balance each other under a causal mask; the rest stays at home.
/// @param rows_per_rank a multiple of 8
[[nodiscard]] QkvDispatch create_balanced_example(std::int64_t rows_per_rank = 16384);

}  // namespace waybill
