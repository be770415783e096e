// Layers of experts of more ranks than 64, as threads.

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "experts/expert_rounds.h"
#include "support/sanitizers.h"

namespace waybill::test {
namespace {

struct Ranks {
  std::int32_t world_size;
  std::int32_t per_node;
  EPRows rows;
};

void PrintTo(const Ranks& ranks, std::ostream* out) {
  *out << ranks.world_size << " ranks, " << ranks.per_node << " a node, "
       << (ranks.rows == EPRows::grouped ? "grouped" : "compact");
}

class ManyRanksOfExperts : public testing::TestWithParam<Ranks> {};

void run_round(const Ranks& ranks) {
  EPConfig config;
  config.max_tokens = 3;
  config.hidden = 4;
  config.topk = 3;
  config.num_experts = ranks.world_size;
  config.world_size = ranks.world_size;
  config.local_world_size = ranks.per_node;
  EPLayerOptions options;
  options.dispatch.rows = ranks.rows;
  options.capacity_factor = 4;
  Random random(41);
  std::vector<ExpertRoundCase> rounds;
  rounds.push_back(make_round(random_case(config, random, {.edges = false}), options, random));
  run_rounds(config, options, rounds);
}

TEST_P(ManyRanksOfExperts, round_equals_the_simulation) { run_round(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Few, ManyRanksOfExperts,
                         testing::Values(Ranks{65, 13, EPRows::grouped},
                                         Ranks{72, 72, EPRows::grouped},
                                         Ranks{72, 8, EPRows::compact},
                                         Ranks{128, 128, EPRows::compact}));
#ifndef WAYBILL_TEST_SLOW
INSTANTIATE_TEST_SUITE_P(Many, ManyRanksOfExperts,
                         testing::Values(Ranks{256, 256, EPRows::grouped},
                                         Ranks{256, 8, EPRows::compact}));

/// The most memory that this process has had since the last call, in bytes.
std::int64_t take_peak_bytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  std::int64_t kilobytes = -1;
  while (status >> word) {
    if (word == "VmHWM:") status >> kilobytes;
  }
  std::ofstream("/proc/self/clear_refs") << 5 << std::flush;
  return kilobytes * 1024;
}

TEST(ManyRanksOfExperts, many_nodes_fit_into_half_a_gigabyte) {
  (void)take_peak_bytes();
  run_round({512, 8, EPRows::compact});
  const std::int64_t peak = take_peak_bytes();
  EXPECT_GT(peak, 0);
  EXPECT_LT(peak, 500'000'000);
}
#endif

}  // namespace
}  // namespace waybill::test
