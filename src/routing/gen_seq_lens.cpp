#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "waybill/core/error.h"
#include "waybill/core/random.h"
#include "waybill/core/topology.h"
#include "waybill/routing/generators.h"

namespace waybill {
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
  require(1 <= world_size && world_size <= max_world_size, in_gen_seq_lens,
          ": world_size = ", world_size, ", expected 1..", max_world_size);
  require(1 <= num_seqs && num_seqs <= std::numeric_limits<std::int32_t>::max() / world_size,
          in_gen_seq_lens, ": num_seqs = ", num_seqs, ", expected 1..2^31 / world_size");
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
  require(1 <= world_size && world_size <= max_world_size, in_gen_seq_lens,
          ": world_size = ", world_size, ", expected 1..", max_world_size);
  require(1 <= num_seqs && num_seqs <= std::numeric_limits<std::int32_t>::max() / world_size,
          in_gen_seq_lens, ": num_seqs = ", num_seqs, ", expected 1..2^31 / world_size");
  Random random(seed);
  std::vector<float> uniforms(static_cast<std::size_t>(world_size * num_seqs));
  for (float& u : uniforms) u = random.uniform_float();
  return gen_seq_lens(world_size, num_seqs, total_len, uniforms, min_len);
}

}  // namespace waybill
