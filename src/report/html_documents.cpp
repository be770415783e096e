#include <algorithm>

#include "html_parts.h"
#include "report/format.h"
#include "report/plan_figures.h"
#include "routing/homes.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr std::int64_t max_pieces_per_document = 400;
constexpr std::int64_t max_pieces = 2500;  // keeps the page small

std::string percent(std::int64_t tokens, std::int64_t longest) {
  return svg_number(100.0 * static_cast<double>(tokens) / static_cast<double>(longest)) + "%";
}

std::int64_t shards_per_piece(const QkvPlan& plan, std::int64_t document) {
  const std::int64_t num_shards =
      plan.doc_shard_offsets[document + 1] - plan.doc_shard_offsets[document];
  return std::max<std::int64_t>(
      1, (num_shards + max_pieces_per_document - 1) / max_pieces_per_document);
}

/// Shards [begin, end) of a document's list, drawn as one where there are too many.
std::string piece_rect(const QkvPlan& plan, const std::vector<std::int32_t>& home,
                       std::int64_t longest, std::int64_t document, std::int64_t begin,
                       std::int64_t end, std::int64_t first_token, std::int64_t tokens) {
  const auto shard = plan.doc_shards[begin];
  const std::int32_t rank = plan.q_dst[shard];
  const std::int64_t place = begin - plan.doc_shard_offsets[document];
  std::string text =
      concat("<rect x=\"", percent(first_token, longest), "\" width=\"", percent(tokens, longest),
             "\" height=\"17\" fill=\"", rank_colour(rank, plan.world_size), "\"><title>document ",
             document, ", tokens ", format_count(first_token), "\u2013",
             format_count(first_token + tokens - 1));
  if (end - begin == 1) {
    text += concat(", shard ", place, "\nhome: rank ", home[shard], "\nattended by rank ", rank,
                   home[shard] == rank ? " (stays)" : "");
  } else {
    text += concat(", ", end - begin, " shards from ", place,
                   "; coloured as the first, attended by rank ", rank);
  }
  text += "</title></rect>\n";
  if (static_cast<double>(tokens) / static_cast<double>(longest) >= 0.025) {
    text += concat("<text x=\"", percent(first_token + tokens / 2, longest),
                   "\" y=\"12.5\" text-anchor=\"middle\">", rank, "</text>\n");
  }
  return text;
}

// The thin strip below: where the tokens live in the MLP layout.
std::string home_strip(const QkvPlan& plan, const std::vector<std::int32_t>& home,
                       std::int64_t longest, std::int64_t document) {
  std::string text;
  std::int64_t token = 0;
  std::int64_t run_begin = 0;
  const std::int64_t end = plan.doc_shard_offsets[document + 1];
  for (std::int64_t i = plan.doc_shard_offsets[document]; i < end; ++i) {
    const std::int32_t shard = plan.doc_shards[i];
    token += plan.shard_len[shard];
    const std::int32_t rank = home[shard];
    if (i + 1 < end && home[plan.doc_shards[i + 1]] == rank) continue;
    text += concat("<rect x=\"", percent(run_begin, longest), "\" y=\"19\" width=\"",
                   percent(token - run_begin, longest), "\" height=\"4\" fill=\"",
                   rank_colour(rank, plan.world_size), "\"><title>home of tokens ",
                   format_count(run_begin), "\u2013", format_count(token - 1), ": rank ", rank,
                   "</title></rect>\n");
    run_begin = token;
  }
  return text;
}

/// @param longest tokens of a bar of full width
std::string document_row(const QkvPlan& plan, const std::vector<std::int32_t>& home,
                         std::int64_t longest, const DocumentFigures& document) {
  std::string text = concat("<div class=\"doc\"><span class=\"name\">#", document.document,
                            "</span><span class=\"num\">", format_count(document.tokens),
                            "</span><svg role=\"img\" aria-label=\"document ", document.document,
                            " on ", document.num_attending_ranks, " ranks\">\n");
  const std::int64_t step = shards_per_piece(plan, document.document);
  const std::int64_t last = plan.doc_shard_offsets[document.document + 1];
  std::int64_t first_token = 0;
  for (std::int64_t begin = plan.doc_shard_offsets[document.document]; begin < last;
       begin += step) {
    const std::int64_t end = std::min(last, begin + step);
    std::int64_t tokens = 0;
    for (std::int64_t i = begin; i < end; ++i) tokens += plan.shard_len[plan.doc_shards[i]];
    if (tokens > 0) {
      text += piece_rect(plan, home, longest, document.document, begin, end, first_token, tokens);
    }
    first_token += tokens;
  }
  return text + home_strip(plan, home, longest, document.document) + "</svg></div>\n";
}

std::string colour_legend(std::int32_t world_size) {
  constexpr std::int32_t max_chips = 32;
  const std::int32_t shown = std::min(world_size, max_chips);
  std::string text = "<p class=\"chips\"><span>Rank</span>";
  for (std::int32_t i = 0; i < shown; ++i) {
    const auto rank = static_cast<std::int32_t>(std::int64_t{i} * world_size / shown);
    text += concat(
        "<svg class=\"chip\" viewBox=\"0 0 30 18\" aria-hidden=\"true\"><rect width=\"30\" "
        "height=\"18\" "
        "rx=\"4\" fill=\"",
        rank_colour(rank, world_size), "\"/><text x=\"15\" y=\"13\" text-anchor=\"middle\">", rank,
        "</text></svg>");
  }
  return text + "</p>\n";
}

}  // namespace

std::string documents_section(const QkvPlan& plan, std::int64_t max_documents) {
  std::vector<DocumentFigures> documents = document_figures(plan);
  std::stable_sort(documents.begin(), documents.end(),
                   [](const auto& a, const auto& b) { return a.tokens > b.tokens; });
  const std::vector<std::int32_t> home = homes_of(plan.rank_shard_offsets);

  std::string rows;
  std::int64_t num_shown = 0;
  std::int64_t num_pieces = 0;
  for (const DocumentFigures& document : documents) {
    if (num_shown == max_documents || document.tokens == 0) break;
    const std::int64_t step = shards_per_piece(plan, document.document);
    num_pieces += (document.num_shards + step - 1) / step;
    if (num_shown > 0 && num_pieces > max_pieces) break;
    rows += document_row(plan, home, documents.front().tokens, document);
    ++num_shown;
  }
  const std::int64_t num_left = std::ssize(documents) - num_shown;
  std::string text =
      "<section><h2>Where each document went</h2>\n<p class=\"note\">The longest documents, one "
      "per "
      "row, with their tokens. The pieces are query shards in the colour and with the number of "
      "the "
      "rank that attends to them; the thin strip below is the rank where the tokens live.</p>\n" +
      colour_legend(plan.world_size) + "<div class=\"docs\">\n" + rows + "</div>\n";
  if (num_left > 0) {
    text += concat("<p class=\"note\">",
                   format_plural(num_left, num_shown > 0 ? "shorter document" : "document"),
                   num_left == 1 ? " is" : " are", " not shown.</p>\n");
  }
  return text + "</section>\n";
}

}  // namespace waybill::detail
