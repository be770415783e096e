#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "waybill/routing/generators.h"

namespace waybill::bench {

/// Documents to draw from: a list of lengths, each used once in random order before any comes
/// again, or a histogram.
struct DocumentSource {
  std::string name;
  std::vector<std::int64_t> lengths;
  const LengthDistribution* histogram = nullptr;

  /// Documents that fill `num_tokens`, packed in order into packs of `pack_tokens`: what does not
  /// fit at the end of a pack goes on in the next one as a document of its own.
  [[nodiscard]] std::vector<std::int64_t> draw(std::int64_t num_tokens, std::int64_t pack_tokens,
                                               std::uint64_t seed) const;
};

[[nodiscard]] DocumentSource source_from_file(const std::filesystem::path& path);
[[nodiscard]] DocumentSource source_from_histogram(const LengthDistribution& histogram);

/// MiB per rank of DistCA's planner (2afd219, tolerance 0.1) on packs of 512 Ki
/// tokens, 64 Ki tokens per rank, hidden 4096, KV 1024, bfloat16: means over 8 seeds, 4 from 128
/// ranks on.
struct ReferenceFigures {
  double imbalance = 0;
  double mean_in = 0;
  double max_in = 0;
  double max_out = 0;
};
[[nodiscard]] std::optional<ReferenceFigures> reference_figures(const std::string& source,
                                                                std::int32_t world_size);

}  // namespace waybill::bench
