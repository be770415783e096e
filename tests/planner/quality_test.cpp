// Balance and bytes on fixed batches, so that a change that makes plans worse fails. The limits
// are the goals of docs/performance/planner.md; what is reached today is a little better.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "planner_cases.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/routing/generators.h"

namespace waybill {
namespace {

using test::Lengths;

/// Means over seeds.
struct Quality {
  double worst_imbalance = 0;
  double mean_in = 0;     ///< MiB
  double max_in = 0;      ///< MiB
  double max_out = 0;     ///< MiB
  double relay_out = 0;   ///< MiB
  double over_bound = 0;  ///< largest of max in over max(2.5 mean in, what cannot be avoided)
  double shards_per_document = 0;
};

double largest(const Lengths& values) {
  return static_cast<double>(*std::max_element(values.begin(), values.end()));
}

// Documents that end with a pack of 512 Ki tokens go on in the next as another document.
Lengths packed(const Lengths& lengths) {
  constexpr std::int64_t pack = 524288;
  Lengths parts;
  std::int64_t sum = 0;
  for (std::int64_t left : lengths) {
    while (left > 0) {
      parts.push_back(std::min(left, pack - sum % pack));
      sum += parts.back();
      left -= parts.back();
    }
  }
  return parts;
}

Quality measure(const char* distribution, std::int32_t world_size, int num_seeds,
                std::int32_t ranks_per_node = 1 << 20, bool prefixes = false) {
  Quality q;
  Planner planner;
  PlannerOptions options{.world_size = world_size};
  options.hardware.ranks_per_node = ranks_per_node;
  for (int seed = 0; seed < num_seeds; ++seed) {
    const Lengths lengths =
        packed(sample_documents(length_distribution(distribution), world_size * std::int64_t{65536},
                                static_cast<std::uint64_t>(seed)));
    if (prefixes) {  // of 0 to 90 % of a document
      options.mask.kind = MaskKind::prefix;
      options.prefixes = lengths;
      for (std::size_t d = 0; d < lengths.size(); ++d)
        options.prefixes[d] = lengths[d] * static_cast<std::int64_t>(d % 10) / 10;
    }
    const AttentionPlan& plan = planner.plan(lengths, options);
    const Lengths in = plan.bytes_in();
    const double mean = std::accumulate(in.begin(), in.end(), 0.0) / world_size;
    constexpr double mib = 1 << 20;
    q.worst_imbalance = std::max(q.worst_imbalance, plan.imbalance());
    q.mean_in += mean / mib / num_seeds;
    q.max_in += largest(in) / mib / num_seeds;
    q.max_out += largest(plan.bytes_out()) / mib / num_seeds;
    q.relay_out += largest(plan.bytes_out(TransferMode::relay)) / mib / num_seeds;
    q.over_bound = std::max(
        q.over_bound, largest(in) / std::max(2.5 * mean, static_cast<double>(plan.least_bytes_in)));
    q.shards_per_document += static_cast<double>(plan.plan.num_shards()) /
                             static_cast<double>(plan.plan.num_documents()) / num_seeds;
  }
  return q;
}

struct Goal {
  const char* distribution;
  std::int32_t world_size;
  int num_seeds;
  double mean_in;     ///< MiB, 3 % above what is reached
  double over_bound;  ///< a few ranks with little to do differ more
};

class PlannerQuality : public ::testing::TestWithParam<Goal> {};

TEST_P(PlannerQuality, IsKept) {
  const Goal& goal = GetParam();
  const Quality q = measure(goal.distribution, goal.world_size, goal.num_seeds);
  RecordProperty("mean_in_mib", std::to_string(q.mean_in));
  EXPECT_LE(q.worst_imbalance, 1.01);
  EXPECT_LE(q.mean_in, goal.mean_in);
  EXPECT_LE(q.over_bound, goal.over_bound);
  EXPECT_LE(q.relay_out, 2 * q.max_in);
  EXPECT_LE(q.relay_out, q.max_out);
  EXPECT_LE(q.shards_per_document, 1.16);
}

INSTANTIATE_TEST_SUITE_P(
    Histograms, PlannerQuality,
    ::testing::Values(Goal{"wlbllm", 8, 20, 201, 1.6}, Goal{"wlbllm", 64, 20, 281, 1.1},
                      Goal{"wlbllm", 512, 4, 280, 1.1}, Goal{"prolong", 8, 20, 118, 1.4},
                      Goal{"prolong", 64, 20, 244, 1.25}, Goal{"prolong", 512, 4, 409, 1.25},
                      Goal{"magi_default", 64, 4, 407, 1.1}, Goal{"wlbllm", 4096, 1, 291, 1.25},
                      Goal{"prolong", 4096, 1, 422, 1.1}),
    [](const auto& goal) {
      return std::string(goal.param.distribution) + "_" + std::to_string(goal.param.world_size);
    });

TEST(PlannerQualityOfPrefixes, IsBalanced) {
  for (const char* distribution : {"wlbllm", "prolong", "magi_default"}) {
    for (const std::int32_t world_size : {8, 64}) {
      const Quality q = measure(distribution, world_size, 4, 1 << 20, true);
      EXPECT_LE(q.worst_imbalance, 1.01) << distribution << ' ' << world_size;
      EXPECT_LE(q.over_bound, 2) << distribution << ' ' << world_size;
    }
  }
}

// Over nodes a row crosses the network once per node, and that shows in the limit.
TEST(PlannerQualityOverNodes, RelaySavesNetworkTime) {
  PlannerOptions options{.world_size = 64};
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const AttentionPlan plan = plan_attention(
        packed(sample_documents(length_distribution("wlbllm"), 64 * 65536, seed)), options);
    EXPECT_LT(plan.limit_seconds(TransferMode::relay),
              0.5 * plan.limit_seconds(TransferMode::direct));
    EXPECT_LE(largest(plan.bytes_out(TransferMode::relay)), 2.5 * largest(plan.bytes_in()));
  }
}

}  // namespace
}  // namespace waybill
