#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "core/printable.h"
#include "plans.h"
#include "report/format.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/routing/generators.h"

namespace waybill::cli {
namespace {

namespace fs = std::filesystem;

bool is_space(std::uint32_t c) {
  return c == ' ' || (c >= '\t' && c <= '\r') || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200B) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000 || c == 0xFEFF;
}

bool is_control(std::uint32_t c) { return c < 0x20 || c == 0x7F; }

// Scripts that are written without spaces.
bool stands_alone(std::uint32_t c) {
  return (c >= 0x2E80 && c <= 0xA4CF) || (c >= 0xAC00 && c <= 0xD7A3) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0xFF00 && c <= 0xFFEF) ||
         (c >= 0x20000 && c <= 0x3FFFF);
}

bool is_word(std::uint32_t c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
         (c >= 0x80 && !stands_alone(c));
}

/// Counts the tokens of a text, and its bytes. The rule: a token is a run of letters and digits, or
/// one other visible character; white space separates. Letters are those of ASCII and all code
/// points from U+0080 on, except that Chinese, Japanese and Korean characters are a token each.
/// Bytes that are no UTF-8, or control characters other than white space, are no text.
/// @return none for what is no text, of which no more is read than that takes
std::optional<std::int64_t> count_tokens(std::istream& file, std::int64_t& num_bytes) {
  constexpr std::size_t max_code_point_bytes = 4;
  std::int64_t num_tokens = 0;
  bool was_word = false;
  std::array<char, 65536> buffer{};
  std::size_t begun = 0;  // bytes of a code point whose end was not read yet
  while (file) {
    file.read(buffer.data() + begun, static_cast<std::streamsize>(buffer.size() - begun));
    num_bytes += file.gcount();
    std::string_view text(buffer.data(), begun + static_cast<std::size_t>(file.gcount()));
    while (text.size() >= max_code_point_bytes || (!file && !text.empty())) {
      const auto lead = static_cast<unsigned char>(text.front());
      const auto [c, length] =
          lead < 0x80 ? detail::CodePoint{lead, 1} : detail::first_code_point(text);
      if (length == 0) return std::nullopt;
      text.remove_prefix(length);
      const bool in_word = is_word(c) && !is_space(c);
      if (!is_space(c)) {
        if (is_control(c)) return std::nullopt;
        if (!in_word || !was_word) ++num_tokens;
      }
      was_word = in_word;
    }
    begun = text.copy(buffer.data(), text.size());
  }
  return num_tokens;
}

std::vector<fs::path> files_below(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error))
    throw IoError(concat(folder.string(), ": ", error ? error.message() : "is no folder"));
  std::vector<fs::path> files;
  const auto options = fs::directory_options::skip_permission_denied;
  fs::recursive_directory_iterator entry(folder, options, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    const bool hidden = entry->path().filename().string().starts_with('.');
    std::error_code ignored;
    if (hidden) {
      entry.disable_recursion_pending();
    } else if (entry->is_regular_file(ignored) && !entry->is_symlink(ignored)) {
      files.push_back(entry->path());
    }
  }
  if (error) throw IoError(concat(folder.string(), ": cannot list: ", error.message()));
  std::sort(files.begin(), files.end());
  return files;
}

constexpr std::int64_t max_drawn_tokens = std::int64_t{1} << 34;
constexpr std::int64_t default_tokens_per_rank = 65536;
constexpr std::int64_t max_total_tokens = std::int64_t{1} << 40;

const LengthDistribution& named_distribution(const std::string& name) {
  return name.empty() ? builtin_length_distributions().front() : length_distribution(name);
}

void draw(const Options& options, Documents& documents) {
  const LengthDistribution& distribution = named_distribution(options.distribution);
  const std::int64_t tokens_per_rank = documents.plan.tokens_per_rank;
  if (tokens_per_rank > max_drawn_tokens / documents.plan.world_size) {
    throw UsageError(concat("--tokens-per-rank: ", tokens_per_rank, " on ",
                            documents.plan.world_size, " ranks, expected at most ",
                            max_drawn_tokens, " tokens in all for drawn lengths"));
  }
  documents.lengths =
      sample_documents(distribution, tokens_per_rank * documents.plan.world_size, options.seed);
  documents.origin = concat(format_plural(std::ssize(documents.lengths), "document"),
                            " drawn from ", distribution.name, " (seed ", options.seed, ")");
}

void read(const std::string& path, Documents& documents) {
  documents.lengths = lengths_from_text(read_input(path), input_name(path));
  documents.origin =
      concat(format_plural(std::ssize(documents.lengths), "document"), " from ", input_name(path));
}

/// Counts every regular file below the folder. Links and names that begin with a dot are passed
/// over.
/// @throws IoError when it is no folder, cannot be read, or has no text with tokens
void count(const std::string& folder, Documents& documents) {
  std::int64_t num_bytes = 0;
  std::int64_t num_empty = 0;
  std::int64_t num_binary = 0;
  std::int64_t num_unreadable = 0;
  for (const fs::path& path : files_below(folder)) {
    std::ifstream file(path, std::ios::binary);
    std::int64_t file_bytes = 0;
    const std::optional<std::int64_t> num_tokens = count_tokens(file, file_bytes);
    if (!file.is_open() || file.bad()) {
      ++num_unreadable;
    } else if (!num_tokens) {
      ++num_binary;
    } else if (*num_tokens == 0) {
      ++num_empty;
    } else {
      documents.lengths.push_back(*num_tokens);
      num_bytes += file_bytes;
    }
  }
  if (documents.lengths.empty()) {
    throw IoError(concat(folder, ": no text with tokens (", num_binary, " binary, ", num_empty,
                         " empty, ", num_unreadable, " unreadable)"));
  }
  documents.origin = concat(format_plural(std::ssize(documents.lengths), "text file"), " below ",
                            printable_line(folder), ", ", format_bytes(num_bytes));
  documents.remarks.push_back(concat("Files skipped: ", format_count(num_binary), " binary, ",
                                     format_count(num_empty), " empty, ",
                                     format_count(num_unreadable), " unreadable."));
  std::string rule = "Tokens: " + corpus_rule();
  std::replace(rule.begin(), rule.end(), '\n', ' ');
  documents.remarks.push_back(std::move(rule));
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
// where the user asks for it.
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

std::int64_t decide_tokens_per_rank(const Options& options,
                                    const std::vector<std::int64_t>& lengths) {
  const std::optional<std::int64_t> number = parse_number(options.tokens_per_rank);
  if (number) return *number;
  if (options.is_drawn()) {
    if (options.tokens_per_rank == "auto")
      throw UsageError("--tokens-per-rank: auto needs --lengths or --corpus");
    return default_tokens_per_rank;
  }
  const std::int64_t total = sum_of(lengths);
  return std::max<std::int64_t>(
      1, total / options.world_size + (total % options.world_size == 0 ? 0 : 1));
}

}  // namespace

std::string corpus_rule() {
  return "a token is a run of letters and digits or one other visible\ncharacter; Chinese, "
         "Japanese and Korean characters count one each. What is not\nUTF-8 text is skipped, as "
         "are links and names that begin with a dot.";
}

Documents load_documents(const Options& options) {
  Documents documents;
  documents.plan.world_size = options.world_size;
  documents.plan.model = {.q_hidden = options.q_hidden,
                          .kv_hidden = options.kv_hidden,
                          .dtype = dtype_from_name(options.dtype)};
  documents.plan.mask = {.window = options.window,
                         .kind = mask_from_name("--mask", options.mask),
                         .chunk = options.chunk,
                         .prefix = options.prefix};
  documents.plan.max_tokens_per_rank = options.max_tokens;
  documents.plan.imbalance_target = options.imbalance;
  documents.plan.hardware.ranks_per_node = options.ranks_per_node;
  if (options.gb_per_s > 0)
    documents.plan.hardware.nvlink_bytes_per_second = options.gb_per_s * 1e9;
  documents.plan.kv_layout = kv_layout_from_name("--kv-layout", options.kv_layout);
  if (!options.lengths_path.empty()) read(options.lengths_path, documents);
  if (!options.corpus_path.empty()) count(options.corpus_path, documents);
  documents.plan.tokens_per_rank = decide_tokens_per_rank(options, documents.lengths);
  if (options.is_drawn()) {
    draw(options, documents);
  } else {
    require(documents.plan.tokens_per_rank <= max_total_tokens / options.world_size,
            "tokens per rank = ", documents.plan.tokens_per_rank, " on ", options.world_size,
            " ranks, expected at most 2^40 tokens in all");
    fit(documents, options.cut);
  }
  documents.plan.hardware = options.facts(documents.plan.hardware);
  return documents;
}

}  // namespace waybill::cli
