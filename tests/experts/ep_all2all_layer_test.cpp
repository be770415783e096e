#include "waybill/experts/ep_all2all_layer.h"

#include <gtest/gtest.h>

#include "experts/expert_rounds.h"
#include "support/expect_error.h"

namespace waybill::test {
namespace {

EPConfig config_of(std::int32_t world, std::int32_t per_node, DType dtype = DType::bfloat16) {
  EPConfig config;
  config.max_tokens = 13;
  config.hidden = 24;
  config.topk = 4;
  config.num_experts = world * 3;
  config.world_size = world;
  config.local_world_size = per_node;
  config.token_dtype = dtype;
  return config;
}

RandomCaseOptions random_draw(Random& random) {
  RandomCaseOptions draw;
  draw.draw = random.below(4) == 0 ? Draw::distinct : Draw::any;
  draw.drop = random.below(2) == 0 ? 0 : 0.3;
  draw.id_dtype = random.below(2) == 0 ? DType::int32 : DType::int64;
  return draw;
}

std::vector<ExpertRoundCase> random_rounds(const EPConfig& config, const EPLayerOptions& options,
                                           int count, Random& random) {
  std::vector<ExpertRoundCase> rounds;
  for (int i = 0; i < count; ++i) {
    ExpertCase one = random_case(config, random, random_draw(random));
    const bool weights = random.below(4) != 0;
    const bool grouped = options.dispatch.rows == EPRows::grouped;
    if (!weights) one.weights.clear();
    rounds.push_back(make_round(one, options, random, static_cast<int>(random.below(3)),
                                weights && grouped && random.below(2) == 0));
  }
  return rounds;
}

struct Ways {
  std::int32_t world;
  std::int32_t per_node;
  bool local_combine;
  EPDispatchOptions dispatch;
};

class ExpertRounds : public testing::TestWithParam<Ways> {};

TEST_P(ExpertRounds, EqualTheSimulationOnOneLayer) {
  const Ways& way = GetParam();
  Random random(31);
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    EPConfig config = config_of(way.world, way.per_node, dtype);
    if (way.dispatch.payload != EPPayload::plain) config.hidden = 128;
    EPLayerOptions options;
    options.dispatch = way.dispatch;
    options.enable_local_combine = way.local_combine;
    if (dtype == DType::bfloat16) {
      run_rounds(config, options, random_rounds(config, options, 110, random), true);
      continue;
    }
    for (const std::int32_t topk : {1, 4, 32}) {
      config.topk = topk;
      run_rounds(config, options, random_rounds(config, options, 8, random), true);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ways, ExpertRounds,
    testing::Values(Ways{1, 1, false, {}}, Ways{4, 4, false, {}}, Ways{4, 4, true, {}},
                    Ways{4, 2, false, {}}, Ways{6, 2, true, {}}, Ways{4, 1, false, {}},
                    Ways{4, 4, false, {.rows = EPRows::compact, .expert_alignment = 4}},
                    Ways{4, 2, false, {.rows = EPRows::compact}},
                    Ways{4, 4, true, {.expert_alignment = 8}},
                    Ways{4, 2, false, {.expert_alignment = 3}},
                    Ways{4, 4, false, {.payload = EPPayload::quantized}},
                    Ways{4, 2, false, {.rows = EPRows::compact, .payload = EPPayload::quantized}}));

TEST(EPAll2AllLayer, GrowsInMidLifeByTheRuleOfTheOriginal) {
  Random random(32);
  for (const std::int32_t per_node : {4, 2}) {
    EPConfig config = config_of(4, per_node);
    config.max_tokens = 300;
    EPLayerOptions options;
    options.capacity_factor = 1;
    std::vector<ExpertRoundCase> rounds;
    for (const std::int64_t tokens : {10, 300, 20, 300}) {
      const ExpertCase one =
          random_case(config, random, {.draw = Draw::one_expert, .drop = 0, .tokens = tokens});
      rounds.push_back(make_round(one, options, random));
    }
    run_thread_world(
        4,
        [&](World& world) {
          const auto rank = static_cast<std::size_t>(to_int(world.rank()));
          EPAll2AllLayer layer(world, at_rank(config, world), options);
          EXPECT_EQ(layer.output_rows(), 1200);
          std::int64_t rows = 1200;
          EPDispatched last;
          for (std::size_t i = 0; i < rounds.size(); ++i) {
            const EPDispatched got = layer.dispatch(input_of(rounds[i], rank));
            rows = grown_output_rows(rows, rounds[i].dispatch.rows.largest_recv_rows);
            EXPECT_EQ(layer.output_rows(), rows);
            expect_dispatched(got, rounds[i], rank);
            if (i > 0) {  // what the last dispatch gave is still there
              EXPECT_TRUE(same_bytes(last.rows, rounds[i - 1].dispatch.recv_tokens[rank]));
              expect_combined(layer, *last.layout, rounds[i - 1], rank);
            }
            last = got;
          }
          EXPECT_EQ(rows, (4800 + 1023) / 1024 * 1024 * 2);
          layer.finalize();
          layer.finalize();
          EXPECT_THROW(layer.ep_barrier_all(), TransportError);
        },
        {.ranks_per_node = per_node});
  }
}

TEST(EPAll2AllLayer, DispatchesMayComeBeforeTheirCombines) {
  Random random(33);
  for (const std::int32_t per_node : {4, 2}) {
    const EPConfig config = config_of(4, per_node);
    const EPLayerOptions options;
    const auto rounds = random_rounds(config, options, 24, random);
    run_thread_world(4,
                     [&](World& world) {
                       const auto rank = static_cast<std::size_t>(to_int(world.rank()));
                       EPAll2AllLayer layer(world, at_rank(config, world), options);
                       for (std::size_t i = 0; i + 1 < rounds.size(); i += 2) {
                         const EPDispatched first = layer.dispatch(input_of(rounds[i], rank));
                         const EPDispatched second = layer.dispatch(input_of(rounds[i + 1], rank));
                         expect_dispatched(first, rounds[i], rank);  // views of both are valid
                         expect_dispatched(second, rounds[i + 1], rank);
                         const bool swapped = i % 4 == 2;
                         expect_combined(layer, swapped ? *second.layout : *first.layout,
                                         rounds[swapped ? i + 1 : i], rank);
                         expect_combined(layer, swapped ? *first.layout : *second.layout,
                                         rounds[swapped ? i : i + 1], rank);
                       }
                       layer.finalize();
                     },
                     {.ranks_per_node = per_node});
  }
}

TEST(EPAll2AllLayer, ALayoutServesAgainWithoutCounting) {
  Random random(34);
  for (const Ways& way : {Ways{4, 4, false, {}}, Ways{4, 2, false, {}},
                          Ways{4, 4, false, {.rows = EPRows::compact}}}) {
    const EPConfig config = config_of(way.world, way.per_node);
    EPLayerOptions options;
    options.dispatch = way.dispatch;
    ExpertCase one = random_case(config, random);
    std::vector<ExpertRoundCase> rounds{make_round(one, options, random)};
    for (int i = 0; i < 5; ++i) {  // the same ids, other tokens and weights
      for (std::size_t r = 0; r < 4; ++r) {
        one.tokens[r] = random_rows(config, one.tokens[r].shape()[0], random);
        for (float& weight : one.weights[r].as<float>()) weight = random.uniform_float();
      }
      rounds.push_back(make_round(one, options, random));
    }
    run_thread_world(4,
                     [&](World& world) {
                       const auto rank = static_cast<std::size_t>(to_int(world.rank()));
                       EPAll2AllLayer layer(world, at_rank(config, world), options);
                       const EPDispatched first = layer.dispatch(input_of(rounds[0], rank));
                       expect_dispatched(first, rounds[0], rank);
                       for (std::size_t i = 1; i < rounds.size(); ++i) {
                         ExpertDispatchInput input = input_of(rounds[i], rank);
                         input.ids = {};
                         const EPDispatched again = layer.dispatch(input, *first.layout);
                         expect_dispatched(again, rounds[i], rank);
                         expect_combined(layer, *again.layout, rounds[i], rank);
                       }
                       layer.finalize();
                     },
                     {.ranks_per_node = way.per_node});
  }
}

}  // namespace
}  // namespace waybill::test
