#include "waybill/json/length_distribution_json.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <utility>

#include "json/text.h"
#include "waybill/core/error.h"
#include "waybill/json/file.h"

namespace waybill {
namespace detail {
/// data/doclen_distributions.json; the build generates the definition from the file.
[[nodiscard]] std::string_view builtin_length_distributions_text();
}  // namespace detail

namespace {

constexpr std::int64_t longest_document = std::int64_t{1} << 40;  ///< tokens

constexpr std::string_view format = "waybill.length_distributions";
constexpr std::string_view old_prefix = "dist_";  // names in 0.1 begin with it
constexpr std::int64_t max_docs = std::int64_t{1} << 53;

LengthDistribution::Bucket read_bucket(const detail::JsonNode& node) {
  node.check_keys({"lo", "hi", "docs", "mean_len"});
  LengthDistribution::Bucket bucket;
  bucket.lo = node.at("lo").integer(0, longest_document);
  bucket.hi = node.at("hi").integer(bucket.lo + 1, longest_document + 1);
  bucket.docs = node.at("docs").integer(0, max_docs);
  if (const auto mean = node.find("mean_len")) {
    bucket.mean_len = mean->real();
    const bool inside = static_cast<double>(bucket.lo) <= bucket.mean_len &&
                        bucket.mean_len < static_cast<double>(bucket.hi);
    if (!inside) mean->fail(concat(bucket.lo, " up to below ", bucket.hi, ", as lo and hi"));
  }
  return bucket;
}

LengthDistribution read_distribution(std::string name, const detail::JsonNode& node) {
  node.check_keys({"what", "source", "n_docs", "min", "max", "mean", "percentiles_by_doc",
                   "percentiles_by_token", "histogram"});
  LengthDistribution distribution;
  distribution.name = std::move(name);
  if (const auto source = node.find("source")) distribution.source = source->string();
  if (const auto longest_doc = node.find("max")) {
    distribution.max_len = longest_doc->integer(0, longest_document);
  }
  std::int64_t num_docs = 0;
  for (const detail::JsonNode& bucket : node.at("histogram").items()) {
    distribution.buckets.push_back(read_bucket(bucket));
    num_docs += distribution.buckets.back().docs;
    if (num_docs > max_docs) bucket.fail_text("the histogram counts more than 2^53 documents");
  }
  if (const auto given = node.find("n_docs"); given && given->integer() != num_docs) {
    given->fail(concat(num_docs, ", the sum of the histogram"));
  }
  detail::check_at(node, [&] { distribution.check(); });
  return distribution;
}

void write_distribution(detail::JsonWriter& writer, const LengthDistribution& distribution) {
  writer.key(distribution.name).open_object();
  writer.key("source").string(distribution.source);
  if (distribution.max_len != 0) writer.key("max").integer(distribution.max_len);
  writer.key("histogram").open_list();
  for (const LengthDistribution::Bucket& bucket : distribution.buckets) {
    writer.open_object(true);
    writer.key("lo").integer(bucket.lo).key("hi").integer(bucket.hi);
    writer.key("docs").integer(bucket.docs);
    if (bucket.mean_len != 0) writer.key("mean_len").real(bucket.mean_len);
    writer.close();
  }
  writer.close().close();
}

}  // namespace

std::string to_json(const std::vector<LengthDistribution>& distributions, JsonStyle style) {
  return detail::write_document(style, format, [&](detail::JsonWriter& writer) {
    writer.key("distributions").open_object();
    for (std::size_t i = 0; i < distributions.size(); ++i) {
      const auto same = [&](const LengthDistribution& d) {
        return d.name == distributions[i].name;
      };
      require(std::none_of(distributions.begin(),
                           distributions.begin() + static_cast<std::ptrdiff_t>(i), same),
              "to_json: distributions[", i, "].name = \"", distributions[i].name,
              "\", expected each name once");
      write_distribution(writer, distributions[i]);
    }
    writer.close();
  });
}

std::vector<LengthDistribution> length_distributions_from_json(std::string_view text,
                                                               std::string_view origin) {
  return detail::read_document(text, origin, format, [](const detail::JsonNode& root) {
    root.check_keys({"format", "version", "distributions"});
    std::vector<LengthDistribution> distributions;
    for (auto& [name, node] : root.at("distributions").members()) {
      distributions.push_back(read_distribution(name, node));
    }
    return distributions;
  });
}

std::vector<LengthDistribution> read_length_distributions(const std::filesystem::path& path) {
  return length_distributions_from_json(read_file(path), path.string());
}

const std::vector<LengthDistribution>& builtin_length_distributions() {
  static const std::vector<LengthDistribution> distributions = length_distributions_from_json(
      detail::builtin_length_distributions_text(), "built-in length distributions");
  return distributions;
}

const LengthDistribution& length_distribution(std::string_view name) {
  std::string names;
  for (const LengthDistribution& distribution : builtin_length_distributions()) {
    if (distribution.name == name || concat(old_prefix, distribution.name) == name) {
      return distribution;
    }
    names += concat(names.empty() ? "" : ", ", distribution.name);
  }
  throw_invalid("length_distribution: name = \"", detail::excerpt(name), "\", expected one of ",
                names);
}

namespace {

constexpr std::string_view expected = "a document length in tokens, 1..2^40";
constexpr std::string_view separators = " \t\r,\v\f";

std::int64_t length_from_word(std::string_view word, std::int64_t line, std::string_view origin) {
  std::int64_t length = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), length);
  if (error != std::errc{} || end != word.data() + word.size() || length < 1 ||
      length > longest_document) {
    throw IoError(
        concat(origin, ": line ", line, ": \"", detail::excerpt(word), "\", expected ", expected));
  }
  return length;
}

void add_line(std::string_view text, std::int64_t line, std::string_view origin,
              std::vector<std::int64_t>& lengths) {
  text = text.substr(0, text.find('#'));
  for (std::size_t at = text.find_first_not_of(separators); at != std::string_view::npos;) {
    const std::size_t end = text.find_first_of(separators, at);
    lengths.push_back(length_from_word(text.substr(at, end - at), line, origin));
    at = text.find_first_not_of(separators, end);
  }
}

std::vector<std::int64_t> lengths_from_json(std::string_view text, std::string_view origin) {
  std::vector<std::int64_t> lengths = detail::read_document(
      text, origin, "", [](const detail::JsonNode& root) { return root.integers(); });
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (1 <= lengths[i] && lengths[i] <= longest_document) continue;
    throw IoError(concat(origin, ": /", i, " = ", lengths[i], ", expected ", expected));
  }
  return lengths;
}

std::vector<std::int64_t> lengths_from_lines(std::string_view text, std::string_view origin) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t line = 1; !text.empty(); ++line) {
    const std::size_t end = text.find('\n');
    add_line(text.substr(0, end), line, origin, lengths);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lengths;
}

}  // namespace

std::vector<std::int64_t> lengths_from_text(std::string_view text, std::string_view origin) {
  constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";
  if (text.starts_with(byte_order_mark)) text.remove_prefix(byte_order_mark.size());
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  const bool is_json = first != std::string_view::npos && text[first] == '[';
  std::vector<std::int64_t> lengths =
      is_json ? lengths_from_json(text, origin) : lengths_from_lines(text, origin);
  if (lengths.empty()) throw IoError(concat(origin, ": no lengths, expected at least one"));
  return lengths;
}

std::vector<std::int64_t> read_lengths(const std::filesystem::path& path) {
  return lengths_from_text(read_file(path), path.string());
}

}  // namespace waybill
