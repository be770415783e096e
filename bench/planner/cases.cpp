#include "cases.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "waybill/core/random.h"
#include "waybill/json/length_distribution_json.h"

namespace waybill::bench {
namespace {

struct Reference {
  const char* source;
  std::int32_t world_size;
  ReferenceFigures figures;
};

constexpr std::array references{
    Reference{"dist_wlbllm", 8, {1.04, 248, 402, 1273}},
    Reference{"dist_wlbllm", 32, {1.12, 294, 641, 2943}},
    Reference{"dist_wlbllm", 64, {1.24, 304, 661, 3508}},
    Reference{"dist_wlbllm", 128, {1.27, 307, 726, 4675}},
    Reference{"dist_wlbllm", 256, {1.60, 316, 724, 4822}},
    Reference{"dist_prolong", 8, {1.10, 75, 170, 325}},
    Reference{"dist_prolong", 64, {1.65, 210, 453, 4037}},
    Reference{"dist_prolong", 256, {2.53, 383, 844, 18837}},
};

std::vector<std::int64_t> shuffled(const std::vector<std::int64_t>& lengths,
                                   std::int64_t num_tokens, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::int64_t> drawn;
  const auto count = static_cast<std::int32_t>(lengths.size());
  for (std::int64_t sum = 0; sum < num_tokens;) {
    for (const std::int32_t i : random.permutation(count, count)) {
      drawn.push_back(lengths[i]);
      sum += drawn.back();
      if (sum >= num_tokens) break;
    }
  }
  return drawn;
}

}  // namespace

std::vector<std::int64_t> DocumentSource::draw(std::int64_t num_tokens, std::int64_t pack_tokens,
                                               std::uint64_t seed) const {
  const std::vector<std::int64_t> drawn = histogram != nullptr
                                              ? sample_documents(*histogram, num_tokens, seed)
                                              : shuffled(lengths, num_tokens, seed);
  std::vector<std::int64_t> packed;
  std::int64_t sum = 0;
  for (std::int64_t left : drawn) {
    while (left > 0 && sum < num_tokens) {
      const std::int64_t part = std::min({left, pack_tokens - sum % pack_tokens, num_tokens - sum});
      packed.push_back(part);
      sum += part;
      left -= part;
    }
  }
  return packed;
}

DocumentSource source_from_file(const std::filesystem::path& path) {
  return {.name = path.stem().string(), .lengths = read_lengths(path), .histogram = nullptr};
}

DocumentSource source_from_histogram(const LengthDistribution& histogram) {
  return {.name = histogram.name + " (histogram)", .lengths = {}, .histogram = &histogram};
}

std::optional<ReferenceFigures> reference_figures(const std::string& source,
                                                  std::int32_t world_size) {
  for (const Reference& reference : references) {
    if (reference.source == source && reference.world_size == world_size) return reference.figures;
  }
  return std::nullopt;
}

}  // namespace waybill::bench
