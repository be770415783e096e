#include "home_layout.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr const char* in_plan_attention = "plan_attention";
constexpr const char* in_plan_pieces = "plan_pieces";
constexpr std::int64_t max_tokens = std::int64_t{1} << 40;
// The area of a mask over 2^31 tokens just fits int64.
constexpr std::int64_t longest_document = std::int64_t{1} << 31;
constexpr std::int64_t max_chunks = std::int64_t{1} << 24;

/// Adds the length of a document, which `place` names, to those up to `idx`.
template <class... Place>
void add_length(std::int64_t& total, std::int64_t length, const char* up_to, std::size_t idx,
                const Place&... place) {
  require(1 <= length && length <= longest_document, in_plan_attention, ": doc_lengths", place...,
          " = ", length, ", expected 1..2^31 tokens");
  total += length;
  require(total <= max_tokens, in_plan_attention, ": doc_lengths up to ", up_to, idx, " sum to ",
          total, " tokens, expected at most 2^40");
}

/// The documents of ordered pieces may have only so many chunks.
void check_chunks(std::int64_t chunk, const HomeLayout& home) {
  std::int64_t chunks = 0;
  for (std::size_t k = 0; k < home.pieces.size(); ++k) {
    const HomePiece& piece = home.pieces[k];
    if (k + 1 == home.pieces.size() || home.pieces[k + 1].doc != piece.doc)
      chunks += (piece.end - 1) / chunk + 1;
  }
  require(chunks <= max_chunks, in_plan_attention, ": mask.chunk = ", chunk,
          ", expected more: documents have ", chunks, " chunks, of at most ", max_chunks);
}

/// Cuts pieces where chunks end; each chunk is a document from here on, with positions of its own.
void cut_at_chunks(std::int64_t chunk, HomeLayout& home) {
  const std::vector<HomePiece> whole = std::exchange(home.pieces, {});
  std::vector<std::int32_t> first_of(whole.size() + 1);  // piece as given -> its first part
  home.doc_chunks.assign(1, 0);
  for (std::size_t k = 0; k < whole.size(); ++k) {
    const HomePiece& piece = whole[k];
    const std::int32_t before = home.doc_chunks.back();
    for (std::int64_t begin = piece.begin; begin < piece.end;) {
      const std::int64_t number = begin / chunk;
      const std::int64_t end = std::min(piece.end, (number + 1) * chunk);
      home.pieces.push_back({{begin - number * chunk, end - number * chunk},
                             before + static_cast<std::int32_t>(number),
                             piece.rank});
      begin = end;
    }
    first_of[k + 1] = static_cast<std::int32_t>(home.pieces.size());
    if (k + 1 == whole.size() || whole[k + 1].doc != piece.doc)
      home.doc_chunks.push_back(home.pieces.back().doc + 1);
  }
  std::vector<std::int32_t> order = std::exchange(home.by_rank, {});
  for (const std::int32_t k : order) {
    for (std::int32_t part = first_of[k]; part < first_of[k + 1]; ++part)
      home.by_rank.push_back(part);
  }
}

/// Fills what follows from the pieces, which are ordered by document and position.
/// @param home `by_rank` is set, or empty: that is the order of the rows, too
void finish(const PlannerOptions& options, HomeLayout& home) {
  home.doc_chunks.clear();
  const std::int64_t num_docs = home.pieces.empty() ? 0 : home.pieces.back().doc + 1;
  require(options.prefixes.empty() || std::ssize(options.prefixes) == num_docs, in_plan_attention,
          ": ", options.prefixes.size(), " prefixes, expected one for each document: ", num_docs);
  if (options.mask.chunk > 0) {
    check_chunks(options.mask.chunk, home);
    cut_at_chunks(options.mask.chunk, home);
  }
  home.world_size = options.world_size;
  home.tokens.assign(options.world_size, 0);
  home.rank_pieces.assign(options.world_size + 1, 0);
  home.doc_pieces.assign(1, 0);
  for (std::size_t k = 0; k < home.pieces.size(); ++k) {
    const HomePiece& piece = home.pieces[k];
    home.tokens[piece.rank] += piece.rows();
    ++home.rank_pieces[piece.rank + 1];
    if (k + 1 < home.pieces.size() && home.pieces[k + 1].doc == piece.doc) continue;
    const std::int64_t given = options.mask_of(piece.doc).prefix;
    const std::int64_t prefix = given > 1 ? given : 0;
    for (std::size_t i = home.doc_pieces.back(); i <= k; ++i) {
      home.pieces[i].doc_len = piece.end;
      home.pieces[i].prefix = prefix;
    }
    home.doc_pieces.push_back(static_cast<std::int32_t>(k + 1));
  }
  std::partial_sum(home.rank_pieces.begin(), home.rank_pieces.end(), home.rank_pieces.begin());
  if (!home.by_rank.empty()) return;
  home.by_rank.resize(home.pieces.size());
  std::iota(home.by_rank.begin(), home.by_rank.end(), 0);
}

// Bytes in of a rank are at most those of all rows; bytes out those of its rows to every rank.
void check_bytes(const PlannerOptions& options, std::int64_t total, const HomeLayout& home) {
  const auto q_row = static_cast<double>(options.model.q_row_bytes());
  const auto kv_row = static_cast<double>(options.model.kv_row_bytes());
  const double in = static_cast<double>(total) * (q_row + kv_row);
  const double out =
      static_cast<double>(std::ranges::max(home.tokens)) * (q_row + kv_row * options.world_size);
  require(std::max(in, out) < 9e18, in_plan_attention, ": ", total, " tokens with rows of ", q_row,
          " and ", kv_row, " bytes on ", options.world_size,
          " ranks, expected fewer bytes than 2^63");
}

void check_piece(const DocumentRange& given, std::size_t rank, std::size_t i) {
  require(1 <= given.length && given.length <= longest_document, in_plan_pieces,
          ": pieces of rank ", rank, ": [", i, "] has length ", given.length,
          ", expected 1..2^31 tokens");
  require(0 <= given.offset && given.offset <= longest_document - given.length, in_plan_pieces,
          ": pieces of rank ", rank, ": [", i, "] has offset ", given.offset, " and length ",
          given.length, ", expected tokens of a document of at most 2^31");
}

/// In the order of the ranks; documents are numbered as they appear.
std::vector<HomePiece> list_pieces(std::span<const std::vector<DocumentRange>> rank_pieces,
                                   std::vector<std::int64_t>& documents) {
  std::vector<HomePiece> all;
  std::unordered_map<std::int64_t, std::int32_t> numbers;
  for (std::size_t r = 0; r < rank_pieces.size(); ++r) {
    for (std::size_t i = 0; i < rank_pieces[r].size(); ++i) {
      const DocumentRange& given = rank_pieces[r][i];
      check_piece(given, r, i);
      const auto [found, is_new] =
          numbers.try_emplace(given.document, static_cast<std::int32_t>(documents.size()));
      if (is_new) documents.push_back(given.document);
      all.push_back({{given.offset, given.offset + given.length},
                     found->second,
                     static_cast<std::int32_t>(r)});
    }
  }
  return all;
}

/// By document and position, each where the one before ends.
void check_pieces(std::span<const HomePiece> all, std::span<const std::int64_t> documents) {
  for (std::size_t k = 0; k < all.size(); ++k) {
    const HomePiece& piece = all[k];
    const bool is_first = k == 0 || all[k - 1].doc != piece.doc;
    const std::int64_t expected = is_first ? 0 : all[k - 1].end;
    const std::int64_t document = documents[piece.doc];
    require(piece.begin <= expected, in_plan_pieces, ": document ", document, ": tokens ", expected,
            "..", piece.begin - 1, " are held by no rank; the next piece, [", piece.begin, ", ",
            piece.end, "), is of rank ", piece.rank);
    require(piece.begin >= expected, in_plan_pieces, ": document ", document, ": token ",
            piece.begin, " is held twice, by rank ", is_first ? 0 : all[k - 1].rank, " and rank ",
            piece.rank);
  }
}

}  // namespace

void lay_out(std::span<const std::int64_t> doc_lengths, const PlannerOptions& options,
             HomeLayout& home) {
  std::int64_t total = 0;
  for (std::size_t i = 0; i < doc_lengths.size(); ++i)
    add_length(total, doc_lengths[i], "document ", i, "[", i, "]");
  const std::int64_t world_size = options.world_size;
  require(options.tokens_per_rank == 0 || total <= world_size * options.tokens_per_rank,
          in_plan_attention, ": doc_lengths sum to ", total, " tokens, expected at most ",
          world_size * options.tokens_per_rank, " (world_size ", world_size, " x tokens_per_rank ",
          options.tokens_per_rank, ")");
  home.pieces.clear();
  home.by_rank.clear();
  home.tokens_per_rank = options.tokens_per_rank > 0
                             ? options.tokens_per_rank
                             : std::max<std::int64_t>(1, (total - 1) / world_size + 1);
  std::int32_t rank = 0;
  std::int64_t room = home.tokens_per_rank;
  for (std::size_t d = 0; d < doc_lengths.size(); ++d) {
    for (std::int64_t begin = 0; begin < doc_lengths[d];) {
      if (room == 0) {
        ++rank;
        room = home.tokens_per_rank;
      }
      const std::int64_t end = std::min(doc_lengths[d], begin + room);
      home.pieces.push_back({{begin, end}, static_cast<std::int32_t>(d), rank});
      room -= end - begin;
      begin = end;
    }
  }
  finish(options, home);
  check_bytes(options, total, home);
}

void lay_out(std::span<const std::vector<std::int64_t>> rank_doc_lengths,
             const PlannerOptions& options, HomeLayout& home) {
  require(std::ssize(rank_doc_lengths) == options.world_size, in_plan_attention, ": ",
          rank_doc_lengths.size(), " lists of documents, expected one per rank (world_size ",
          options.world_size, ")");
  home.pieces.clear();
  home.by_rank.clear();
  home.tokens_per_rank = options.tokens_per_rank;
  std::int64_t total = 0;
  std::int32_t doc = 0;
  for (std::size_t r = 0; r < rank_doc_lengths.size(); ++r) {
    const std::int64_t before = total;
    for (std::size_t i = 0; i < rank_doc_lengths[r].size(); ++i) {
      const std::int64_t length = rank_doc_lengths[r][i];
      add_length(total, length, "rank ", r, "[", r, "][", i, "]");
      home.pieces.push_back({{0, length}, doc++, static_cast<std::int32_t>(r)});
    }
    const std::int64_t tokens = total - before;
    require(options.tokens_per_rank == 0 || tokens <= options.tokens_per_rank, in_plan_attention,
            ": doc_lengths[", r, "] sum to ", tokens, " tokens, expected at most tokens_per_rank ",
            options.tokens_per_rank);
  }
  finish(options, home);
  check_bytes(options, total, home);
}

void lay_out(std::span<const std::vector<DocumentRange>> rank_pieces, const PlannerOptions& options,
             HomeLayout& home) {
  require(std::ssize(rank_pieces) == options.world_size, in_plan_pieces, ": ", rank_pieces.size(),
          " lists of pieces, expected one per rank (world_size ", options.world_size, ")");
  std::vector<std::int64_t> documents;
  const std::vector<HomePiece> given = list_pieces(rank_pieces, documents);
  std::vector<std::int32_t> order(given.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {},
                           [&](std::int32_t i) { return std::pair(given[i].doc, given[i].begin); });
  home.pieces.clear();
  home.by_rank.resize(given.size());
  for (std::size_t k = 0; k < order.size(); ++k) {
    home.pieces.push_back(given[order[k]]);
    home.by_rank[order[k]] = static_cast<std::int32_t>(k);
  }
  check_pieces(home.pieces, documents);
  finish(options, home);
  require(std::reduce(home.tokens.begin(), home.tokens.end()) <= max_tokens, in_plan_pieces,
          ": more than 2^40 tokens");
  home.tokens_per_rank = std::max<std::int64_t>(1, std::ranges::max(home.tokens));
}

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

/// Where prefixes end, and where the keys of queries that travel begin, by document and position.
std::vector<Cut> find_cuts(const HomeLayout& home, std::span<const Move> moves,
                           const PlannerOptions& options) {
  std::vector<Cut> cuts;
  for (std::int64_t d = 0; d < home.num_docs(); ++d) {
    const HomePiece& piece = home.pieces[home.doc_pieces[d]];
    if (0 < piece.prefix && piece.prefix < piece.doc_len) cuts.emplace_back(d, piece.prefix);
  }
  if (!options.mask.moves_on()) return cuts;
  for_each_run(home, moves, [&](const HomePiece& piece, Slab slab, std::int32_t dst) {
    const std::int64_t key = options.mask.keys(slab.begin, slab.end, piece.doc_len).begin;
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
    for (std::int64_t rows = piece.rows(); rows > 0; ++shard) rows -= plan.shard_len[shard];
    piece_shards.push_back(shard);
  }
  const QkvPlan old = plan;
  plan.rank_shard_offsets.assign(1, 0);
  std::int32_t number = 0;
  for (std::int32_t rank = 0; rank < home.world_size; ++rank) {
    for (const std::int32_t piece : home.pieces_of(rank)) {
      for (std::int64_t n = piece_shards[piece]; n < piece_shards[piece + 1]; ++n, ++number) {
        plan.shard_len[number] = old.shard_len[n];
        plan.q_dst[number] = old.q_dst[n];
        if (!old.kv_begin.empty()) plan.kv_begin[number] = old.kv_begin[n];
        if (!old.kv_end.empty()) plan.kv_end[number] = old.kv_end[n];
        plan.doc_shards[n] = number;
      }
    }
    plan.rank_shard_offsets.push_back(number);
  }
}

}  // namespace

void write_ranges(const AttentionMask& given, std::span<const std::int64_t> prefixes,
                  QkvPlan& plan) {
  plan.kv_begin.clear();
  plan.kv_end.clear();
  AttentionMask mask = given;
  mask.prefix = prefixes.empty() ? 0 : std::ranges::max(prefixes);
  if (mask.moves_on()) plan.kv_begin.resize(plan.shard_len.size());
  if (mask.looks_ahead_at(0)) plan.kv_end.resize(plan.shard_len.size());
  if (plan.kv_begin.empty() && plan.kv_end.empty()) return;
  std::vector<std::int64_t> ends;
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const std::int64_t first = plan.doc_shard_offsets[d];
    const std::int64_t last = plan.doc_shard_offsets[d + 1];
    if (!prefixes.empty()) mask.prefix = prefixes[d];
    ends.clear();
    std::int64_t doc_len = 0;
    for (std::int64_t n = first; n < last; ++n)
      ends.push_back(doc_len += plan.shard_len[plan.doc_shards[n]]);
    std::int32_t begin = 0;
    std::int32_t end = 0;
    std::int64_t position = 0;
    for (std::int64_t n = first; n < last; ++n) {
      const std::int32_t shard = plan.doc_shards[n];
      const TokenRange keys = mask.keys(position, ends[n - first], doc_len);
      while (ends[begin] <= keys.begin) ++begin;
      while (ends[end] < keys.end) ++end;
      if (!plan.kv_begin.empty()) plan.kv_begin[shard] = begin;
      if (!plan.kv_end.empty()) plan.kv_end[shard] = mask.looks_ahead_at(position) ? end + 1 : 0;
      position = ends[n - first];
    }
  }
}

void join_chunks(const HomeLayout& home, QkvPlan& plan) {
  if (home.doc_chunks.empty()) return;
  const std::vector<std::int64_t> offsets = std::exchange(plan.doc_shard_offsets, {0});
  for (std::size_t d = 0; d + 1 < home.doc_chunks.size(); ++d) {
    const std::int64_t first = offsets[home.doc_chunks[d]];
    for (std::int32_t c = home.doc_chunks[d]; c < home.doc_chunks[d + 1]; ++c) {
      const auto before = static_cast<std::int32_t>(offsets[c] - first);
      for (std::int64_t i = offsets[c]; i < offsets[c + 1]; ++i) {
        const std::int32_t shard = plan.doc_shards[i];
        plan.kv_begin[shard] += before;
        if (!plan.kv_end.empty()) plan.kv_end[shard] += before;
      }
    }
    plan.doc_shard_offsets.push_back(offsets[home.doc_chunks[d + 1]]);
  }
}

void write_plan(const HomeLayout& home, std::span<const Move> moves, const PlannerOptions& options,
                QkvPlan& plan) {
  const std::vector<Cut> cuts = find_cuts(home, moves, options);
  plan.world_size = options.world_size;
  plan.kv_layout = options.kv_layout;
  plan.rank_shard_offsets.assign(1, 0);
  plan.doc_shard_offsets.assign(1, 0);
  plan.shard_len.clear();
  plan.q_dst.clear();
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
  std::vector<std::int64_t> prefixes;
  for (std::int64_t d = 0; options.mask.kind == MaskKind::prefix && d < home.num_docs(); ++d)
    prefixes.push_back(home.pieces[home.doc_pieces[d]].prefix);
  write_ranges(options.mask, prefixes, plan);
  if (!std::is_sorted(home.by_rank.begin(), home.by_rank.end())) number_by_rank(home, plan);
}

}  // namespace waybill::detail
