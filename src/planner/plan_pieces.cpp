#include "waybill/planner/plan_pieces.h"

#include <algorithm>
#include <unordered_map>

#include "balance.h"
#include "build_plan.h"
#include "home_layout.h"
#include "waybill/core/error.h"

namespace waybill {
namespace detail {
namespace {

constexpr const char* who = "plan_pieces";

/// A piece as it was given: `place` is its number on all ranks together.
struct GivenPiece {
  HomePiece piece;
  std::int32_t place = 0;
};

void check_piece(const DocumentRange& given, std::size_t rank, std::size_t i) {
  constexpr std::int64_t longest_document = std::int64_t{1} << 31;
  require(1 <= given.length && given.length <= longest_document, who, ": pieces of rank ", rank,
          ": [", i, "] has length ", given.length, ", expected 1..2^31 tokens");
  require(0 <= given.offset && given.offset <= longest_document - given.length, who,
          ": pieces of rank ", rank, ": [", i, "] has offset ", given.offset, " and length ",
          given.length, ", expected tokens of a document of at most 2^31");
}

/// In the order of the ranks; documents are numbered as they appear.
std::vector<GivenPiece> list_pieces(std::span<const std::vector<DocumentRange>> rank_pieces,
                                    std::vector<std::int64_t>& documents) {
  std::vector<GivenPiece> all;
  std::unordered_map<std::int64_t, std::int32_t> numbers;
  for (std::size_t r = 0; r < rank_pieces.size(); ++r) {
    for (std::size_t i = 0; i < rank_pieces[r].size(); ++i) {
      const DocumentRange& given = rank_pieces[r][i];
      check_piece(given, r, i);
      const auto [found, is_new] =
          numbers.try_emplace(given.document, static_cast<std::int32_t>(documents.size()));
      if (is_new) documents.push_back(given.document);
      all.push_back({.piece = {.begin = given.offset,
                               .end = given.offset + given.length,
                               .doc = found->second,
                               .rank = static_cast<std::int32_t>(r)},
                     .place = static_cast<std::int32_t>(all.size())});
    }
  }
  return all;
}

/// By document and position, each where the one before ends.
void check_documents(std::span<const GivenPiece> all, std::span<const std::int64_t> documents) {
  for (std::size_t k = 0; k < all.size(); ++k) {
    const HomePiece& piece = all[k].piece;
    const bool is_first = k == 0 || all[k - 1].piece.doc != piece.doc;
    const std::int64_t expected = is_first ? 0 : all[k - 1].piece.end;
    const std::int64_t document = documents[piece.doc];
    require(piece.begin <= expected, who, ": document ", document, ": tokens ", expected, "..",
            piece.begin - 1, " are held by no rank; the next piece, [", piece.begin, ", ",
            piece.end, "), is of rank ", piece.rank);
    require(piece.begin >= expected, who, ": document ", document, ": token ", piece.begin,
            " is held twice, by rank ", is_first ? 0 : all[k - 1].piece.rank, " and rank ",
            piece.rank);
  }
}

}  // namespace

void lay_out(std::span<const std::vector<DocumentRange>> rank_pieces, const PlannerOptions& options,
             HomeLayout& home) {
  require(std::ssize(rank_pieces) == options.world_size, who, ": ", rank_pieces.size(),
          " lists of pieces, expected one per rank (world_size ", options.world_size, ")");
  std::vector<std::int64_t> documents;
  auto all = list_pieces(rank_pieces, documents);
  std::sort(all.begin(), all.end(), [](const GivenPiece& a, const GivenPiece& b) {
    if (a.piece.doc != b.piece.doc) return a.piece.doc < b.piece.doc;
    return a.piece.begin != b.piece.begin ? a.piece.begin < b.piece.begin : a.place < b.place;
  });
  check_documents(all, documents);
  home = {};
  home.world_size = options.world_size;
  home.tokens.assign(options.world_size, 0);
  home.by_rank.resize(all.size());
  home.rank_pieces.assign(1, 0);
  home.doc_pieces.assign(1, 0);
  for (const auto& pieces : rank_pieces)
    home.rank_pieces.push_back(home.rank_pieces.back() + static_cast<std::int32_t>(pieces.size()));
  std::int64_t total = 0;
  for (std::size_t k = 0; k < all.size(); ++k) {
    const HomePiece& piece = all[k].piece;
    home.pieces.push_back(piece);
    home.by_rank[all[k].place] = static_cast<std::int32_t>(k);
    home.tokens[piece.rank] += piece.end - piece.begin;
    total += piece.end - piece.begin;
    require(total <= std::int64_t{1} << 40, who, ": more than 2^40 tokens");
    if (k + 1 < all.size() && all[k + 1].piece.doc == piece.doc) continue;
    for (std::size_t i = home.doc_pieces.back(); i <= k; ++i) home.pieces[i].doc_len = piece.end;
    home.doc_pieces.push_back(static_cast<std::int32_t>(k + 1));
  }
  home.tokens_per_rank =
      std::max<std::int64_t>(1, *std::max_element(home.tokens.begin(), home.tokens.end()));
}

}  // namespace detail

QkvPlan plan_pieces(std::span<const std::vector<DocumentRange>> rank_pieces,
                    const PlannerOptions& options) {
  options.check("plan_pieces");
  require(options.max_tokens_per_rank == 0 && options.byte_weight == 0,
          "plan_pieces: max_tokens_per_rank = ", options.max_tokens_per_rank,
          ", byte_weight = ", options.byte_weight, ", expected 0: plans of pieces have no figures");
  detail::HomeLayout home;
  detail::lay_out(rank_pieces, options, home);
  detail::Balancer balancer;
  balancer.run(home, options, options.imbalance_target);
  QkvPlan plan;
  detail::PlanWriter().write(home, balancer.moves(), options, plan);
  return plan;
}

}  // namespace waybill
