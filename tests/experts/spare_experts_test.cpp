// Layers with spare experts: ranks plan copies alike, and rows land in slots as the simulation
// says.

#include <gtest/gtest.h>

#include <limits>

#include "experts/disagreeing_ranks.h"
#include "experts/expert_rounds.h"
#include "support/expect_error.h"

namespace waybill::test {
namespace {

EPLayerOptions spare_layer(std::int32_t spare_experts) {
  EPLayerOptions options;
  options.dispatch.spare_experts = spare_experts;
  return options;
}

struct SpareWay {
  std::int32_t per_node;
  EPRows rows = EPRows::grouped;
  std::int64_t alignment = 1;
  bool local_combine = false;
  bool weighted = false;
};

class SpareExperts : public testing::TestWithParam<SpareWay> {};

TEST_P(SpareExperts, RowsAndSumsAreThoseOfTheSimulation) {
  const SpareWay& way = GetParam();
  const EPConfig config = config_of_four(way.per_node);
  for (const std::int32_t spare_experts : {1, 3}) {
    EPLayerOptions options = spare_layer(spare_experts);
    options.dispatch.rows = way.rows;
    options.dispatch.expert_alignment = way.alignment;
    options.dispatch.min_rows = spare_experts == 3 ? 2 : 0;
    options.enable_local_combine = way.local_combine;
    Random random(81);
    std::vector<ExpertRoundCase> rounds;
    for (int i = 0; i < 12; ++i) {
      const RandomCaseOptions draw{.draw = i < 3 ? Draw::one_expert : Draw::any};
      rounds.push_back(
          make_round(random_case(config, random, draw), options, random, i % 3, way.weighted));
    }
    run_rounds(config, options, rounds, spare_experts == 3);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ways, SpareExperts,
    testing::Values(SpareWay{4}, SpareWay{4, EPRows::compact}, SpareWay{4, EPRows::grouped, 4},
                    SpareWay{4, EPRows::compact, 4}, SpareWay{4, EPRows::grouped, 1, true},
                    SpareWay{4, EPRows::grouped, 1, true, true},
                    SpareWay{4, EPRows::grouped, 1, false, true}, SpareWay{2},
                    SpareWay{2, EPRows::compact}, SpareWay{2, EPRows::grouped, 8, false, true},
                    SpareWay{1}));

TEST(SpareExperts, PayloadsTravelToSlots) {
  for (const EPPayload payload : {EPPayload::quantized, EPPayload::scaled}) {
    for (const std::int32_t per_node : {4, 2}) {
      EPConfig config = config_of_four(per_node);
      config.hidden = 256;
      EPLayerOptions options = spare_layer(2);
      options.dispatch.payload = payload;
      Random random(82);
      std::vector<ExpertRoundCase> rounds;
      for (int i = 0; i < 3; ++i) {
        const ExpertCase one = random_case(config, random);
        rounds.push_back(
            make_round(payload == EPPayload::scaled ? quantized_case(one) : one, options, random));
      }
      run_rounds(config, options, rounds);
    }
  }
}

class SpareExpertsOfRanks : public testing::TestWithParam<RankWay> {};
INSTANTIATE_TEST_SUITE_P(Ways, SpareExpertsOfRanks, testing::ValuesIn(all_rank_ways()));

TEST_P(SpareExpertsOfRanks, CopiesThatAreThereAreUsedAgain) {
  const RankWay& way = GetParam();
  EPConfig config = config_of_four(way.per_node());
  config.world_size = way.world_size;
  config.num_experts = 3 * way.world_size;
  const EPLayerOptions options = spare_layer(2);
  Random random(83);
  std::vector<ExpertRoundCase> rounds;
  std::vector<std::int32_t> present;  // of the round before, none for every third
  for (int i = 0; i < 7; ++i) {
    if (i % 3 == 0) present.clear();
    rounds.push_back(make_round(random_case(config, random, {.edges = false}), options, random, 0,
                                false, present));
    present = copies_in(rounds.back().dispatch);
  }
  run_way(way, 60, [&](World& world) {
    const auto rank = static_cast<std::size_t>(to_int(world.rank()));
    EPAll2AllLayer layer(world, at_rank(config, world), options);
    std::shared_ptr<EPLayout> before;
    for (std::size_t i = 0; i < rounds.size(); ++i) {
      SCOPED_TRACE(concat("round ", i));
      ExpertDispatchInput input = input_of(rounds[i], rank);
      input.present = i % 3 == 0 ? nullptr : before.get();
      const EPDispatched got = layer.dispatch(input);
      expect_dispatched(got, rounds[i], rank);
      // By the routing that is known; what is present does not matter then.
      const EPDispatched again = layer.dispatch(input, *got.layout);
      expect_dispatched(again, rounds[i], rank);
      expect_combined(layer, *again.layout, rounds[i], rank);
      before = i % 2 == 0 ? got.layout : again.layout;
    }
    layer.finalize();
  });
}

TEST_P(SpareExpertsOfRanks, WhatIsPresentMustBeTheSameOnAll) {
  const RankWay& way = GetParam();
  run_way(way, 20, [](World& world) {
    for (const bool none : {true, false}) {
      LayerStep step(world, spare_layer(1));
      const auto first = step.dispatch(step.input()).layout;
      const auto second = step.dispatch(step.input()).layout;
      ExpertDispatchInput input = step.input();
      const EPLayout* const other = none ? nullptr : first.get();
      input.present = is_odd(world) ? other : second.get();
      expect_throws<Disagreement>(
          [&] { (void)step.dispatch(input); }, 10,
          {"dispatch: ranks disagree in call 3: present is ", none ? "none" : "that of dispatch 1",
           "that of dispatch 2 on rank "});
    }
  });
}

TEST(SpareExperts, BadInputIsRefusedBeforeAnyCommunication) {
  run_thread_world(2, [](World& world) {
    const EPConfig config = LayerStep::config_of(world);
    const auto refuses = [&](auto&& change, std::initializer_list<std::string_view> parts) {
      EPLayerOptions options = spare_layer(1);
      change(options.dispatch);
      EXPECT_TRUE(rejects([&] { const EPAll2AllLayer layer(world, config, options); }, parts));
    };
    const double nan = std::numeric_limits<double>::quiet_NaN();
    refuses([](auto& o) { o.spare_experts = -1; }, {"EPAll2AllLayer: spare_experts = -1"});
    refuses([](auto& o) { o.spare_experts = 5; }, {"spare_experts = 5", "num_experts = 4"});
    refuses([](auto& o) { o.limit = 0; }, {"limit = 0", "expected >= 1"});
    refuses([&](auto& o) { o.limit = nan; }, {"limit = nan", "expected >= 1"});
    refuses([](auto& o) { o.min_rows = -3; }, {"min_rows = -3", "expected >= 0"});

    LayerStep plain(world);
    LayerStep spare(world, spare_layer(1));
    LayerStep other(world, spare_layer(1));
    const auto of_plain = plain.dispatch(plain.input()).layout;
    const auto of_other = other.dispatch(other.input()).layout;
    EXPECT_FALSE(is_given(of_plain->tables().slot_experts));
    EXPECT_FALSE(of_plain->describe().slot_experts.has_value());
    const auto refuses_call = [](LayerStep& step, auto&& change,
                                 std::initializer_list<std::string_view> parts) {
      ExpertDispatchInput input = step.input();
      change(input);
      EXPECT_TRUE(rejects([&] { (void)step.dispatch(input); }, parts));
      (void)step.dispatch(step.input());  // nobody was told
    };
    refuses_call(plain, [&](auto& input) { input.present = of_plain.get(); },
                 {"dispatch: present is given, expected none without spare experts"});
    refuses_call(spare, [&](auto& input) { input.present = of_other.get(); },
                 {"dispatch: present belongs to another layer"});
    const HostTensor positions(DType::int32, {6, 2});
    refuses_call(spare, [&](auto& input) { input.full_scatter_indices = positions.view(); },
                 {"full_scatter_indices are given, expected none with spare_experts = 1"});
    for (LayerStep* step : {&plain, &spare, &other}) step->layer().finalize();
  });
}

}  // namespace
}  // namespace waybill::test
