// Layouts that outlive other dispatches by their routing.

#include <gtest/gtest.h>

#include <optional>

#include "experts/expert_rounds.h"
#include "support/expect_error.h"

namespace waybill::test {
namespace {

struct World4 {
  std::int32_t per_node;
  bool local_combine;
  EPRows rows;
};

/// The same ids with other tokens, and other weights or none; each with its combine.
std::vector<ExpertRoundCase> rounds_of_one_routing(const EPConfig& config,
                                                   const EPLayerOptions& options, Random& random) {
  const ExpertCase first = random_case(config, random, {.edges = false, .drop = 0.2});
  std::vector<ExpertRoundCase> rounds;
  for (const bool weights : {true, false, true, true, false}) {
    ExpertCase one = first;
    for (std::size_t r = 0; r < 4; ++r) {
      one.tokens[r] = random_rows(config, one.tokens[r].shape()[0], random);
      for (float& weight : one.weights[r].as<float>()) weight = random.uniform_float();
    }
    if (!weights) one.weights.clear();
    const bool weighted = weights && options.dispatch.rows == EPRows::grouped;
    rounds.push_back(make_round(one, options, random, 0, weighted));
  }
  return rounds;
}

class ExpertLayouts : public testing::TestWithParam<World4> {};

TEST_P(ExpertLayouts, GiveWhatTheyGaveAfterOtherDispatchesByTheirRouting) {
  const World4& sample = GetParam();
  const EPConfig config = config_of_four(sample.per_node);
  EPLayerOptions options;
  options.enable_local_combine = sample.local_combine;
  options.dispatch.rows = sample.rows;
  Random random(71);
  const auto rounds = rounds_of_one_routing(config, options, random);
  run_thread_world(
      4,
      [&](World& world) {
        const auto rank = static_cast<std::size_t>(to_int(world.rank()));
        EPAll2AllLayer layer(world, at_rank(config, world), options);
        std::vector<EPDispatched> made;
        for (std::size_t i = 0; i < rounds.size(); ++i) {
          const ExpertDispatchInput input = input_of(rounds[i], rank);
          // By the routing of the first layout, then of the latest one, which had no weights.
          made.push_back(i == 0 ? layer.dispatch(input)
                                : layer.dispatch(input, *made[i == 1 ? 0 : i - 1].layout));
          expect_dispatched(made.back(), rounds[i], rank);
          for (std::size_t earlier = 0; earlier <= i; ++earlier) {
            SCOPED_TRACE(concat("layout ", earlier, " after dispatch ", i));
            const EPLayout& layout = *made[earlier].layout;
            EXPECT_EQ(layout.has_weights(), !rounds[earlier].inputs.weights.empty());
            expect_combined(layer, layout, rounds[earlier], rank);
            expect_same(layout.describe(), rounds[earlier].dispatch.layout[rank]);
          }
        }
        layer.finalize();
      },
      {.ranks_per_node = sample.per_node});
}

INSTANTIATE_TEST_SUITE_P(Worlds, ExpertLayouts,
                         testing::Values(World4{4, false, EPRows::grouped},
                                         World4{4, true, EPRows::grouped},
                                         World4{4, false, EPRows::compact},
                                         World4{2, false, EPRows::grouped},
                                         World4{1, false, EPRows::grouped}));

TEST(ExpertLayouts, KeepTheirWeightsTables) {
  const EPConfig config = config_of_four(4);
  Random random(72);
  const auto rounds = rounds_of_one_routing(config, {}, random);
  run_thread_world(4, [&](World& world) {
    const auto rank = static_cast<std::size_t>(to_int(world.rank()));
    EPAll2AllLayer layer(world, at_rank(config, world));
    const EPDispatched first = layer.dispatch(input_of(rounds[0], rank));
    const EPDispatched bare = layer.dispatch(input_of(rounds[1], rank), *first.layout);
    const EPDispatched other = layer.dispatch(input_of(rounds[2], rank), *first.layout);
    EXPECT_TRUE(same_bytes(first.layout->tables().weights, rounds[0].inputs.weights[rank]));
    EXPECT_TRUE(same_bytes(other.layout->tables().weights, rounds[2].inputs.weights[rank]));
    EXPECT_FALSE(is_given(bare.layout->tables().weights));
    EXPECT_EQ(first.layout->tables().dst_rows.data, other.layout->tables().dst_rows.data);
    HostTensor sums(config.token_dtype, rounds[1].combined[rank].shape());
    EXPECT_TRUE(rejects(
        [&] {
          layer.combine({.rows = rounds[1].outputs[rank].view(),
                         .options = {.weighted = true},
                         .biases = {},
                         .output = sums.view()},
                        *bare.layout);
        },
        {"combine: weighted = true, but the dispatch had no weights"}));
    layer.finalize();
  });
}

}  // namespace
}  // namespace waybill::test
