// What must hold for every plan, on many random ones; and the largest world in time.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "cost_model_cases.h"
#include "waybill/core/random.h"
#include "waybill/cost_model/predict_step.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/planner/planner.h"
#include "waybill/planner/static_plans.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill {
namespace {

constexpr int num_cases = 60;

AttentionPlan random_plan(std::uint64_t seed) {
  Random random(seed);
  PlannerOptions options;
  options.world_size = static_cast<std::int32_t>(1 + random.below(24));
  options.tokens_per_rank = 1 + random.below(3000);
  options.model = {.q_hidden = 1 + random.below(512), .kv_hidden = 1 + random.below(256)};
  if (random.below(3) == 0) options.mask.window = 1 + random.below(2000);
  if (random.below(4) == 0) options.kv_layout = KvLayout::per_query;
  options.hardware.ranks_per_node = static_cast<std::int32_t>(1 + random.below(9));
  if (seed % 4 == 0) options.mask = {.window = 0, .kind = MaskKind::full};
  std::vector<std::int64_t> lengths;
  for (std::int64_t left = options.world_size * options.tokens_per_rank; left > 0;) {
    const std::int64_t most = random.below(4) == 0 ? 4 * options.tokens_per_rank : 200;
    lengths.push_back(std::min(left, 1 + random.below(most)));
    left -= lengths.back();
  }
  return plan_attention(lengths, options);
}

std::vector<TransferMode> transfers() {
  return {TransferMode::direct, TransferMode::once_per_node, TransferMode::relay};
}

std::int64_t sum(const std::vector<LinkBytes>& links, std::int64_t LinkBytes::*field) {
  std::int64_t total = 0;
  for (const LinkBytes& link : links) total += link.*field;
  return total;
}

TEST(PredictionProperties, BytesAreThePlansOwn) {
  for (std::uint64_t seed = 0; seed < num_cases; ++seed) {
    const AttentionPlan plan = random_plan(seed);
    StepOptions options = StepOptions::of(plan);
    ASSERT_EQ(options.transfer, TransferMode::relay);
    const StepPredictor predictor(plan);
    EXPECT_EQ(predictor.predict(options).phase(StepPhase::dispatch).links, plan.relay.links)
        << "seed " << seed;
    options.transfer = TransferMode::direct;
    const StepPrediction direct = predictor.predict(options);
    EXPECT_EQ(direct.phase(StepPhase::dispatch).links, plan.links) << "seed " << seed;
    EXPECT_EQ(direct.work, plan.work) << "seed " << seed;
    options.transfer = TransferMode::once_per_node;
    const auto once = predictor.predict(options).phase(StepPhase::dispatch).links;
    EXPECT_LE(sum(once, &LinkBytes::network_in), sum(plan.links, &LinkBytes::network_in));
    EXPECT_EQ(sum(once, &LinkBytes::network_in), sum(once, &LinkBytes::network_out));
    EXPECT_EQ(sum(once, &LinkBytes::nvlink_in), sum(once, &LinkBytes::nvlink_out));
  }
}

// Over the network, a row of KV enters a node once: as often as with the planner's own schedule.
TEST(PredictionProperties, OnceANodeMeansOnce) {
  for (std::uint64_t seed = 0; seed < num_cases; ++seed) {
    const AttentionPlan plan = random_plan(seed);
    StepOptions options = StepOptions::of(plan);
    options.transfer = TransferMode::once_per_node;
    const auto links = predict_step(plan, options).phase(StepPhase::dispatch).links;
    EXPECT_EQ(sum(links, &LinkBytes::network_in), sum(plan.relay.links, &LinkBytes::network_in))
        << "seed " << seed;
  }
}

TEST(PredictionProperties, PhasesFitTogether) {
  for (std::uint64_t seed = 0; seed < num_cases; ++seed) {
    const AttentionPlan plan = random_plan(seed);
    StepOptions options = StepOptions::of(plan);
    for (const TransferMode transfer : transfers()) {
      options.transfer = transfer;
      const StepPrediction step = predict_step(plan, options);
      double bound = 0;
      double spent = 0;
      for (std::size_t i = 0; i < step.phases.size(); ++i) {
        const PhasePrediction& phase = step.phases[i];
        bound += phase.slowest.seconds;
        spent += step.path[i].seconds;
        EXPECT_LE(phase.slowest.document_amount, phase.slowest.amount);
        for (std::size_t r = 0; r < phase.end.size(); ++r) {
          EXPECT_GE(phase.end[r] - phase.begin[r], phase.seconds[r] * (1 - 1e-9) - 1e-15);
          EXPECT_LE(phase.seconds[r], phase.slowest.seconds);
          if (i > 0) {
            EXPECT_EQ(phase.begin[r], step.phases[i - 1].end[r]);
          }
        }
      }
      EXPECT_NEAR(spent, step.seconds, 1e-9 * step.seconds) << "the path is the whole step";
      EXPECT_LT(step.forward_seconds, step.seconds);
      // Without forwarding, phases that everybody begins together are the worst there is.
      if (transfer == TransferMode::direct) {
        EXPECT_LE(step.seconds, bound * (1 + 1e-9));
      }
    }
  }
}

TEST(PredictionProperties, MoreOfAnythingIsNeverSlower) {
  for (std::uint64_t seed = 0; seed < num_cases; ++seed) {
    const AttentionPlan plan = random_plan(seed);
    const StepPredictor predictor(plan);
    for (const TransferMode transfer : transfers()) {
      StepOptions options = StepOptions::of(plan);
      options.transfer = transfer;
      options.costs.forward_chunk_bytes = 20000;
      const double before = predictor.predict(options).seconds * (1 + 1e-12);
      const auto better = [&](const auto& change) {
        StepOptions changed = options;
        change(changed);
        return predictor.predict(changed).seconds;
      };
      EXPECT_LE(better([](auto& o) { o.hardware.nvlink_bytes_per_second *= 1.3; }), before);
      EXPECT_LE(better([](auto& o) { o.hardware.network_bytes_per_second *= 1.3; }), before);
      EXPECT_LE(better([](auto& o) { o.hardware.message_seconds /= 2; }), before);
      EXPECT_LE(better([](auto& o) { o.costs.network_message_seconds /= 2; }), before);
      EXPECT_LE(better([](auto& o) { o.costs.phase_seconds /= 2; }), before);
      EXPECT_LE(better([](auto& o) { o.costs.forward_chunk_bytes /= 2; }), before);
      EXPECT_LE(better([](auto& o) { o.costs.forward_flops_per_second *= 1.3; }), before);
      EXPECT_LE(better([](auto& o) { o.costs.backward_flops_per_second *= 1.3; }), before);
    }
  }
}

// The dispatch takes the plan's own limit time, and beyond it only what does not depend on bytes:
// the start, peers, and a piece for each rank on the way.
TEST(PredictionProperties, DispatchStaysNearTheLimit) {
  for (std::uint64_t seed = 0; seed < num_cases; ++seed) {
    const AttentionPlan plan = random_plan(seed);
    StepOptions options = StepOptions::of(plan);
    options.costs.forward_chunk_bytes = 4096;
    for (const TransferMode transfer : {TransferMode::direct, TransferMode::relay}) {
      const bool relay = transfer == TransferMode::relay;
      options.transfer = relay ? TransferMode::relay : TransferMode::direct;
      const PhasePrediction dispatch = predict_step(plan, options).phase(StepPhase::dispatch);
      const double end = *std::max_element(dispatch.end.begin(), dispatch.end.end());
      const double limit = plan.limit_seconds(transfer);
      const double peer =
          std::max(options.hardware.message_seconds, options.costs.network_message_seconds);
      const double piece = 4096 / options.hardware.network_bytes_per_second + peer;
      const double most = limit + options.costs.phase_seconds + peer * plan.plan.world_size +
                          (relay ? plan.relay.num_stages * piece : 0);
      EXPECT_GE(end, limit + options.costs.phase_seconds) << "seed " << seed;
      EXPECT_LE(end, most) << "seed " << seed;
    }
  }
}

// Unless told, a home's rows are cut into sixteen pieces.
TEST(PredictionProperties, PiecesAreTheDispatchersOwn) {
  QkvPlan plan;
  plan.world_size = 3;
  plan.rank_shard_offsets = {0, 2, 2, 2};
  plan.shard_len = {65536, 1};
  plan.q_dst = {1, 2};
  plan.doc_shard_offsets = {0, 2};
  plan.doc_shards = {0, 1};
  RelaySchedule relay;
  relay.links.resize(3);
  relay.hops = {{.src_rank = 0, .dst_rank = 1, .shard = 0, .num_rows = 65536},
                {.src_rank = 1, .dst_rank = 2, .shard = 0, .num_rows = 65536, .after = 0},
                {.src_rank = 0, .dst_rank = 2, .shard = 1, .num_rows = 1}};
  const StepPredictor predictor(plan, &relay);
  StepOptions options;
  options.transfer = TransferMode::relay;
  const StepPrediction unsaid = predictor.predict(options);
  options.costs.forward_chunk_bytes = std::int64_t{2} << 20;
  EXPECT_EQ(unsaid.phases[0], predictor.predict(options).phases[0]);
  options.costs.forward_chunk_bytes *= 2;
  EXPECT_LT(unsaid.phases[0].end[2], predictor.predict(options).phases[0].end[2]);
}

TEST(PredictionProperties, RemediesAreStepsWithOneChange) {
  const AttentionPlan plan = random_plan(3);
  const StepPredictor predictor(plan);
  StepOptions options = StepOptions::of(plan);
  options.transfer = TransferMode::direct;
  const StepPrediction step = predictor.predict(options);
  const std::vector<Remedy> remedies = step_remedies(predictor, step);
  ASSERT_GE(remedies.size(), 4U);
  EXPECT_TRUE(std::is_sorted(remedies.begin(), remedies.end(),
                             [](auto& a, auto& b) { return a.seconds < b.seconds; }));
  for (const Remedy& remedy : remedies) {
    if (remedy.kind == RemedyKind::relay) {
      EXPECT_EQ(remedy.seconds, predict_step(plan).seconds);
    } else if (remedy.kind == RemedyKind::double_nvlink) {
      options.hardware.nvlink_bytes_per_second *= 2;
      EXPECT_EQ(remedy.seconds, predictor.predict(options).seconds);
      EXPECT_LE(remedy.seconds, step.seconds);
    }
  }
}

TEST(PredictionProperties, ARelaySaysWhatItGains) {
  const AttentionPlan plan = random_plan(3);
  const StepPredictor predictor(plan);
  const StepPrediction step = predict_step(plan);
  ASSERT_EQ(step.options.transfer, TransferMode::relay);
  int found = 0;
  for (const Remedy& remedy : step_remedies(predictor, step)) {
    EXPECT_NE(remedy.kind, RemedyKind::relay);
    if (remedy.kind != RemedyKind::no_relay) continue;
    ++found;
    StepOptions options = step.options;
    const bool nodes = step.world_size > options.hardware.ranks_per_node;
    options.transfer = nodes ? TransferMode::once_per_node : TransferMode::direct;
    EXPECT_EQ(remedy.seconds, predictor.predict(options).seconds);
  }
  EXPECT_EQ(found, 1);
}

TEST(PredictionProperties, StaticPlansHaveNoScheduleButPredictions) {
  const std::vector<std::int64_t> lengths(16, 1000);
  const QkvPlan plan = per_document_plan(lengths, {.tokens_per_rank = 2000});
  const StepPredictor predictor(plan);
  EXPECT_FALSE(predictor.has_relay());
  const StepPrediction step = predictor.predict({});
  EXPECT_EQ(step.work, rank_work(plan));
  EXPECT_EQ(step.phase(StepPhase::output).slowest.resource, StepResource::nothing)
      << "queries stay";
}

// Takes about half a second on one slow core; a quadratic step would take minutes.
TEST(PredictionProperties, LargestWorldInTime) {
  const auto lengths =
      sample_documents(length_distribution("prolong"), std::int64_t{4096} * 65536, 0);
  ASSERT_GE(lengths.size(), 80000U);
  const AttentionPlan plan = plan_attention(lengths, {.world_size = 4096});
  for (const TransferMode transfer : transfers()) {
    StepOptions options = StepOptions::of(plan);
    options.transfer = transfer;
    const auto start = std::chrono::steady_clock::now();
    const StepPrediction step = predict_step(plan, options);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    RecordProperty(std::string(to_string(transfer)), std::to_string(took.count()));
    EXPECT_LT(took.count(), 15) << to_string(transfer);
    EXPECT_GT(step.seconds, 0);
  }
}

}  // namespace
}  // namespace waybill
