#include "moe_workload.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "waybill/core/random.h"

namespace waybill::bench {

MoeRows rows_of(const MoeWorkload& workload) {
  const EPConfig& config = workload.config;
  std::vector<std::int32_t> counts;
  for (const auto& ids : workload.ids) {
    const auto own = count_topk_slots(config, ids);
    counts.insert(counts.end(), own.begin(), own.end());
  }
  const std::int64_t world = config.world_size;
  const auto tokens = [&](std::int64_t from, std::int64_t to) -> std::int64_t {
    return counts[from * num_counts(config) + config.num_experts + 1 + to];
  };
  const auto topk_slots = [&](std::int64_t from, std::int64_t to) {
    const std::int64_t each = config.num_experts_per_rank();
    const auto first = counts.begin() + from * num_counts(config) + to * each;
    return std::accumulate(first, first + each, std::int64_t{0});
  };
  const ExpertRows grouped = locate_rows(config, {}, counts);
  MoeRows most;
  for (std::int64_t r = 0; r < world; ++r) {
    std::int64_t out = 0;
    std::int64_t in = 0;
    std::int64_t slots_out = 0;
    std::int64_t slots_in = 0;
    for (std::int64_t s = 0; s < world; ++s) {
      if (s != r) slots_out += topk_slots(r, s);
      if (s != r) slots_in += topk_slots(s, r);
      if (s != r) out += tokens(r, s);
      if (s != r) in += tokens(s, r);
    }
    const std::int64_t rows = grouped.num_recv_rows[r];
    most.wire = std::max({most.wire, in, out});
    most.slots = std::max({most.slots, slots_in, slots_out});
    most.local = std::max(most.local, tokens(r, r));
    most.grouped = std::max(most.grouped, rows);
    most.compact = std::max(most.compact, in + tokens(r, r));
    most.copies = std::max(most.copies, rows - in - tokens(r, r));
  }
  return most;
}

MoeWorkload uniform_moe(std::int32_t world_size, std::int64_t tokens, std::int64_t hidden,
                        std::int32_t topk, std::int32_t num_experts) {
  MoeWorkload workload;
  workload.name = concat(tokens, " x ", hidden, ", top-", topk, " of ", num_experts);
  workload.config.max_tokens = tokens;
  workload.config.hidden = hidden;
  workload.config.topk = topk;
  workload.config.num_experts = num_experts;
  workload.config.world_size = world_size;
  workload.config.local_world_size = world_size;
  Random random(1);
  for (std::int32_t r = 0; r < world_size; ++r) {
    std::vector<std::int32_t> ids;
    for (std::int64_t t = 0; t < tokens; ++t) {
      const auto experts = random.permutation(num_experts, topk);
      ids.insert(ids.end(), experts.begin(), experts.end());
    }
    workload.ids.push_back(std::move(ids));
  }
  return workload;
}

MoeWorkload like_eight_ranks(std::int64_t tokens, std::int64_t hidden) {
  // Tokens of 8 distinct experts out of 256 meet so many of 8 ranks.
  double none = 1;
  for (int k = 0; k < 8; ++k) none *= (224.0 - k) / (256.0 - k);
  const double ranks = 8 * (1 - none);
  const double remote = ranks * 7 / 8;
  const double second_remote = (8 - ranks) / remote;
  const double second_local = ranks / 8 / remote;
  auto workload =
      uniform_moe(2, std::llround(static_cast<double>(tokens) * remote), hidden, 2, 256);
  workload.name = concat("bytes of 8 ranks, ", tokens, " x ", hidden);
  Random random(2);
  for (std::int32_t r = 0; r < 2; ++r) {
    auto& ids = workload.ids[r];
    const auto expert_on = [&](std::int32_t rank) {
      return static_cast<std::int32_t>(random.below(128)) + rank * 128;
    };
    for (std::size_t i = 0; i < ids.size(); i += 2) {
      ids[i] = expert_on(1 - r);
      const double draw = random.uniform_double();
      ids[i + 1] = workload.config.num_experts;
      if (draw < second_remote) {
        ids[i + 1] = expert_on(1 - r);
      } else if (draw < second_remote + second_local) {
        ids[i + 1] = expert_on(r);
      }
    }
  }
  return workload;
}

}  // namespace waybill::bench
