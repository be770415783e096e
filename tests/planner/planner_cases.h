#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "waybill/core/random.h"
#include "waybill/planner/planner.h"

namespace waybill::test {

using Lengths = std::vector<std::int64_t>;

/// Mostly short documents, some of one token, some that cross several ranks.
inline Lengths random_documents(Random& random, std::int64_t total, std::int64_t longest) {
  Lengths lengths;
  while (total > 0) {
    const std::int64_t kind = random.below(8);
    const std::int64_t most = kind == 0   ? 1
                              : kind == 1 ? longest
                              : kind < 4  ? std::max<std::int64_t>(1, longest / 8)
                                          : std::max<std::int64_t>(1, longest / 40);
    lengths.push_back(std::min(total, 1 + random.below(most)));
    total -= lengths.back();
  }
  return lengths;
}

/// @param full a full mask; all else is drawn as without
inline PlannerOptions random_options(Random& random, bool full = false) {
  PlannerOptions options;
  options.world_size = static_cast<std::int32_t>(1 + random.below(24));
  options.tokens_per_rank = 1 + random.below(3000);
  options.model = {.q_hidden = 1 + random.below(512), .kv_hidden = 1 + random.below(256)};
  if (random.below(2) == 0) options.mask.window = 1 + random.below(2000);
  if (random.below(3) == 0) options.kv_layout = KvLayout::per_query;
  options.imbalance_target = random.below(2) == 0 ? 1.01 : 1.2;
  options.block_tokens = std::int64_t{1} << random.below(8);
  options.hardware.ranks_per_node = static_cast<std::int32_t>(1 + random.below(9));
  if (full) options.mask = {.kind = MaskKind::full};
  if (!full && options.tokens_per_rank % 4 == 1)
    options.mask = {.kind = MaskKind::prefix, .prefix = options.tokens_per_rank * 7 % 1500};
  if (options.tokens_per_rank % 4 == 0) options.mask.chunk = 1 + options.tokens_per_rank * 7 % 1500;
  return options;
}

/// Documents that fill a part of the ranks, at random.
inline Lengths random_flat(Random& random, const PlannerOptions& options) {
  const std::int64_t total = options.world_size * options.tokens_per_rank;
  return random_documents(random, random.below(total + 1),
                          1 + random.below(4 * options.tokens_per_rank));
}

/// One list a rank; some are empty.
inline std::vector<Lengths> random_lists(Random& random, const PlannerOptions& options) {
  std::vector<Lengths> lists(static_cast<std::size_t>(options.world_size));
  for (Lengths& list : lists) {
    if (random.below(4) == 0) continue;
    list = random_documents(random, random.below(options.tokens_per_rank + 1),
                            options.tokens_per_rank);
  }
  return lists;
}

}  // namespace waybill::test
