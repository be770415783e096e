// Ranks of a layer of experts that do not mean the same: none gets a wrong result, all are told.

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <thread>

#include "experts/disagreeing_ranks.h"

namespace waybill::test {
namespace {

constexpr double deadline_s = 10;  // of runs in which nobody should have to wait for it
constexpr double at_once_s = 5;

class ExpertAgreement : public testing::TestWithParam<RankWay> {};
INSTANTIATE_TEST_SUITE_P(Ways, ExpertAgreement, testing::ValuesIn(all_rank_ways()));

/// A setting of a layer, changed on one rank.
struct SettingCase {
  const char* named;
  std::function<void(EPConfig&, EPLayerOptions&)> change;
};

std::vector<SettingCase> setting_cases() {
  return {
      {"max_tokens = 5", [](auto& config, auto&) { config.max_tokens = 5; }},
      {"hidden = 256", [](auto& config, auto&) { config.hidden = 256; }},
      {"topk = 1", [](auto& config, auto&) { config.topk = 1; }},
      {"num_experts = ", [](auto& config, auto&) { config.num_experts *= 2; }},
      {"token_dtype = float32", [](auto& config, auto&) { config.token_dtype = DType::float32; }},
      {"weight_dtype = float16", [](auto& config, auto&) { config.weight_dtype = DType::float16; }},
      {"dropped_id = -1", [](auto&, auto& options) { options.dispatch.dropped_id = -1; }},
      {"rows = compact", [](auto&, auto& options) { options.dispatch.rows = EPRows::compact; }},
      {"expert_alignment = 4", [](auto&, auto& options) { options.dispatch.expert_alignment = 4; }},
      {"payload = float8",
       [](auto&, auto& options) { options.dispatch.payload = EPPayload::quantized; }},
      {"spare_experts = 1", [](auto&, auto& options) { options.dispatch.spare_experts = 1; }},
      {"limit = 1.0000000000000002",
       [](auto&, auto& options) { options.dispatch.limit = std::nextafter(1.0, 2.0); }},
      {"min_rows = 7", [](auto&, auto& options) { options.dispatch.min_rows = 7; }},
      {"enable_local_combine = true",
       [](auto&, auto& options) { options.enable_local_combine = true; }},
      {"fixed_rows = 64", [](auto&, auto& options) { options.fixed_rows = 64; }},
      {"capacity = 3", [](auto&, auto& options) { options.capacity_factor = 3; }},
  };
}

TEST_P(ExpertAgreement, OfSettingsIsLookedAtWhenTheLayerIsMade) {
  run_way(GetParam(), deadline_s, [](World& world) {
    const auto named = [&](const SettingCase& sample) {
      const std::int32_t odd = world.world_size() - 1;
      // Of two ranks nobody can say which is right.
      return world.world_size() == 2
                 ? std::vector<std::string>{"EPAll2AllLayer: rank "}
                 : std::vector<std::string>{
                       concat("EPAll2AllLayer: rank ", odd, " with ", sample.named), "the others "};
    };
    for (const SettingCase& sample : setting_cases()) {
      SCOPED_TRACE(sample.named);
      EPConfig config = LayerStep::config_of(world);
      config.hidden = 128;
      EPLayerOptions options;
      if (is_odd(world)) sample.change(config, options);
      auto parts = named(sample);
      parts.emplace_back("expected the same on all ranks");
      expect_throws<InvalidArgument>([&] { const EPAll2AllLayer layer(world, config, options); },
                                     at_once_s, parts);
    }
    LayerStep step(world, {.num_sms = 8 + to_int(world.rank())});  // a rank's own topk slot
    step.combine(*step.dispatch(step.input()).layout);
    step.layer().finalize();
  });
}

TEST_P(ExpertAgreement, OfContextsIsLookedAtWhenTheyAreMade) {
  run_way(GetParam(), deadline_s, [](World& world) {
    const EPConfig config = LayerStep::config_of(world);
    expect_throws<InvalidArgument>(
        [&] { (void)DispatchCombineContext::create(world, config, is_odd(world) ? 3 : 2); },
        at_once_s, {"DispatchCombineContext: rank ", "capacity = "});
    expect_throws<InvalidArgument>(
        [&] {
          (void)DispatchCombineContext::with_rows(world, config, {}, is_odd(world) ? 31 : 32);
        },
        at_once_s, {"DispatchCombineContext: rank ", "fixed_rows = "});
  });
}

TEST_P(ExpertAgreement, OfCallsIsLookedAtWhereRanksMeet) {
  run_way(GetParam(), deadline_s, [](World& world) {
    for (const auto& sample : call_cases<LayerStep>()) {
      SCOPED_TRACE(sample.name);
      LayerStep step(world);
      const auto first = step.dispatch(step.input()).layout;
      const auto second = step.dispatch(step.input()).layout;
      auto parts = sample.named;
      parts.push_back(concat("rank ", to_int(world.rank())));
      parts.push_back(concat("rank ", world.world_size() - 1));
      expect_throws<Disagreement>([&] { sample.calls(step, *first, *second, is_odd(world)); },
                                  at_once_s, parts);
      expect_throws<TransportError>([&] { step.combine(*first); }, at_once_s,
                                    {"the layer is unusable after a failure", "ranks disagree"});
      expect_throws<TransportError>([&] { (void)step.dispatch(step.input()); }, at_once_s,
                                    {"the layer is unusable after a failure"});
    }
  });
}

TEST_P(ExpertAgreement, OfCallsHoldsForAllThatRanksMayChooseThemselves) {
  run_way(GetParam(), deadline_s, [](World& world) {
    LayerStep step(world, {.num_sms = 4 + to_int(world.rank())});
    for (int round = 0; round < 3; ++round) {
      auto input = step.input();
      if (is_odd(world)) {  // no tokens, of a null pointer
        for (ConstTensorView* view : {&input.tokens, &input.ids, &input.weights}) {
          *view = ConstTensorView(nullptr, view->dtype, {0, view->shape[1]});
        }
      }
      const auto layout = step.dispatch(input).layout;
      const auto again = step.dispatch(input, *layout).layout;
      const auto third = step.dispatch(input, *again).layout;
      EXPECT_EQ(layout->number() + 2, third->number());
      step.combine(*third, true, true);
      step.combine(*layout);
    }
    step.layer().finalize();
  });
}

constexpr const char* in_other_calls = "; ranks may be in different calls";
constexpr double short_deadline_s = 0.7;

/// A rank that leaves before the others have come to their deadlines would be named as gone.
void stay_for_the_others() { std::this_thread::sleep_for(std::chrono::milliseconds(500)); }

TEST_P(ExpertAgreement, OfTwoLayersEndsAtTheDeadline) {
  run_way(GetParam(), short_deadline_s, [](World& world) {
    LayerStep steps[2] = {LayerStep(world), LayerStep(world)};
    const auto dispatch = [](LayerStep& step) { return step.dispatch(step.input()); };
    for (LayerStep& step : steps) (void)dispatch(step);
    expect_throws<Timeout>(
        [&] {
          (void)dispatch(steps[is_odd(world) ? 1 : 0]);
          (void)dispatch(steps[is_odd(world) ? 0 : 1]);
        },
        at_once_s, {"dispatch: rank ", "for signal >= 2", in_other_calls});
    stay_for_the_others();
  });
}

/// Threads miss the wait; a process may find that a peer is gone, whose deadline came first.
void expect_missed(const RankWay& way, const char* operation, const std::function<void()>& calls) {
  const std::string who = concat(operation, ": rank ");
  if (way.kind == RankKind::processes) return expect_throws<Error>(calls, at_once_s, {who});
  expect_throws<Timeout>(calls, at_once_s, {who, in_other_calls});
}

TEST_P(ExpertAgreement, OfABarrierAndADispatchEndsAtTheDeadline) {
  for (const bool intra_node_only : {true, false}) {
    run_way(GetParam(), short_deadline_s, [&](World& world) {
      if (world.topology().ranks_per_node == 1 && intra_node_only) return;  // nobody to wait for
      LayerStep step(world);
      const auto layout = step.dispatch(step.input()).layout;
      if (!is_odd(world)) {
        expect_missed(GetParam(), "combine", [&] { step.combine(*layout); });
      } else {
        expect_missed(GetParam(), "ep_barrier_all",
                      [&] { step.layer().ep_barrier_all({}, intra_node_only); });
      }
      stay_for_the_others();
    });
  }
}

}  // namespace
}  // namespace waybill::test
