#include "waybill/planner/static_plans.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "core/checks.h"
#include "home_layout.h"
#include "waybill/core/error.h"
#include "waybill/core/topology.h"

namespace waybill {
namespace {

void check_pieces(const std::vector<DocumentPiece>& pieces, std::int64_t num_documents,
                  std::int32_t world_size) {
  constexpr const char* who = "plan_of_pieces";
  detail::check_range(who, "world_size", world_size, 1, max_world_size);
  require(0 <= num_documents && num_documents <= std::numeric_limits<std::int32_t>::max(), who,
          ": num_documents = ", num_documents, ", expected 0..2^31 - 1");
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const DocumentPiece& p = pieces[i];
    require(0 <= p.document && p.document < num_documents, who, ": pieces[", i,
            "].document = ", p.document, ", expected 0..", num_documents - 1);
    require(0 <= p.home && p.home < world_size, who, ": pieces[", i, "].home = ", p.home,
            ", expected 0..", world_size - 1);
    require(0 <= p.begin && p.begin <= p.end, who, ": pieces[", i, "] = [", p.begin, ", ", p.end,
            "), expected 0 <= begin <= end");
  }
}

/// The rank of a group of `degree` that has chunk `chunk` of 2 * degree.
std::int32_t zigzag_rank(std::int64_t chunk, std::int32_t degree) {
  return static_cast<std::int32_t>(chunk < degree ? chunk : 2 * degree - 1 - chunk);
}

// Tokens that stay on a rank. The two chunks in the middle follow each other on one rank: a shard.
void add_piece(std::vector<DocumentPiece>& pieces, std::size_t document, std::int64_t begin,
               std::int64_t end, std::int64_t rank) {
  if (begin == end) return;
  const auto doc = static_cast<std::int32_t>(document);
  const auto home = static_cast<std::int32_t>(rank);
  if (!pieces.empty() && pieces.back().document == doc && pieces.back().home == home &&
      pieces.back().end == begin) {
    pieces.back().end = end;
  } else {
    pieces.push_back({.begin = begin, .end = end, .document = doc, .home = home, .q_dst = home});
  }
}

}  // namespace

QkvPlan plan_of_pieces(std::vector<DocumentPiece> pieces, std::int64_t num_documents,
                       std::int32_t world_size) {
  check_pieces(pieces, num_documents, world_size);
  std::erase_if(pieces, [](const DocumentPiece& p) { return p.begin == p.end; });
  std::stable_sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) {
    return std::tie(a.home, a.document, a.begin) < std::tie(b.home, b.document, b.begin);
  });
  QkvPlan plan;
  plan.world_size = world_size;
  plan.rank_shard_offsets.assign(world_size + 1, 0);
  plan.doc_shard_offsets.assign(num_documents + 1, 0);
  for (const DocumentPiece& p : pieces) {
    plan.shard_len.push_back(p.end - p.begin);
    plan.q_dst.push_back(p.q_dst);
    ++plan.rank_shard_offsets[p.home + 1];
    ++plan.doc_shard_offsets[p.document + 1];
  }
  const auto sum_up = [](std::vector<std::int64_t>& counts) {
    std::partial_sum(counts.begin(), counts.end(), counts.begin());
  };
  sum_up(plan.rank_shard_offsets);
  sum_up(plan.doc_shard_offsets);
  plan.doc_shards.resize(pieces.size());
  std::iota(plan.doc_shards.begin(), plan.doc_shards.end(), 0);
  std::sort(plan.doc_shards.begin(), plan.doc_shards.end(), [&](std::int32_t a, std::int32_t b) {
    const DocumentPiece& left = pieces[a];
    const DocumentPiece& right = pieces[b];
    return std::tie(left.document, left.begin) < std::tie(right.document, right.begin);
  });
  plan.check("plan_of_pieces");
  return plan;
}

std::int32_t StaticPlanOptions::degree_of(std::int32_t world_size, std::int32_t ranks_per_node) {
  require(world_size >= 1 && ranks_per_node >= 1, "degree_of: world_size = ", world_size,
          ", ranks_per_node = ", ranks_per_node, ", expected >= 1");
  std::int32_t degree = std::min(world_size, ranks_per_node);
  while (world_size % degree != 0) --degree;
  return degree;
}

void StaticPlanOptions::check(std::span<const std::int64_t> doc_lengths, const char* who) const {
  detail::check_range(who, "world_size", world_size, 1, max_world_size);
  require(1 <= degree && world_size % degree == 0, who, ": degree = ", degree,
          ", expected a divisor of world_size = ", world_size);
  constexpr std::int64_t max_tokens = std::int64_t{1} << 40;
  detail::check_range(who, "tokens_per_rank", tokens_per_rank, 1, max_tokens / world_size);
  require(prefixes.empty() || prefixes.size() == doc_lengths.size(), who, ": ", prefixes.size(),
          " prefixes, expected one for each document: ", doc_lengths.size());
  const std::int64_t capacity = world_size * tokens_per_rank;
  std::int64_t sum = 0;
  for (std::size_t d = 0; d < doc_lengths.size(); ++d) {
    require(doc_lengths[d] >= 1, who, ": doc_lengths[", d, "] = ", doc_lengths[d],
            ", expected >= 1");
    require(doc_lengths[d] <= capacity - sum, who, ": doc_lengths[0..", d,
            "] exceed world_size * tokens_per_rank = ", capacity);
    sum += doc_lengths[d];
  }
}

namespace {

/// The plan of pieces, with the ranges that the mask needs; cut where prefixes end.
QkvPlan plan_of(std::vector<DocumentPiece> pieces, std::span<const std::int64_t> doc_lengths,
                const StaticPlanOptions& options) {
  std::vector<std::int64_t> prefixes;
  for (std::size_t d = 0; d < doc_lengths.size(); ++d) prefixes.push_back(options.prefix_of(d));
  for (std::size_t i = 0, given = pieces.size(); i < given; ++i) {
    const std::int64_t prefix = prefixes[pieces[i].document];
    if (prefix <= pieces[i].begin || pieces[i].end <= prefix) continue;
    DocumentPiece rest = pieces[i];
    rest.begin = pieces[i].end = prefix;
    pieces.push_back(rest);
  }
  QkvPlan plan = plan_of_pieces(std::move(pieces), std::ssize(doc_lengths), options.world_size);
  if (options.mask.kind == MaskKind::prefix) {
    detail::write_ranges(options.mask, prefixes, plan);
  } else if (options.mask.looks_ahead()) {
    plan.need_whole_documents();
  }
  return plan;
}

}  // namespace

QkvPlan zigzag_plan(std::span<const std::int64_t> doc_lengths, const StaticPlanOptions& options) {
  options.check(doc_lengths, "zigzag_plan");
  const std::int64_t total =
      std::accumulate(doc_lengths.begin(), doc_lengths.end(), std::int64_t{});
  const std::int64_t sequence = options.tokens_per_rank * options.degree;
  const std::int64_t num_chunks = 2 * std::int64_t{options.degree};
  std::vector<DocumentPiece> pieces;
  std::int64_t first = 0;  // token of the whole batch
  std::int64_t group = 0;
  std::int64_t chunk = 0;
  for (std::size_t d = 0; d < doc_lengths.size(); ++d) {
    for (std::int64_t begin = 0; begin < doc_lengths[d];) {
      const std::int64_t tokens = std::min(sequence, total - group * sequence);
      const std::int64_t chunk_end = group * sequence + tokens * (chunk + 1) / num_chunks;
      if (chunk_end <= first + begin) {  // the next chunk, of the next group after the last
        chunk = chunk + 1 < num_chunks ? chunk + 1 : 0;
        if (chunk == 0) ++group;
        continue;
      }
      const std::int64_t end = std::min(doc_lengths[d], chunk_end - first);
      add_piece(pieces, d, begin, end, group * options.degree + zigzag_rank(chunk, options.degree));
      begin = end;
    }
    first += doc_lengths[d];
  }
  return plan_of(std::move(pieces), doc_lengths, options);
}

QkvPlan per_document_plan(std::span<const std::int64_t> doc_lengths,
                          const StaticPlanOptions& options) {
  options.check(doc_lengths, "per_document_plan");
  const std::int64_t num_chunks = 2 * std::int64_t{options.degree};
  std::vector<DocumentPiece> pieces;
  std::int64_t first = 0;
  for (std::size_t d = 0; d < doc_lengths.size(); ++d) {
    const std::int64_t group = first / (options.tokens_per_rank * options.degree);
    for (std::int64_t i = 0; i < num_chunks; ++i) {
      add_piece(pieces, d, doc_lengths[d] * i / num_chunks, doc_lengths[d] * (i + 1) / num_chunks,
                group * options.degree + zigzag_rank(i, options.degree));
    }
    first += doc_lengths[d];
  }
  return plan_of(std::move(pieces), doc_lengths, options);
}

}  // namespace waybill
