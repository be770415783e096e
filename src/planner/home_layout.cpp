#include "home_layout.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "balance.h"
#include "waybill/core/error.h"
#include "waybill/planner/planner.h"

namespace waybill::detail {
namespace {

constexpr const char* in_plan_attention = "plan_attention";
constexpr std::int64_t most_tokens = std::int64_t{1} << 40;
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
    require(total <= most_tokens, in_plan_attention, ": doc_lengths up to document ", i, " sum to ",
            total, " tokens, expected at most 2^40");
  }
  require(options.tokens_per_rank == 0 || total <= options.world_size * options.tokens_per_rank,
          in_plan_attention, ": doc_lengths sum to ", total, " tokens, expected at most ",
          options.world_size * options.tokens_per_rank, " (world_size ", options.world_size,
          " x tokens_per_rank ", options.tokens_per_rank, ")");
  return total;
}

// Bytes in of a rank are at most those of all rows; bytes out those of its rows to every rank.
void check_bytes(const PlannerOptions& options, std::int64_t total, std::int64_t most_at_home) {
  const auto q_row = static_cast<double>(options.model.q_row_bytes());
  const auto kv_row = static_cast<double>(options.model.kv_row_bytes());
  const double in = static_cast<double>(total) * (q_row + kv_row);
  const double out = static_cast<double>(most_at_home) * (q_row + kv_row * options.world_size);
  require(std::max(in, out) < 9e18, in_plan_attention, ": ", total, " tokens with rows of ", q_row,
          " and ", kv_row, " bytes on ", options.world_size,
          " ranks, expected fewer bytes than 2^63");
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
      require(total <= most_tokens, in_plan_attention, ": doc_lengths up to rank ", r, " sum to ",
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

}  // namespace waybill::detail

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
