#include "waybill/json/length_distribution_json.h"

#include <algorithm>
#include <utility>

#include "builtin_text.h"
#include "node.h"
#include "parts.h"
#include "waybill/core/error.h"
#include "waybill/json/file.h"
#include "writer.h"

namespace waybill {
namespace {

constexpr std::string_view format = "waybill.length_distributions";
constexpr std::string_view old_prefix = "dist_";  // of names in 0.1
constexpr std::int64_t most_docs = std::int64_t{1} << 53;

LengthDistribution::Bucket read_bucket(const detail::JsonNode& node) {
  node.check_keys({"lo", "hi", "docs", "mean_len"});
  LengthDistribution::Bucket bucket;
  bucket.lo = node.at("lo").integer(0, detail::longest_document);
  bucket.hi = node.at("hi").integer(bucket.lo + 1, detail::longest_document + 1);
  bucket.docs = node.at("docs").integer(0, most_docs);
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
    distribution.max_len = longest_doc->integer(0, detail::longest_document);
  }
  std::int64_t num_docs = 0;
  for (const detail::JsonNode& bucket : node.at("histogram").items()) {
    distribution.buckets.push_back(read_bucket(bucket));
    num_docs += distribution.buckets.back().docs;
    if (num_docs > most_docs) bucket.fail_text("the histogram counts more than 2^53 documents");
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
  detail::JsonWriter writer(style);
  writer.open_object().header(format).key("distributions").open_object();
  for (std::size_t i = 0; i < distributions.size(); ++i) {
    const auto same = [&](const LengthDistribution& d) { return d.name == distributions[i].name; };
    require(std::none_of(distributions.begin(),
                         distributions.begin() + static_cast<std::ptrdiff_t>(i), same),
            "to_json: distributions[", i, "].name = \"", distributions[i].name,
            "\", expected each name once");
    write_distribution(writer, distributions[i]);
  }
  writer.close().close();
  return std::move(writer).finish();
}

std::vector<LengthDistribution> length_distributions_from_json(std::string_view text,
                                                               std::string_view origin) {
  const detail::JsonValue value = detail::parse_json(text, origin);
  const detail::JsonNode root(value, origin);
  root.check_format(format);
  root.check_keys({"format", "version", "distributions"});
  std::vector<LengthDistribution> distributions;
  for (auto& [name, node] : root.at("distributions").members()) {
    distributions.push_back(read_distribution(name, node));
  }
  return distributions;
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

}  // namespace waybill
