#include "home_layout.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "waybill/core/error.h"
#include "waybill/planner/planner.h"

namespace waybill::detail {
namespace {

constexpr const char* in_plan_attention = "plan_attention";
constexpr const char* in_plan_pieces = "plan_pieces";
constexpr std::int64_t max_tokens = std::int64_t{1} << 40;
// The area of a mask over 2^31 tokens just fits int64.
constexpr std::int64_t longest_document = std::int64_t{1} << 31;

bool is_length(std::int64_t length) { return 1 <= length && length <= longest_document; }

void start(const PlannerOptions& options, HomeLayout& home) {
  home.world_size = options.world_size;
  home.pieces.clear();
  home.rank_pieces.assign(1, 0);
  home.doc_pieces.assign(1, 0);
  home.tokens.assign(options.world_size, 0);
}

void number_in_order(HomeLayout& home) {
  home.by_rank.resize(home.pieces.size());
  std::iota(home.by_rank.begin(), home.by_rank.end(), 0);
}

std::int64_t checked_total(std::span<const std::int64_t> doc_lengths,
                           const PlannerOptions& options) {
  std::int64_t total = 0;
  for (std::size_t i = 0; i < doc_lengths.size(); ++i) {
    require(is_length(doc_lengths[i]), in_plan_attention, ": doc_lengths[", i,
            "] = ", doc_lengths[i], ", expected 1..2^31 tokens");
    total += doc_lengths[i];
    require(total <= max_tokens, in_plan_attention, ": doc_lengths up to document ", i, " sum to ",
            total, " tokens, expected at most 2^40");
  }
  require(options.tokens_per_rank == 0 || total <= options.world_size * options.tokens_per_rank,
          in_plan_attention, ": doc_lengths sum to ", total, " tokens, expected at most ",
          options.world_size * options.tokens_per_rank, " (world_size ", options.world_size,
          " x tokens_per_rank ", options.tokens_per_rank, ")");
  return total;
}

// Bytes in of a rank are at most those of all rows; bytes out those of its rows to every rank.
void check_bytes(const PlannerOptions& options, std::int64_t total, std::int64_t max_at_home) {
  const auto q_row = static_cast<double>(options.model.q_row_bytes());
  const auto kv_row = static_cast<double>(options.model.kv_row_bytes());
  const double in = static_cast<double>(total) * (q_row + kv_row);
  const double out = static_cast<double>(max_at_home) * (q_row + kv_row * options.world_size);
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
      all.push_back({.begin = given.offset,
                     .end = given.offset + given.length,
                     .doc = found->second,
                     .rank = static_cast<std::int32_t>(r)});
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
  const std::int64_t total = checked_total(doc_lengths, options);
  start(options, home);
  home.tokens_per_rank = options.tokens_per_rank;
  if (home.tokens_per_rank == 0)
    home.tokens_per_rank = std::max<std::int64_t>(1, (total - 1) / options.world_size + 1);
  std::int32_t rank = 0;
  std::int64_t room = home.tokens_per_rank;
  const auto close_rank = [&] {
    home.tokens[rank] = home.tokens_per_rank - room;
    home.rank_pieces.push_back(static_cast<std::int32_t>(home.pieces.size()));
    ++rank;
    room = home.tokens_per_rank;
  };
  for (std::size_t d = 0; d < doc_lengths.size(); ++d) {
    for (std::int64_t begin = 0; begin < doc_lengths[d];) {
      if (room == 0) close_rank();
      const std::int64_t end = std::min(doc_lengths[d], begin + room);
      home.pieces.push_back({.begin = begin,
                             .end = end,
                             .doc = static_cast<std::int32_t>(d),
                             .rank = rank,
                             .doc_len = doc_lengths[d]});
      room -= end - begin;
      begin = end;
    }
    home.doc_pieces.push_back(static_cast<std::int32_t>(home.pieces.size()));
  }
  while (rank < options.world_size) close_rank();
  number_in_order(home);
  check_bytes(options, total, std::min(total, home.tokens_per_rank));
}

void lay_out(std::span<const std::vector<std::int64_t>> rank_doc_lengths,
             const PlannerOptions& options, HomeLayout& home) {
  require(std::ssize(rank_doc_lengths) == options.world_size, in_plan_attention, ": ",
          rank_doc_lengths.size(), " lists of documents, expected one per rank (world_size ",
          options.world_size, ")");
  std::int64_t total = 0;
  for (std::size_t r = 0; r < rank_doc_lengths.size(); ++r) {
    std::int64_t tokens = 0;
    for (std::size_t i = 0; i < rank_doc_lengths[r].size(); ++i) {
      require(is_length(rank_doc_lengths[r][i]), in_plan_attention, ": doc_lengths[", r, "][", i,
              "] = ", rank_doc_lengths[r][i], ", expected 1..2^31 tokens");
      tokens += rank_doc_lengths[r][i];
      total += rank_doc_lengths[r][i];
      require(total <= max_tokens, in_plan_attention, ": doc_lengths up to rank ", r, " sum to ",
              total, " tokens, expected at most 2^40");
    }
    require(options.tokens_per_rank == 0 || tokens <= options.tokens_per_rank, in_plan_attention,
            ": doc_lengths[", r, "] sum to ", tokens, " tokens, expected at most tokens_per_rank ",
            options.tokens_per_rank);
  }
  start(options, home);
  home.tokens_per_rank = options.tokens_per_rank;
  std::int32_t doc = 0;
  for (std::int32_t r = 0; r < options.world_size; ++r) {
    for (const std::int64_t length : rank_doc_lengths[r]) {
      home.pieces.push_back(
          {.begin = 0, .end = length, .doc = doc++, .rank = r, .doc_len = length});
      home.doc_pieces.push_back(doc);
      home.tokens[r] += length;
    }
    home.rank_pieces.push_back(doc);
  }
  number_in_order(home);
  check_bytes(options, total, *std::max_element(home.tokens.begin(), home.tokens.end()));
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
  start(options, home);
  home.by_rank.resize(given.size());
  for (std::size_t k = 0; k < order.size(); ++k) {
    home.pieces.push_back(given[order[k]]);
    home.by_rank[order[k]] = static_cast<std::int32_t>(k);
  }
  check_pieces(home.pieces, documents);
  for (const auto& pieces : rank_pieces)
    home.rank_pieces.push_back(home.rank_pieces.back() + static_cast<std::int32_t>(pieces.size()));
  std::int64_t total = 0;
  for (std::size_t k = 0; k < home.pieces.size(); ++k) {
    const HomePiece& piece = home.pieces[k];
    home.tokens[piece.rank] += piece.end - piece.begin;
    total += piece.end - piece.begin;
    require(total <= max_tokens, in_plan_pieces, ": more than 2^40 tokens");
    if (k + 1 < home.pieces.size() && home.pieces[k + 1].doc == piece.doc) continue;
    for (std::size_t i = home.doc_pieces.back(); i <= k; ++i) home.pieces[i].doc_len = piece.end;
    home.doc_pieces.push_back(static_cast<std::int32_t>(k + 1));
  }
  home.tokens_per_rank = std::max<std::int64_t>(1, std::ranges::max(home.tokens));
}

}  // namespace waybill::detail
