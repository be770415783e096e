// Predictions against what 4 x H200 took: docs/performance/prediction.md has the same figures.
#include <gtest/gtest.h>

#include <algorithm>

#include "waybill/json/length_distribution_json.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/document_plan.h"
#include "waybill/routing/length_distribution.h"
#include "waybill/timing/predict_step.h"

namespace waybill {
namespace {

constexpr std::int32_t world_size = 4;

// Every rank sends as many rows to each, itself included; in four pieces.
QkvPlan uniform(std::int64_t mib, std::int64_t row_bytes) {
  QkvPlan plan;
  plan.world_size = world_size;
  plan.rank_shard_offsets = {0};
  plan.doc_shard_offsets = {0};
  for (std::int32_t w = 0; w < world_size; ++w) {
    for (std::int32_t s = 0; s < 16; ++s) {
      plan.doc_shards.push_back(static_cast<std::int32_t>(plan.num_shards()));
      plan.shard_len.push_back((mib << 20) / row_bytes / 16);
      plan.q_dst.push_back(s % world_size);
      plan.doc_shard_offsets.push_back(plan.num_shards());
    }
    plan.rank_shard_offsets.push_back(plan.num_shards());
  }
  return plan;
}

// The phase that moves as many rows as the measured call: rows of Q alone for uniform rows.
PhasePrediction uniform_phase(std::int64_t mib) {
  return predict_step(uniform(mib, 8192)).phase(StepPhase::output_gradient);
}

PhasePrediction documents_phase(const char* distribution, StepPhase phase) {
  const auto lengths = sample_documents(length_distribution(distribution), world_size * 65536, 1);
  return predict_step(plan_documents(lengths, {.world_size = world_size})).phase(phase);
}

std::int64_t most_bytes(const PhasePrediction& phase) {
  std::int64_t most = 0;
  for (const LinkBytes& link : phase.links) most = std::max({most, link.in(), link.out()});
  return most;
}

/// K and V of the plan with the largest ratio of bytes out to bytes in, of 20 draws, as
/// waybill_bench_gpu_sequence takes it; rows of Q too small to count.
PhasePrediction skewed_phase(const char* distribution, StepTransfer transfer) {
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

/// A call of the second run: wire MiB of the busiest rank, and microseconds at the number of
/// multiprocessors that were fastest of those measured, up to 32. Skewed ones: of the third run.
struct MeasuredCall {
  const char* name;
  PhasePrediction predicted;
  double mib;
  double us;
};

TEST(Measured, WithinFifteenPercent) {
  const MeasuredCall calls[] = {
      {"empty", uniform_phase(0), 0, 11.4},
      {"uniform_1", uniform_phase(1), 0.75, 14.4},
      {"uniform_8", uniform_phase(8), 6, 31.9},
      {"uniform_64", uniform_phase(64), 48, 160},
      {"uniform_256", uniform_phase(256), 192, 592},
      {"wlbllm_dispatch", documents_phase("wlbllm", StepPhase::dispatch), 1120, 3287},
      {"wlbllm_gradient", documents_phase("wlbllm", StepPhase::kv_gradient), 768, 2455},
      {"prolong_dispatch", documents_phase("prolong", StepPhase::dispatch), 818, 2366},
      {"prolong_gradient", documents_phase("prolong", StepPhase::kv_gradient), 424, 1306},
      {"wlbllm_skewed", skewed_phase("wlbllm", StepTransfer::direct), 506, 1458},
      {"prolong_skewed", skewed_phase("prolong", StepTransfer::direct), 242, 752},
      {"wlbllm_relay", skewed_phase("wlbllm", StepTransfer::relay), 187, 815},
      {"prolong_relay", skewed_phase("prolong", StepTransfer::relay), 97, 420}};
  for (const MeasuredCall& call : calls) {
    EXPECT_NEAR(static_cast<double>(most_bytes(call.predicted)) / (1 << 20), call.mib, 1)
        << call.name << ": the same rows as were measured";
    const double begin = *std::ranges::min_element(call.predicted.begin);
    // With others forwarding the slowest rank waits; by itself it would not.
    const double us = begin > 0 ? call.predicted.slowest.seconds * 1e6
                                : *std::ranges::max_element(call.predicted.end) * 1e6;
    RecordProperty(std::string(call.name) + "_us", std::to_string(us));
    EXPECT_NEAR(us / call.us, 1, 0.15) << call.name << ": " << us << " us";
  }
}

}  // namespace
}  // namespace waybill
