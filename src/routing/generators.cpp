#include "waybill/routing/generators.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "core/checks.h"
#include "dense_checks.h"
#include "waybill/core/error.h"
#include "waybill/core/random.h"
#include "waybill/core/topology.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill {
namespace {

/// A plan without shards, to which they are appended in the global order.
QkvPlan empty_plan(std::int64_t world_size) {
  QkvPlan plan;
  plan.world_size = static_cast<std::int32_t>(world_size);
  plan.kv_layout = KvLayout::per_query;
  plan.rank_shard_offsets = {0};
  plan.doc_shard_offsets = {0};
  return plan;
}

/// Appends a shard to the current rank and the current document.
void add_shard(QkvPlan& plan, std::int64_t num_tokens, std::int64_t q_dst) {
  plan.doc_shards.push_back(static_cast<std::int32_t>(plan.shard_len.size()));
  plan.shard_len.push_back(num_tokens);
  plan.q_dst.push_back(static_cast<std::int32_t>(q_dst));
}

/// Uniform in [lo, mean) or [mean, hi), in the proportion that gives the mean of the bucket.
std::int64_t draw(const LengthDistribution::Bucket& bucket, Random& random) {
  const auto lo = static_cast<double>(std::max<std::int64_t>(bucket.lo, 1));
  const auto hi = static_cast<double>(bucket.hi);
  const bool known = lo < bucket.mean_len && bucket.mean_len < hi;
  const double mean = known ? bucket.mean_len : (lo + hi) / 2;
  const bool upper = random.uniform_double() * (hi - lo) < mean - lo;
  const double low = upper ? mean : lo;
  const double high = upper ? hi : mean;
  const auto value =
      static_cast<std::int64_t>(std::round(low + random.uniform_double() * (high - low)));
  const std::int64_t shortest = std::max<std::int64_t>(bucket.lo, 1);
  return std::clamp(value, shortest, std::max(bucket.hi - 1, shortest));
}

}  // namespace

void LengthDistribution::check() const {
  require(!buckets.empty(), "LengthDistribution ", name, ": no buckets, expected at least one");
  std::int64_t total = 0;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const Bucket& bucket = buckets[i];
    require(0 <= bucket.lo && bucket.lo < bucket.hi && bucket.hi <= (std::int64_t{1} << 40),
            "LengthDistribution ", name, ": bucket ", i, " is [", bucket.lo, ", ", bucket.hi,
            "), expected 0 <= lo < hi <= 2^40");
    require(0 <= bucket.docs && bucket.docs <= (std::int64_t{1} << 40) - total,
            "LengthDistribution ", name, ": bucket ", i, " has docs = ", bucket.docs,
            ", expected >= 0 and at most 2^40 in all");
    const auto lo = static_cast<double>(bucket.lo);
    const auto hi = static_cast<double>(bucket.hi);
    require(bucket.mean_len == 0 || (lo <= bucket.mean_len && bucket.mean_len < hi),
            "LengthDistribution ", name, ": bucket ", i, " has mean_len = ", bucket.mean_len,
            ", expected ", bucket.lo, " <= mean_len < ", bucket.hi, ", or 0");
    total += bucket.docs;
  }
  require(total > 0, "LengthDistribution ", name, ": no documents in any bucket");
}

std::vector<std::int64_t> sample_documents(const LengthDistribution& distribution,
                                           std::int64_t num_tokens, std::uint64_t seed) {
  distribution.check();
  require(0 <= num_tokens && num_tokens <= (std::int64_t{1} << 40),
          "sample_documents: num_tokens = ", num_tokens, ", expected 0..2^40");
  std::vector<std::int64_t> upto;  // documents in the buckets so far
  std::int64_t total = 0;
  for (const auto& bucket : distribution.buckets) upto.push_back(total += bucket.docs);
  Random random(seed);
  std::vector<std::int64_t> lengths;
  for (std::int64_t left = num_tokens; left > 0; left -= lengths.back()) {
    const auto place = std::upper_bound(upto.begin(), upto.end(), random.below(total));
    const auto& bucket = distribution.buckets[place - upto.begin()];
    std::int64_t length = draw(bucket, random);
    if (distribution.max_len > 0) length = std::min(length, distribution.max_len);
    lengths.push_back(std::min(length, left));
  }
  return lengths;
}

namespace {

constexpr const char* in_gen_seq_lens = "gen_seq_lens";

/// Rows above `level`, over all lengths.
std::int64_t rows_above(std::span<const std::int64_t> lens, std::int64_t level) {
  std::int64_t rows = 0;
  for (const std::int64_t len : lens) rows += std::max<std::int64_t>(len - level, 0);
  return rows;
}

/// Raises every length to `minimum` with rows of the longest: as if taken one at a time, always
/// from the longest, of several from the first.
void fill_up(std::span<std::int64_t> lens, std::int64_t minimum) {
  std::int64_t missing = 0;
  for (std::int64_t& len : lens) {
    if (len < minimum) missing += minimum - std::exchange(len, minimum);
  }
  if (missing == 0) return;
  // The lowest level to which all longer ones can be cut; the first few then give one row more.
  std::int64_t level = *std::max_element(lens.begin(), lens.end());
  for (std::int64_t low = minimum; low < level;) {
    const std::int64_t middle = low + (level - low) / 2;
    if (rows_above(lens, middle) <= missing) {
      level = middle;
    } else {
      low = middle + 1;
    }
  }
  missing -= rows_above(lens, level);
  for (std::int64_t& len : lens) {
    if (len < level) continue;
    len = level - (missing > 0 ? 1 : 0);
    missing -= missing > 0 ? 1 : 0;
  }
}

/// Round half to even, whatever rounding mode the caller has set.
std::int64_t round_half_even(double value) {
  const double below = std::floor(value);
  const double rest = value - below;
  const auto whole = static_cast<std::int64_t>(below);
  if (rest != 0.5) return rest < 0.5 ? whole : whole + 1;
  return whole % 2 == 0 ? whole : whole + 1;
}

void check_extents(const char* who, std::int64_t world_size, std::int64_t num_seqs) {
  detail::check_range(who, "world_size", world_size, 1, max_world_size);
  require(1 <= num_seqs && num_seqs <= std::numeric_limits<std::int32_t>::max() / world_size, who,
          ": num_seqs = ", num_seqs, ", expected 1..2^31 / world_size");
}

void row_lens(std::span<const float> uniforms, std::int64_t total_len, std::int64_t min_len,
              std::span<std::int64_t> lens) {
  const auto count = static_cast<double>(lens.size());
  double sum = 0;
  for (const float u : uniforms) sum += static_cast<double>(u) + 0.25 / count;
  std::int64_t given = 0;
  for (std::size_t i = 0; i + 1 < lens.size(); ++i) {
    const double share = (static_cast<double>(uniforms[i]) + 0.25 / count) / sum;
    lens[i] = round_half_even(share * static_cast<double>(total_len));
    given += lens[i];
  }
  lens.back() = total_len - given;
  fill_up(lens, std::min(min_len, total_len / std::ssize(lens)));
}

}  // namespace

IndexArray gen_seq_lens(std::int64_t world_size, std::int64_t num_seqs, std::int64_t total_len,
                        std::span<const float> uniforms, std::int64_t min_len) {
  check_extents(in_gen_seq_lens, world_size, num_seqs);
  require(0 <= total_len && total_len <= std::numeric_limits<std::int32_t>::max(), in_gen_seq_lens,
          ": total_len = ", total_len, ", expected 0..2^31 - 1");
  require(min_len >= 0, in_gen_seq_lens, ": min_len = ", min_len, ", expected >= 0");
  require(std::ssize(uniforms) == world_size * num_seqs, in_gen_seq_lens, ": uniforms has ",
          uniforms.size(), " values, expected ", world_size * num_seqs, " (world_size x num_seqs)");
  for (std::size_t i = 0; i < uniforms.size(); ++i) {
    require(0 <= uniforms[i] && uniforms[i] < 1, in_gen_seq_lens, ": uniforms[", i,
            "] = ", uniforms[i], ", expected 0 <= u < 1");
  }
  IndexArray lens({world_size, num_seqs});
  const auto columns = static_cast<std::size_t>(num_seqs);
  for (std::size_t w = 0; w < static_cast<std::size_t>(world_size); ++w) {
    row_lens(uniforms.subspan(w * columns, columns), total_len, min_len,
             lens.i64().subspan(w * columns, columns));
  }
  return lens.to(DType::int32, "seq_lens");
}

IndexArray gen_seq_lens(std::int64_t world_size, std::int64_t num_seqs, std::int64_t total_len,
                        std::uint64_t seed, std::int64_t min_len) {
  check_extents(in_gen_seq_lens, world_size, num_seqs);
  Random random(seed);
  std::vector<float> uniforms(static_cast<std::size_t>(world_size * num_seqs));
  for (float& u : uniforms) u = random.uniform_float();
  return gen_seq_lens(world_size, num_seqs, total_len, uniforms, min_len);
}

namespace {

void check_arguments(const char* who, std::int64_t world_size, std::int64_t total_seq_len,
                     std::int64_t num_seqs, std::int64_t max_cp_degree) {
  check_extents(who, world_size, num_seqs);
  require(1 <= max_cp_degree && max_cp_degree <= world_size, who,
          ": max_cp_degree = ", max_cp_degree, ", expected 1..world_size = ", world_size,
          ": the shards of a sequence go to different ranks");
  require(total_seq_len >= 0 && total_seq_len % max_cp_degree == 0, who,
          ": total_seq_len = ", total_seq_len,
          ", expected a multiple of max_cp_degree = ", max_cp_degree);
  constexpr std::int64_t most =
      std::numeric_limits<std::int32_t>::max();  // as gen_seq_lens takes it
  require(total_seq_len / max_cp_degree <= most, who, ": total_seq_len = ", total_seq_len,
          ", expected at most (2^31 - 1) * max_cp_degree");
}

/// Cuts a sequence into `destinations.size()` shards, equal to one row, longer ones first.
void add_sequence(QkvPlan& plan, std::int64_t num_tokens,
                  const std::vector<std::int32_t>& destinations) {
  const std::int64_t cp = std::ssize(destinations);
  for (std::int64_t s = 0; s < cp; ++s) {
    add_shard(plan, num_tokens / cp + (s < num_tokens % cp ? 1 : 0), destinations[s]);
  }
  plan.doc_shard_offsets.push_back(plan.num_shards());
}

RawQkvDispatchWithLens with_raw_form(QkvPlan plan, std::int64_t max_cp_degree,
                                     IndexArray seq_lens) {
  RawQkvDispatchWithLens result;
  result.plan = std::move(plan);
  result.raw = to_raw_dispatch(result.plan, max_cp_degree);
  result.seq_lens = std::move(seq_lens);
  return result;
}

QkvDispatch with_metadata(RawQkvDispatchWithLens made, bool return_intermediate) {
  const RawQkvDispatch& raw = made.raw;
  E2eMetadata metadata = compute_e2e_metadata(raw.cp_seq_lens, raw.num_cp_shards, raw.cp_query_dst,
                                              raw.kv, return_intermediate);
  return {std::move(metadata), std::move(made.raw), std::move(made.seq_lens), std::move(made.plan)};
}

/// A random plan for the function `who`.
RawQkvDispatchWithLens random_dispatch(const char* who, std::int64_t world_size,
                                       std::int64_t total_seq_len, std::int64_t num_seqs,
                                       std::int64_t max_cp_degree, std::uint64_t seed) {
  check_arguments(who, world_size, total_seq_len, num_seqs, max_cp_degree);
  Random random(seed);
  IndexArray seq_lens =
      gen_seq_lens(world_size, num_seqs, total_seq_len / max_cp_degree, random.bits())
          .to(DType::int64);
  for (std::int64_t& len : seq_lens.i64()) len *= max_cp_degree;

  const auto num_degrees =
      static_cast<std::int64_t>(std::bit_width(static_cast<std::uint64_t>(max_cp_degree)));
  QkvPlan plan = empty_plan(world_size);
  std::size_t next = 0;
  for (std::int64_t w = 0; w < world_size; ++w) {
    for (std::int64_t i = 0; i < num_seqs; ++i) {
      const auto cp = static_cast<std::int32_t>(std::int64_t{1} << random.below(num_degrees));
      add_sequence(plan, seq_lens.i64()[next++],
                   random.permutation(static_cast<std::int32_t>(world_size), cp));
    }
    plan.rank_shard_offsets.push_back(plan.num_shards());
  }
  return with_raw_form(std::move(plan), max_cp_degree, std::move(seq_lens));
}

}  // namespace

RawQkvDispatchWithLens create_raw_qkv_dispatch(std::int64_t world_size, std::int64_t total_seq_len,
                                               std::int64_t num_seqs, std::int64_t max_cp_degree,
                                               std::uint64_t seed) {
  return random_dispatch("create_raw_qkv_dispatch", world_size, total_seq_len, num_seqs,
                         max_cp_degree, seed);
}

RawQkvDispatchWithLens create_raw_qkv_dispatch(const IndexArray& seq_lens, const IndexArray& cp_num,
                                               const IndexArray& cp_dst) {
  const char* who = "create_raw_qkv_dispatch";
  const detail::Int64Table lens(who, "seq_lens", seq_lens);
  const detail::Int64Table degrees(who, "cp_num", cp_num);
  const detail::Int64Table ranks(who, "cp_dst", cp_dst);
  const auto [world_size, num_seqs] = detail::check_world_matrix(who, "seq_lens", *lens);
  require(ranks->ndim() == 3, who, ": cp_dst has shape ", to_string(ranks->shape()),
          ", expected [W, n, C]");
  const std::int64_t slots = ranks->dim(2);
  detail::check_same_shape(who, "cp_num", *degrees, lens->shape());
  detail::check_same_shape(who, "cp_dst", *ranks, {world_size, num_seqs, slots});
  detail::check_lengths(who, "seq_lens", *lens);
  QkvPlan plan = empty_plan(world_size);
  for (std::int64_t w = 0; w < world_size; ++w) {
    for (std::int64_t i = 0; i < num_seqs; ++i) {
      const std::int64_t cp = degrees->at({w, i});
      require(1 <= cp && cp <= slots, who, ": cp_num of rank ", w, ", sequence ", i, " = ", cp,
              ", expected 1..", slots);
      std::vector<std::int32_t> destinations;
      for (std::int64_t c = 0; c < cp; ++c) {
        const std::int64_t dst = ranks->at({w, i, c});
        require(0 <= dst && dst < world_size, who, ": cp_dst of rank ", w, ", sequence ", i,
                ", shard ", c, " = ", dst, ", expected 0..", world_size - 1);
        destinations.push_back(static_cast<std::int32_t>(dst));
      }
      add_sequence(plan, lens->at({w, i}), destinations);
    }
    plan.rank_shard_offsets.push_back(plan.num_shards());
  }
  return with_raw_form(std::move(plan), std::max<std::int64_t>(slots, 1), *lens);
}

QkvDispatch create_qkv_dispatch(std::int64_t world_size, std::int64_t total_seq_len,
                                std::int64_t num_seqs, std::int64_t max_cp_degree,
                                std::uint64_t seed, bool return_intermediate) {
  return with_metadata(random_dispatch("create_qkv_dispatch", world_size, total_seq_len, num_seqs,
                                       max_cp_degree, seed),
                       return_intermediate);
}

namespace {

constexpr const char* in_custom_mapping = "create_qkv_dispatch_with_custom_mapping";

/// A sequence of `len` rows in the first `cp` of its shards. @param place names it in errors
void check_sequence(const std::string& place, std::int64_t len, std::int64_t cp,
                    std::span<const std::int64_t> dst, std::span<const std::int64_t> shard_lens,
                    std::int64_t world_size) {
  const std::int64_t slots = std::ssize(dst);
  require(0 <= cp && cp <= slots && (len == 0) == (cp == 0), in_custom_mapping, ": cp_num", place,
          " = ", cp, ", expected ",
          len == 0 ? "0, as the sequence is empty" : concat("1..", slots));
  std::int64_t rows = 0;
  for (std::int64_t c = 0; c < slots; ++c) {
    const bool used = c < cp;
    require(used ? 0 <= dst[c] && dst[c] < world_size : dst[c] == -1, in_custom_mapping, ": cp_dst",
            place, ", shard ", c, " = ", dst[c], ", expected ",
            used ? concat("0..", world_size - 1) : concat("-1, as cp_num is ", cp));
    require(used ? shard_lens[c] > 0 : shard_lens[c] == 0, in_custom_mapping, ": seq_shard_lens",
            place, ", shard ", c, " = ", shard_lens[c], ", expected ",
            used ? "> 0" : concat("0, as cp_num is ", cp));
    require(shard_lens[c] <= detail::max_total_rows - rows, in_custom_mapping, ": seq_shard_lens",
            place, " sums to over 2^40 rows");
    rows += shard_lens[c];
  }
  require(rows == len, in_custom_mapping, ": seq_shard_lens", place, " sums to ", rows,
          ", expected ", len, " (seq_lens)");
}

/// Checks the shapes and returns [n, C].
std::pair<std::int64_t, std::int64_t> check_arguments(std::int64_t world_size,
                                                      const IndexArray& seq_lens,
                                                      const IndexArray& cp_num,
                                                      const IndexArray& cp_dst,
                                                      const IndexArray& seq_shard_lens) {
  const auto [rows, num_seqs] = detail::check_world_matrix(in_custom_mapping, "seq_lens", seq_lens);
  require(rows == world_size, in_custom_mapping, ": seq_lens has ", rows,
          " rows, expected world_size = ", world_size);
  require(cp_dst.ndim() == 3, in_custom_mapping, ": cp_dst has shape ", to_string(cp_dst.shape()),
          ", expected [W, n, C]");
  detail::check_same_shape(in_custom_mapping, "cp_num", cp_num, seq_lens.shape());
  detail::check_same_shape(in_custom_mapping, "cp_dst", cp_dst,
                           {world_size, num_seqs, cp_dst.dim(2)});
  detail::check_same_shape(in_custom_mapping, "seq_shard_lens", seq_shard_lens, cp_dst.shape());
  detail::check_lengths(in_custom_mapping, "seq_lens", seq_lens);
  return {num_seqs, cp_dst.dim(2)};
}

}  // namespace

QkvDispatch create_qkv_dispatch_with_custom_mapping(
    std::int64_t world_size, const IndexArray& seq_lens, const IndexArray& cp_num,
    const IndexArray& cp_dst, const IndexArray& seq_shard_lens, bool return_intermediate) {
  const detail::Int64Table lens(in_custom_mapping, "seq_lens", seq_lens);
  const detail::Int64Table degrees(in_custom_mapping, "cp_num", cp_num);
  const detail::Int64Table ranks(in_custom_mapping, "cp_dst", cp_dst);
  const detail::Int64Table shard_lens(in_custom_mapping, "seq_shard_lens", seq_shard_lens);
  const auto [num_seqs, slots] = check_arguments(world_size, *lens, *degrees, *ranks, *shard_lens);
  QkvPlan plan = empty_plan(world_size);
  for (std::int64_t w = 0; w < world_size; ++w) {
    bool ended = false;
    for (std::int64_t i = 0; i < num_seqs; ++i) {
      const std::int64_t flat = w * num_seqs + i;
      const std::int64_t len = lens->i64()[flat];
      const std::int64_t cp = degrees->i64()[flat];
      const auto dst = ranks->i64().subspan(flat * slots, slots);
      const auto shards = shard_lens->i64().subspan(flat * slots, slots);
      require(!ended || len == 0, in_custom_mapping, ": seq_lens of rank ", w, ", sequence ", i,
              " = ", len, ", expected 0 after the sequence of length 0 before it");
      ended = len == 0;
      check_sequence(concat(" of rank ", w, ", sequence ", i), len, cp, dst, shards, world_size);
      for (std::int64_t c = 0; c < cp; ++c) add_shard(plan, shards[c], dst[c]);
      if (cp > 0) plan.doc_shard_offsets.push_back(plan.num_shards());
    }
    plan.rank_shard_offsets.push_back(plan.num_shards());
  }
  return with_metadata(with_raw_form(std::move(plan), slots, *lens), return_intermediate);
}

QkvDispatch create_balanced_example(std::int64_t rows_per_rank) {
  require(
      rows_per_rank >= 8 && rows_per_rank % 8 == 0 && rows_per_rank <= detail::max_total_rows / 4,
      "create_balanced_example: rows_per_rank = ", rows_per_rank,
      ", expected a positive multiple of 8");
  constexpr std::int64_t world_size = 4;
  constexpr std::int64_t most = 8;
  constexpr std::int64_t folded[most] = {0, 1, 2, 3, 3, 2, 1, 0};
  IndexArray seq_lens({world_size, most});
  IndexArray cp_num({world_size, most});
  IndexArray cp_dst = IndexArray::full({world_size, most, most}, -1);
  IndexArray shard_lens({world_size, most, most});
  for (std::int64_t w = 0; w < world_size; ++w) {
    const std::int64_t num_seqs = std::int64_t{1} << w;
    for (std::int64_t i = 0; i < num_seqs; ++i) {
      const auto flat = static_cast<std::size_t>(w * most + i);
      const std::int64_t cp = w == 0 ? most : 1;
      seq_lens.i64()[flat] = rows_per_rank / num_seqs;
      cp_num.i64()[flat] = cp;
      for (std::int64_t c = 0; c < cp; ++c) {
        const std::size_t shard = flat * most + static_cast<std::size_t>(c);
        cp_dst.i64()[shard] = w == 0 ? folded[c] : w;
        shard_lens.i64()[shard] = rows_per_rank / num_seqs / cp;
      }
    }
  }
  return create_qkv_dispatch_with_custom_mapping(world_size, seq_lens, cp_num, cp_dst, shard_lens);
}

}  // namespace waybill
