#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "balance.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

using Cut = std::pair<std::int32_t, std::int64_t>;  ///< document, position

// Calls run(piece, slab, dst) for the longest runs of queries of a piece with one destination.
template <class Run>
void for_each_run(const HomeLayout& home, std::span<const Move> moves, Run&& run) {
  const Move* move = moves.data();
  const Move* last = move + moves.size();
  const auto num_pieces = static_cast<std::int32_t>(home.pieces.size());
  for (std::int32_t p = 0; p < num_pieces; ++p) {
    const HomePiece& piece = home.pieces[p];
    std::int64_t position = piece.begin;
    for (; move != last && move->piece == p;) {
      if (move->slab.begin > position) run(piece, Slab{position, move->slab.begin}, piece.rank);
      Slab slab = move->slab;
      const std::int32_t dst = move->dst;
      while (++move != last && move->piece == p && move->dst == dst && move->slab.begin == slab.end)
        slab.end = move->slab.end;
      run(piece, slab, dst);
      position = slab.end;
    }
    if (position < piece.end) run(piece, Slab{position, piece.end}, piece.rank);
  }
}

/// With a window: where the keys of queries that travel begin, by document and position.
std::vector<Cut> find_cuts(const HomeLayout& home, std::span<const Move> moves,
                           const PlannerOptions& options) {
  std::vector<Cut> cuts;
  if (!options.mask.has_window()) return cuts;
  for_each_run(home, moves, [&](const HomePiece& piece, Slab slab, std::int32_t dst) {
    const std::int64_t key = options.mask.first_key(slab.begin);
    const std::int64_t cut = key / options.block_tokens * options.block_tokens;
    if (cut > 0 && (dst != piece.rank || cut < piece.begin)) cuts.emplace_back(piece.doc, cut);
  });
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

// Shards are numbered by document so far, where ranks hold the pieces in another order.
void number_by_rank(const HomeLayout& home, QkvPlan& plan) {
  std::vector<std::int64_t> piece_shards{0};
  std::int64_t shard = 0;
  for (const HomePiece& piece : home.pieces) {
    for (std::int64_t rows = piece.end - piece.begin; rows > 0; ++shard)
      rows -= plan.shard_len[shard];
    piece_shards.push_back(shard);
  }
  const auto old_len = plan.shard_len;
  const auto old_dst = plan.q_dst;
  const auto old_begin = plan.kv_begin;
  plan.rank_shard_offsets.assign(1, 0);
  std::int32_t number = 0;
  for (std::int32_t rank = 0; rank < home.world_size; ++rank) {
    for (const std::int32_t piece : home.pieces_of(rank)) {
      for (std::int64_t n = piece_shards[piece]; n < piece_shards[piece + 1]; ++n, ++number) {
        plan.shard_len[number] = old_len[n];
        plan.q_dst[number] = old_dst[n];
        if (!old_begin.empty()) plan.kv_begin[number] = old_begin[n];
        plan.doc_shards[n] = number;
      }
    }
    plan.rank_shard_offsets.push_back(number);
  }
}

void write_kv_begin(const AttentionMask& mask, QkvPlan& plan) {
  plan.kv_begin.resize(plan.shard_len.size());
  std::vector<std::int64_t> ends;
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const std::int64_t first = plan.doc_shard_offsets[d];
    ends.clear();
    std::int32_t begin = 0;
    std::int64_t position = 0;
    for (std::int64_t n = first; n < plan.doc_shard_offsets[d + 1]; ++n) {
      const std::int64_t key = mask.first_key(position);
      position += plan.shard_len[n];
      ends.push_back(position);
      while (ends[begin] <= key) ++begin;
      plan.kv_begin[n] = begin;
    }
  }
}

}  // namespace

void write_plan(const HomeLayout& home, std::span<const Move> moves, const PlannerOptions& options,
                QkvPlan& plan) {
  const std::vector<Cut> cuts = find_cuts(home, moves, options);
  plan.world_size = options.world_size;
  plan.kv_layout = options.kv_layout;
  plan.mask = options.mask.kind;
  plan.rank_shard_offsets.assign(1, 0);
  plan.doc_shard_offsets.assign(1, 0);
  plan.shard_len.clear();
  plan.q_dst.clear();
  plan.kv_begin.clear();
  std::int32_t rank = 0;
  std::int32_t doc = 0;
  auto cut = cuts.begin();
  for_each_run(home, moves, [&](const HomePiece& piece, Slab slab, std::int32_t dst) {
    for (; doc < piece.doc; ++doc) plan.doc_shard_offsets.push_back(plan.num_shards());
    for (; rank < piece.rank; ++rank) plan.rank_shard_offsets.push_back(plan.num_shards());
    while (cut != cuts.end() && *cut <= Cut(piece.doc, slab.begin)) ++cut;
    for (; cut != cuts.end() && *cut < Cut(piece.doc, slab.end); ++cut) {
      if (cut->second == slab.begin) continue;
      plan.shard_len.push_back(cut->second - slab.begin);
      plan.q_dst.push_back(dst);
      slab.begin = cut->second;
    }
    plan.shard_len.push_back(slab.end - slab.begin);
    plan.q_dst.push_back(dst);
  });
  for (; doc < home.num_docs(); ++doc) plan.doc_shard_offsets.push_back(plan.num_shards());
  for (; rank < home.world_size; ++rank) plan.rank_shard_offsets.push_back(plan.num_shards());
  require(plan.num_shards() <= std::numeric_limits<std::int32_t>::max(),
          "plan_attention: the plan has ", plan.num_shards(), " shards, expected at most 2^31 - 1");
  plan.doc_shards.resize(plan.shard_len.size());
  std::iota(plan.doc_shards.begin(), plan.doc_shards.end(), 0);
  if (options.mask.has_window()) write_kv_begin(options.mask, plan);
  if (!std::is_sorted(home.by_rank.begin(), home.by_rank.end())) number_by_rank(home, plan);
}

}  // namespace waybill::detail
