// Predictions against what 4 and 8 x H200 took: docs/performance/prediction.md has the same
// figures.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/packed_plan.h"
#include "waybill/cost_model/predict_step.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/generators.h"

namespace waybill {
namespace {

// Every rank sends as many rows to each, itself included; in four pieces.
QkvPlan uniform(std::int32_t world_size, std::int64_t mib, std::int64_t row_bytes) {
  QkvPlan plan;
  plan.world_size = world_size;
  plan.rank_shard_offsets = {0};
  plan.doc_shard_offsets = {0};
  for (std::int32_t w = 0; w < world_size; ++w) {
    for (std::int32_t s = 0; s < 4 * world_size; ++s) {
      plan.doc_shards.push_back(static_cast<std::int32_t>(plan.num_shards()));
      plan.shard_len.push_back((mib << 20) / row_bytes / (4 * world_size));
      plan.q_dst.push_back(s % world_size);
      plan.doc_shard_offsets.push_back(plan.num_shards());
    }
    plan.rank_shard_offsets.push_back(plan.num_shards());
  }
  return plan;
}

// The phase that moves as many rows as the measured call: rows of Q alone for uniform rows.
PhasePrediction uniform_phase(std::int32_t world_size, std::int64_t mib) {
  return predict_step(uniform(world_size, mib, 8192)).phase(StepPhase::output_gradient);
}

PhasePrediction documents_phase(std::int32_t world_size, const char* distribution,
                                StepPhase phase) {
  const auto lengths = sample_documents(length_distribution(distribution), world_size * 65536, 1);
  return predict_step(test::packed_plan(lengths, {.world_size = world_size})).phase(phase);
}

std::int64_t most_bytes(const PhasePrediction& phase) {
  std::int64_t most = 0;
  for (const LinkBytes& link : phase.links) most = std::max({most, link.in(), link.out()});
  return most;
}

/// K and V of the plan with the largest ratio of bytes out to bytes in, of 20 draws, as
/// waybill_bench_gpu_sequence takes it; rows of Q too small to count.
PhasePrediction skewed_phase(std::int32_t world_size, const char* distribution,
                             TransferMode transfer) {
  AttentionPlan worst;
  double most = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const auto lengths =
        sample_documents(length_distribution(distribution), world_size * 65536, seed);
    PlannerOptions options;
    options.world_size = world_size;
    options.hardware.ranks_per_node = world_size;
    AttentionPlan plan = plan_attention(lengths, options);
    const auto in = plan.bytes_in();
    const auto out = plan.bytes_out();
    const double skew = static_cast<double>(*std::ranges::max_element(out)) /
                        static_cast<double>(*std::ranges::max_element(in));
    if (skew <= most) continue;
    most = skew;
    worst = std::move(plan);
  }
  StepOptions options = StepOptions::of(worst);
  options.model.q_hidden = 1;
  options.transfer = transfer;
  return predict_step(worst, options).phase(StepPhase::dispatch);
}

/// A call: wire MiB of the busiest rank, and microseconds at the number of multiprocessors that was
/// the fastest of those measured, up to 32.
struct MeasuredCall {
  const char* name;
  PhasePrediction predicted;
  double mib;
  double us;
};

void expect_near(const std::vector<MeasuredCall>& calls) {
  for (const MeasuredCall& call : calls) {
    EXPECT_NEAR(static_cast<double>(most_bytes(call.predicted)) / (1 << 20), call.mib, 1)
        << call.name << ": the same rows as were measured";
    const double begin = *std::ranges::min_element(call.predicted.begin);
    // With others forwarding the slowest rank waits; by itself it would not.
    const double us = begin > 0 ? call.predicted.slowest.seconds * 1e6
                                : *std::ranges::max_element(call.predicted.end) * 1e6;
    testing::Test::RecordProperty(std::string(call.name) + "_us", std::to_string(us));
    EXPECT_NEAR(us / call.us, 1, 0.15) << call.name << ": " << us << " us";
  }
}

TEST(Measured, FourRanksWithinFifteenPercent) {
  expect_near(
      {{"empty", uniform_phase(4, 0), 0, 11.4},
       {"uniform_1", uniform_phase(4, 1), 0.75, 14.4},
       {"uniform_8", uniform_phase(4, 8), 6, 31.9},
       {"uniform_64", uniform_phase(4, 64), 48, 160},
       {"uniform_256", uniform_phase(4, 256), 192, 592},
       {"wlbllm_dispatch", documents_phase(4, "wlbllm", StepPhase::dispatch), 1120, 3287},
       {"wlbllm_gradient", documents_phase(4, "wlbllm", StepPhase::kv_gradient), 768, 2455},
       {"prolong_dispatch", documents_phase(4, "prolong", StepPhase::dispatch), 818, 2366},
       {"prolong_gradient", documents_phase(4, "prolong", StepPhase::kv_gradient), 424, 1306},
       {"wlbllm_skewed", skewed_phase(4, "wlbllm", TransferMode::direct), 506, 1458},
       {"prolong_skewed", skewed_phase(4, "prolong", TransferMode::direct), 242, 752},
       {"wlbllm_relay", skewed_phase(4, "wlbllm", TransferMode::relay), 187, 815},
       {"prolong_relay", skewed_phase(4, "prolong", TransferMode::relay), 97, 420}});
}

TEST(Measured, EightRanksWithinFifteenPercent) {
  expect_near(
      {{"empty", uniform_phase(8, 0), 0, 12.2},
       {"uniform_1", uniform_phase(8, 1), 0.875, 15.8},
       {"uniform_8", uniform_phase(8, 8), 7, 36.1},
       {"uniform_64", uniform_phase(8, 64), 56, 188.5},
       {"uniform_256", uniform_phase(8, 256), 224, 706.5},
       {"wlbllm_dispatch", documents_phase(8, "wlbllm", StepPhase::dispatch), 2224, 6357},
       {"wlbllm_gradient", documents_phase(8, "wlbllm", StepPhase::kv_gradient), 1776, 5291},
       {"prolong_dispatch", documents_phase(8, "prolong", StepPhase::dispatch), 874, 2591},
       {"prolong_gradient", documents_phase(8, "prolong", StepPhase::kv_gradient), 501, 1606},
       {"wlbllm_skewed", skewed_phase(8, "wlbllm", TransferMode::direct), 688, 1992},
       {"prolong_skewed", skewed_phase(8, "prolong", TransferMode::direct), 994, 2900},
       {"wlbllm_relay", skewed_phase(8, "wlbllm", TransferMode::relay), 143, 643},
       {"prolong_relay", skewed_phase(8, "prolong", TransferMode::relay), 250, 1113}});
}

}  // namespace
}  // namespace waybill
