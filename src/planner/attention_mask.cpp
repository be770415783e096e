#include "waybill/planner/attention_mask.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/checks.h"
#include "routing/homes.h"
#include "waybill/core/error.h"

namespace waybill {

std::string_view to_string(MaskKind mask) {
  static constexpr std::array<std::string_view, 3> names = {"causal", "full", "prefix"};
  return names.at(static_cast<std::size_t>(mask));
}

MaskKind mask_from_name(const char* who, std::string_view name) {
  require(name == "causal" || name == "full" || name == "prefix", who, ": mask = \"", name,
          "\", expected \"causal\", \"full\" or \"prefix\"");
  if (name == "prefix") return MaskKind::prefix;
  return name == "full" ? MaskKind::full : MaskKind::causal;
}

std::string to_string(const AttentionMask& mask) {
  std::string text(to_string(mask.kind));
  if (mask.window > 0) text += concat(", window ", mask.window);
  if (mask.prefix > 0) text += concat(" of ", mask.prefix);
  if (mask.chunk > 0) text += concat(", chunks of ", mask.chunk);
  return text;
}

void AttentionMask::check(const char* who) const {
  constexpr std::int64_t max_tokens = std::int64_t{1} << 40;
  require(kind <= MaskKind::prefix, who, ": mask.kind = ", static_cast<int>(kind),
          ", expected causal, full or prefix");
  detail::check_range(who, "mask.window", window, 0, max_tokens);
  require(!is_full() || window == 0, who, ": mask.window = ", window,
          ", expected 0: the mask is full");
  const bool has_prefix = kind == MaskKind::prefix;
  require(!has_prefix || window == 0, who, ": mask.window = ", window,
          ", expected 0: the mask is prefix");
  require(!has_prefix || chunk == 0, who, ": mask.chunk = ", chunk,
          ", expected 0: the mask is prefix");
  require(0 <= prefix && prefix <= (has_prefix ? max_tokens : 0), who, ": mask.prefix = ", prefix,
          ", expected 0", has_prefix ? "..2^40" : ": the mask is not prefix");
  detail::check_range(who, "mask.chunk", chunk, 0, max_tokens);
}

TokenRange AttentionMask::keys_in_chunks(std::int64_t begin, std::int64_t end,
                                         std::int64_t doc_len) const {
  const std::int64_t first = begin / chunk * chunk;
  const std::int64_t last = std::max(begin, end - 1) / chunk * chunk;
  const AttentionMask inside = in_chunk();
  const std::int64_t first_len = std::min(chunk, doc_len - first);
  const std::int64_t last_len = std::min(chunk, doc_len - last);
  const std::int64_t at = begin - first;
  return {first + inside.keys(at, std::min(end - first, first_len), first_len).begin,
          last + inside.keys(0, end - last, last_len).end};
}

std::int64_t AttentionMask::pairs_in_chunks(std::int64_t end, std::int64_t doc_len) const {
  const std::int64_t whole = end / chunk;
  const std::int64_t rest = end - whole * chunk;
  const AttentionMask inside = in_chunk();
  std::int64_t pairs = rest == 0 ? 0 : inside.pairs(0, rest, std::min(chunk, doc_len - end + rest));
  if (whole > 0) pairs += whole * inside.pairs(0, chunk, chunk);
  return pairs;
}

namespace {

/// Tokens at the beginning of a document whose queries meet all keys of their range.
std::int64_t longest_prefix(const QkvPlan& plan) {
  std::int64_t longest = 0;
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    std::int64_t tokens = 0;
    for (const std::int32_t shard : detail::shards_of(plan, d)) {
      if (plan.is_causal(shard)) break;
      tokens += plan.shard_len[shard];
    }
    longest = std::max(longest, tokens);
  }
  return longest;
}

}  // namespace

AttentionMask AttentionMask::as_in(const QkvPlan& plan, const char* who) const {
  if (chunk > 0) {
    require(plan.num_shards() == 0 || is_full() != plan.kv_end.empty(), who,
            ": mask = ", to_string(*this), ", expected ", is_full() ? "causal" : "full",
            ", as the plan's ranges");
    return *this;
  }
  const bool whole = plan.needs_whole_documents();
  require(!is_full() || whole || plan.num_shards() == 0, who,
          ": mask = full, expected causal, as the plan's ranges");
  require(window == 0 || !whole, who, ": mask.window = ", window,
          ", expected 0: the plan needs whole documents");
  if (whole) return kind == MaskKind::prefix ? *this : AttentionMask{.kind = MaskKind::full};
  if (std::ranges::find(plan.kv_end, 0) == plan.kv_end.end()) return *this;
  require(window == 0, who, ": mask.window = ", window, ", expected 0: the plan has prefixes");
  return {.kind = MaskKind::prefix, .prefix = longest_prefix(plan)};
}

namespace {

/// Work of queries [begin, end) that each meet the keys up to themselves.
double work_of_ramp(double begin, double end, double row) {
  return (end - begin) * ((begin + end + 1) / 2 + row);
}

}  // namespace

// Keys per query grow by one until the window, so work is the area of a trapezoid. The work of a
// row besides its keys counts as if the document began so many rows earlier.
double AttentionMask::begin_for(double end, double work, std::int64_t doc_len, double row) const {
  const auto keys = static_cast<double>(window);
  if (is_full()) return std::max(0.0, end - work / (static_cast<double>(doc_len) + row));
  const auto ahead = static_cast<double>(std::min(prefix, doc_len));
  if (ahead > 0 && (end <= ahead || work > work_of_ramp(ahead, end, row))) {
    const double rest = end <= ahead ? work : work - work_of_ramp(ahead, end, row);
    return std::max(0.0, std::min(end, ahead) - rest / (ahead + row));
  }
  if (window > 0 && work <= (end - keys) * (keys + row)) return end - work / (keys + row);
  const double ramp_end = window > 0 ? std::min(end, keys) : end;
  const double left = work - (window > 0 ? (end - ramp_end) * (keys + row) : 0);
  const double square = ramp_end * (ramp_end + 1 + 2 * row) - 2 * left + row * row;
  return std::max(0.0, std::sqrt(std::max(0.0, square)) - row);
}

std::int64_t AttentionMask::end_for(std::int64_t begin, double work, std::int64_t doc_len,
                                    double row) const {
  if (is_full())
    return begin + static_cast<std::int64_t>(work / (static_cast<double>(doc_len) + row)) + 1;
  if (begin < prefix) {
    const std::int64_t length = std::min(prefix, doc_len);
    const double of_row = static_cast<double>(length) + row;
    const double flat = static_cast<double>(length - begin) * of_row;
    if (work <= flat) return begin + static_cast<std::int64_t>(work / of_row) + 1;
    return AttentionMask{}.end_for(length, work - flat, doc_len, row);
  }
  const double b = static_cast<double>(begin) + row;
  const double keys = static_cast<double>(window) + row;
  const auto on_ramp = [&] {
    return static_cast<std::int64_t>(std::sqrt(b * b + 2 * work) - row) + 1;
  };
  if (window == 0) return on_ramp();
  if (b >= keys) return begin + static_cast<std::int64_t>(work / keys) + 1;
  const double ramp = (keys * keys - b * b) / 2;
  if (work <= ramp) return on_ramp();
  return static_cast<std::int64_t>(keys - row + (work - ramp) / keys) + 1;
}

double AttentionMask::keys_of_parts(TokenRange queries, double num_parts,
                                    std::int64_t doc_len) const {
  const auto begin = static_cast<double>(queries.begin);
  const auto end = static_cast<double>(queries.end);
  const auto rows = static_cast<double>(keys(queries.begin, queries.end, doc_len).rows());
  if (is_full()) return rows * num_parts;
  if (window > 0) return rows + (num_parts - 1) * static_cast<double>(window - 1);
  if (num_parts <= 1) return rows;
  if (queries.begin < prefix) {
    const TokenRange first{queries.begin, std::min({queries.end, prefix, doc_len})};
    const double share = static_cast<double>(pairs(first.begin, first.end, doc_len)) /
                         static_cast<double>(pairs(queries.begin, queries.end, doc_len));
    const double of_first = static_cast<double>(first.end) * num_parts * share;
    if (first.end == queries.end) return of_first;
    const double parts = num_parts * (1 - share);
    return of_first + AttentionMask{}.keys_of_parts({first.end, queries.end}, parts, doc_len);
  }
  // The sum of the contexts of slabs with equal work: by its integral.
  return num_parts * 2.0 / 3.0 * (end * end + end * begin + begin * begin) / (end + begin) +
         (end - begin) / 2;
}

}  // namespace waybill
