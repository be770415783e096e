#include <algorithm>
#include <numeric>

#include "console.h"
#include "core/printable.h"
#include "corpus.h"
#include "job_options.h"
#include "numbers.h"
#include "report/format.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/json/lengths.h"
#include "waybill/routing/generators.h"

namespace waybill::cli {
namespace {

// Drawing more would take minutes and gigabytes before anything is shown.
constexpr std::int64_t most_drawn_tokens = std::int64_t{1} << 34;
constexpr std::int64_t default_tokens_per_rank = 65536;

const LengthDistribution& named_distribution(const std::string& name) {
  return name.empty() ? builtin_length_distributions().front() : length_distribution(name);
}

void draw(const SourceOptions& source, Documents& documents) {
  const LengthDistribution& distribution = named_distribution(source.distribution);
  const std::int64_t tokens_per_rank = documents.plan.tokens_per_rank;
  if (tokens_per_rank > most_drawn_tokens / documents.plan.world_size) {
    throw UsageError(concat("--tokens-per-rank: ", tokens_per_rank, " on ",
                            documents.plan.world_size, " ranks, expected at most ",
                            most_drawn_tokens, " tokens in all for drawn lengths"));
  }
  documents.lengths =
      sample_documents(distribution, tokens_per_rank * documents.plan.world_size, source.seed);
  documents.origin = concat(format_plural(std::ssize(documents.lengths), "document"),
                            " drawn from ", distribution.name, " (seed ", source.seed, ")");
}

void read(const std::string& path, Documents& documents) {
  documents.lengths = lengths_from_text(read_input(path), input_name(path));
  documents.origin =
      concat(format_plural(std::ssize(documents.lengths), "document"), " from ", input_name(path));
}

void count(const std::string& folder, Documents& documents) {
  Corpus corpus = read_corpus(folder);
  if (corpus.lengths.empty()) {
    throw IoError(concat(folder, ": no text with tokens (", corpus.num_binary, " binary, ",
                         corpus.num_empty, " empty, ", corpus.num_unreadable, " unreadable)"));
  }
  documents.origin = concat(format_plural(std::ssize(corpus.lengths), "text file"), " below ",
                            printable_line(folder), ", ", format_bytes(corpus.num_bytes));
  documents.remarks.push_back(concat("Files skipped: ", format_count(corpus.num_binary),
                                     " binary, ", format_count(corpus.num_empty), " empty, ",
                                     format_count(corpus.num_unreadable), " unreadable."));
  std::string rule = "Tokens: " + corpus_rule();
  std::replace(rule.begin(), rule.end(), '\n', ' ');
  documents.remarks.push_back(std::move(rule));
  documents.lengths = std::move(corpus.lengths);
}

std::int64_t sum_of(const std::vector<std::int64_t>& lengths) {
  std::int64_t total = 0;
  for (const std::int64_t length : lengths) {
    if (__builtin_add_overflow(total, length, &total))
      throw IoError("the document lengths sum to more than 2^63 - 1 tokens");
  }
  return total;
}

// Keeps the documents that fit, in order; the one across the end is cut. Tokens are left out only
// where the user says so.
void fit(Documents& documents, bool cut) {
  const std::int64_t ranks = documents.plan.world_size;
  const std::int64_t capacity = documents.plan.tokens_per_rank * ranks;
  const std::int64_t total = sum_of(documents.lengths);
  std::int64_t room = capacity;
  std::size_t kept = 0;
  std::int64_t num_cut = 0;
  for (; kept < documents.lengths.size() && room > 0; ++kept) {
    std::int64_t& length = documents.lengths[kept];
    if (length > room) num_cut = length - room;
    length = std::min(length, room);
    room -= length;
  }
  const auto num_left_out = std::ssize(documents.lengths) - static_cast<std::int64_t>(kept);
  documents.lengths.resize(kept);
  if (total > capacity) {
    const std::string whole = format_plural(num_left_out, "whole document") + " among them";
    if (!cut) {
      throw UsageError(concat("--tokens-per-rank: ", format_count(documents.plan.tokens_per_rank),
                              " on ", format_plural(ranks, "rank"), " has room for ",
                              format_count(capacity), " of ", format_plural(total, "token"), ": ",
                              format_count(total - capacity), " would be left out, ", whole,
                              "; pass at least ", total / ranks + (total % ranks != 0),
                              ", auto, or --cut where that is meant"));
    }
    documents.origin +=
        concat(", cut to ", format_count(capacity), " of ", format_count(total), " tokens");
    documents.remarks.push_back(concat(
        "The ranks are full: ", format_count(total - capacity), " of ",
        format_plural(total, "token"), " are left out, ", whole,
        num_cut > 0 ? concat("; the last one kept is cut by ", format_count(num_cut)) : "", "."));
  }
  if (room > 0) {
    documents.remarks.push_back(concat("The documents leave ", format_count(room), " of ",
                                       format_count(capacity), " rows empty on the last ranks."));
  }
}

std::int64_t decide_tokens_per_rank(const SourceOptions& source, const PlanningOptions& planning,
                                    const std::vector<std::int64_t>& lengths) {
  const std::optional<std::int64_t> number = parse_number(planning.tokens_per_rank);
  if (number) return *number;
  if (source.is_drawn()) {
    if (planning.tokens_per_rank == "auto")
      throw UsageError("--tokens-per-rank: auto needs --lengths or --corpus");
    return default_tokens_per_rank;
  }
  const std::int64_t total = sum_of(lengths);
  return std::max<std::int64_t>(
      1, total / planning.world_size + (total % planning.world_size == 0 ? 0 : 1));
}

}  // namespace

std::string corpus_rule() {
  return "a token is a run of letters and digits or one other visible\ncharacter; Chinese, "
         "Japanese and Korean characters count one each. What is not\nUTF-8 text is skipped, as "
         "are "
         "links and names that begin with a dot.";
}

Documents load_documents(const SourceOptions& source, const PlanningOptions& planning,
                         const RowOptions& rows) {
  Documents documents;
  documents.plan.world_size = planning.world_size;
  documents.plan.model = {
      .q_hidden = rows.q_hidden, .kv_hidden = rows.kv_hidden, .dtype = dtype_from_name(rows.dtype)};
  documents.plan.mask = {.window = planning.window,
                         .kind = mask_from_name("--mask", planning.mask)};
  documents.plan.max_tokens_per_rank = planning.max_tokens;
  documents.plan.imbalance_target = planning.imbalance;
  documents.plan.hardware.ranks_per_node = planning.ranks_per_node;
  if (rows.gb_per_s > 0) documents.plan.hardware.nvlink_bytes_per_second = rows.gb_per_s * 1e9;
  documents.plan.kv_layout = kv_layout_from_name("--kv-layout", planning.kv_layout);
  if (!source.lengths_path.empty()) read(source.lengths_path, documents);
  if (!source.corpus_path.empty()) count(source.corpus_path, documents);
  documents.plan.tokens_per_rank = decide_tokens_per_rank(source, planning, documents.lengths);
  if (source.is_drawn()) {
    draw(source, documents);
  } else {
    constexpr std::int64_t most_tokens = std::int64_t{1} << 40;
    require(documents.plan.tokens_per_rank <= most_tokens / planning.world_size,
            "tokens per rank = ", documents.plan.tokens_per_rank, " on ", planning.world_size,
            " ranks, expected at most 2^40 tokens in all");
    fit(documents, planning.cut);
  }
  return documents;
}

}  // namespace waybill::cli
