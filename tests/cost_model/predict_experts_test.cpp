#include "waybill/cost_model/predict_experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iostream>

#include "support/expect_error.h"
#include "waybill/core/random.h"
#include "waybill/moe/simulate.h"

namespace waybill {
namespace {

using test::rejects;
using Ids = std::vector<std::vector<std::int32_t>>;

EPConfig layer(std::int32_t nodes, std::int32_t per_node, std::int64_t tokens,
               std::int64_t hidden = 7168) {
  EPConfig config;
  config.max_tokens = tokens;
  config.hidden = hidden;
  config.topk = 8;
  config.world_size = nodes * per_node;
  config.local_world_size = per_node;
  config.num_experts = 256;
  return config;
}

/// topk different experts for each of `tokens` tokens.
Ids uniform_ids(const EPConfig& config, std::int64_t tokens, std::uint64_t seed = 1) {
  Random random(seed);
  Ids ids(config.world_size);
  for (auto& rank : ids) {
    while (std::ssize(rank) < tokens * config.topk) {
      const auto id = static_cast<std::int32_t>(random.below(config.num_experts));
      const auto token = rank.end() - std::ssize(rank) % config.topk;
      if (std::find(token, rank.end(), id) == rank.end()) rank.push_back(id);
    }
  }
  return ids;
}

const ExpertCallPrediction& of(const std::vector<ExpertCallPrediction>& calls,
                               ExpertCallKind kind) {
  return calls[static_cast<std::size_t>(kind)];
}

/// What a simulated dispatch of these ids sends.
ExpertTraffic simulated(const EPConfig& config, const EPDispatchOptions& options, const Ids& ids) {
  std::vector<HostTensor> tokens;
  std::vector<HostTensor> rows;
  std::vector<ConstTensorView> token_views;
  std::vector<ConstTensorView> id_views;
  for (const auto& rank : ids) {
    const std::int64_t num = std::ssize(rank) / config.topk;
    tokens.emplace_back(config.token_dtype, Shape{num, config.hidden});
    id_views.emplace_back(rank.data(), DType::int32, Shape{num, config.topk});
  }
  for (const HostTensor& tensor : tokens) token_views.push_back(tensor.view());
  ExpertInputs inputs;
  inputs.tokens = token_views;
  inputs.exp_indices = id_views;
  return simulate_expert_dispatch(config, inputs, options).traffic;
}

class PredictedBytes : public testing::TestWithParam<std::int32_t> {};  // spare experts
INSTANTIATE_TEST_SUITE_P(SpareExperts, PredictedBytes, testing::Values(0, 2));

TEST_P(PredictedBytes, AreThoseOfTheSimulation) {
  for (const auto& [nodes, per_node] :
       std::vector<std::pair<std::int32_t, std::int32_t>>{{1, 1}, {1, 8}, {2, 1}, {4, 2}, {8, 4}}) {
    const EPConfig config = layer(nodes, per_node, 40, 256);
    Ids ids = uniform_ids(config, 40);
    ids.back().resize(ids.back().size() / 2);  // not all have as many tokens
    for (std::size_t i = 0; i < ids[0].size(); i += 3) ids[0][i] = config.num_experts;  // dropped
    const EPDispatchOptions options{.payload = EPPayload::quantized, .spare_experts = GetParam()};
    const auto calls = predict_experts(config, options, ids);
    const ExpertTraffic traffic = simulated(config, options, ids);
    const std::int64_t row = 256 + 2 * 4;
    const std::int64_t world = config.world_size;
    for (std::int64_t r = 0; r < world; ++r) {
      LinkBytes want;
      std::int64_t straight = 0;
      std::int64_t ranges = 0;
      for (std::int64_t s = 0; s < world; ++s) {
        const bool inside = r / per_node == s / per_node;
        const std::int64_t out = traffic.crossings.i64()[r * world + s];
        const std::int64_t in = traffic.crossings.i64()[s * world + r];
        (inside ? want.nvlink_out : want.network_out) += out * row;
        (inside ? want.nvlink_in : want.network_in) += in * row;
        if (!inside) {
          straight += traffic.unique_tokens_per_rank_pair.i64()[r * world + s] * row;
        }
      }
      for (std::int64_t n = 0; n < nodes; ++n)
        ranges += traffic.inter_node_ranges.i64()[r * nodes + n];
      for (const auto kind : {ExpertCallKind::grouped_dispatch, ExpertCallKind::cached_dispatch})
        EXPECT_EQ(of(calls, kind).links[r], want) << nodes << " x " << per_node;
      const LinkBytes& low = of(calls, ExpertCallKind::low_latency_dispatch).links[r];
      EXPECT_EQ(low.network_out, straight);
      // A combine sends as many rows back, of token_dtype and without scales.
      const LinkBytes& back = of(calls, ExpertCallKind::summed_combine).links[r];
      EXPECT_EQ(back.nvlink_in, want.nvlink_out / row * 512);
      EXPECT_EQ(back.network_out, want.network_in / row * 512);
      EXPECT_EQ(of(calls, ExpertCallKind::grouped_combine).links[r].network_out, back.network_out);
      // Two puts, of rows and of scales, for each range, and one more where 32 tokens are full.
      const std::int64_t puts = of(calls, ExpertCallKind::grouped_dispatch).puts[r];
      EXPECT_GE(puts, 2 * ranges);
      EXPECT_LE(puts, 2 * (ranges + 2 * (nodes - 1)));
    }
  }
}

TEST(PredictExperts, CopiesEvenRowsOutAndAreCountedAndPlannedBeforeRowsLeave) {
  const EPConfig config = layer(1, 8, 40, 256);
  Ids ids = uniform_ids(config, 40);
  for (auto& of_rank : ids) {
    for (std::size_t i = 0; i < of_rank.size(); i += 2)
      of_rank[i] = static_cast<std::int32_t>(i % 32);
  }
  const ExpertCostOptions options;
  const auto plain = predict_experts(config, {}, ids, options);
  const auto even = predict_experts(config, {.spare_experts = 2}, ids, options);
  const auto most_in = [](const ExpertCallPrediction& call) {
    return std::ranges::max_element(call.links, {}, &LinkBytes::nvlink_in)->nvlink_in;
  };
  const auto grouped = ExpertCallKind::grouped_dispatch;
  const auto cached = ExpertCallKind::cached_dispatch;
  EXPECT_LT(most_in(of(even, grouped)), most_in(of(plain, grouped)));
  const auto counting = [&](const auto& calls) {
    return of(calls, grouped).begin_seconds - of(calls, cached).begin_seconds +
           options.costs.kernel_seconds;  // of a known routing
  };
  EXPECT_NEAR(counting(even), 2 * counting(plain) + options.costs.planning_seconds(config), 1e-12);
}

TEST(PredictExperts, RowsOfSlotsAreThoseOfTheSimulation) {
  const EPConfig config = layer(1, 8, 40, 256);
  const Ids ids = uniform_ids(config, 40);
  const ExpertTraffic traffic = simulated(config, {}, ids);
  const auto calls = predict_experts(config, {}, ids);
  for (std::int64_t r = 0; r < 8; ++r) {
    std::int64_t in = 0;
    for (std::int64_t s = 0; s < 8; ++s) {
      if (s != r) in += traffic.rows_per_rank_pair.i64()[r * 8 + s] * 512;
    }
    EXPECT_EQ(of(calls, ExpertCallKind::grouped_combine).links[r].nvlink_in, in);
  }
}

/// A measured call of docs/performance/gpu_moe.md.
struct Measured {
  std::int32_t nodes, per_node;
  std::int64_t tokens;
  std::int32_t num_sms;
  ExpertCallKind kind;
  EPPayload payload;
  double us;
};

double predicted_us(const Measured& run) {
  const EPConfig config = layer(run.nodes, run.per_node, run.tokens);
  ExpertCostOptions options;
  options.costs.num_sms = run.num_sms;
  options.costs.path = ExpertPath::waiting;  // as it was when these were measured
  if (run.nodes > 1) {
    options.costs.path_bytes_per_second = 33e9;
    options.costs.combine_block_bytes_per_second = 45e9;  // with fewer warps than today
  }
  const Ids ids = uniform_ids(config, run.tokens);
  return of(predict_experts(config, {.payload = run.payload}, ids, options), run.kind).seconds *
         1e6;
}

void expect_near(std::span<const Measured> runs, double share) {
  for (const Measured& run : runs) {
    const double us = predicted_us(run);
    std::cout << run.nodes << " x " << run.per_node << ", " << run.tokens << " tokens, "
              << run.num_sms << " SMs, " << to_string(run.kind) << ": " << us << " us, measured "
              << run.us << "\n";
    EXPECT_LE(std::abs(us / run.us - 1), share)
        << run.nodes << " x " << run.per_node << ", " << run.tokens << " tokens, " << run.num_sms
        << " SMs, " << to_string(run.kind) << ": " << us << " us, measured " << run.us;
  }
}

constexpr auto grouped = ExpertCallKind::grouped_dispatch;
constexpr auto cached = ExpertCallKind::cached_dispatch;
constexpr auto unsummed = ExpertCallKind::grouped_combine;
constexpr auto compact = ExpertCallKind::compact_combine;
constexpr auto summed = ExpertCallKind::summed_combine;
constexpr auto low = ExpertCallKind::low_latency_dispatch;
const auto plain = EPPayload::plain;
const auto float8 = EPPayload::scaled;

TEST(PredictExperts, OneNodeAsMeasured) {
  const Measured runs[] = {
      {1, 8, 4096, 16, grouped, plain, 878},  {1, 8, 4096, 32, grouped, plain, 861},
      {1, 8, 4096, 16, cached, plain, 848},   {1, 8, 4096, 16, cached, float8, 455},
      {1, 4, 4096, 32, grouped, plain, 515},  {1, 4, 4096, 16, grouped, plain, 696},
      {1, 4, 4096, 16, cached, plain, 490},   {1, 4, 4096, 16, cached, float8, 267},
      {1, 4, 4096, 32, summed, plain, 726},   {1, 4, 4096, 32, unsummed, plain, 1100},
      {1, 8, 4096, 16, compact, plain, 848},  {1, 4, 4096, 16, compact, plain, 499},
      {1, 8, 128, 132, compact, plain, 41.4}, {1, 8, 128, 132, cached, plain, 44.1},
      {1, 8, 128, 132, cached, float8, 33.2}, {1, 4, 128, 132, low, plain, 38.0},
  };
  expect_near(runs, 0.2);
}

// 29 November 2026. Combines with 8 SMs are what combine_block_bytes_per_second was taken from, one
// token what kernel_seconds was.
TEST(PredictExperts, TwoRanksAsMeasured) {
  const Measured runs[] = {
      {1, 2, 4096, 8, grouped, plain, 1277},  {1, 2, 4096, 16, grouped, plain, 664},
      {1, 2, 4096, 32, grouped, plain, 361},  {1, 2, 4096, 8, cached, plain, 317},
      {1, 2, 4096, 16, cached, plain, 186},   {1, 2, 4096, 16, cached, float8, 109},
      {1, 2, 4096, 8, compact, plain, 270},   {1, 2, 4096, 12, compact, plain, 195},
      {1, 2, 4096, 32, compact, plain, 187},  {1, 2, 4096, 32, summed, plain, 372},
      {1, 2, 4096, 32, unsummed, plain, 732}, {1, 2, 128, 16, low, plain, 40.3},
      {1, 2, 128, 32, low, plain, 37.2},      {1, 2, 128, 132, low, plain, 26.6},
      {1, 2, 128, 16, cached, plain, 20.8},   {1, 2, 128, 16, cached, float8, 18.7},
      {1, 2, 128, 16, compact, plain, 16.4},  {1, 2, 128, 132, summed, plain, 22.6},
      {1, 2, 1, 16, low, plain, 19.5},        {1, 2, 1, 16, cached, plain, 14.4},
      {1, 2, 1, 16, compact, plain, 10.4},    {1, 2, 1, 16, summed, plain, 14.6},
  };
  expect_near(runs, 0.2);
}

TEST(PredictExperts, LogicalNodesAsMeasured) {
  const Measured runs[] = {
      {2, 1, 4096, 16, grouped, plain, 1162}, {2, 1, 4096, 32, grouped, plain, 676},
      {2, 1, 4096, 16, cached, plain, 792},   {2, 1, 4096, 32, cached, plain, 487},
      {2, 1, 4096, 16, compact, plain, 906},  {2, 1, 4096, 32, compact, plain, 522},
      {2, 1, 128, 32, cached, plain, 55.5},   {2, 1, 128, 32, compact, plain, 56},
      {2, 2, 4096, 32, grouped, plain, 795},  {2, 2, 4096, 32, cached, plain, 737},
      {2, 2, 4096, 32, compact, plain, 741},
  };
  expect_near(runs, 0.25);
}

TEST(PredictExperts, NetworkOfACardBoundsEightNodes) {
  const EPConfig config = layer(8, 8, 512);
  const Ids ids = uniform_ids(config, 512);
  ExpertCostOptions options;
  options.costs.path = ExpertPath::pipelined;
  const auto calls = predict_experts(config, {}, ids, options);
  const ExpertCallPrediction& call = of(calls, cached);
  std::int64_t most = 0;
  for (const LinkBytes& links : call.links)
    most = std::max({most, links.network_in, links.network_out});
  EXPECT_NEAR(call.network_seconds, static_cast<double>(most) / 50e9, call.network_seconds * 0.02);
  EXPECT_GT(call.network_seconds, call.nvlink_seconds);
  EXPECT_GT(of(calls, low).links[0].network_out, call.links[0].network_out);
  // Puts that wait, and rows that wait for the rest of their node, take longer.
  options.costs.path = ExpertPath::waiting;
  const auto waiting = predict_experts(config, {}, ids, options);
  for (std::size_t k = 0; k < 5; ++k) EXPECT_GT(waiting[k].seconds, calls[k].seconds);
}

TEST(PredictExperts, GrowsWithWhatCosts) {
  const EPConfig config = layer(4, 2, 64);
  const Ids ids = uniform_ids(config, 64);
  ExpertCostOptions usual;
  usual.costs.path = ExpertPath::waiting;  // nothing is hidden behind anything
  const auto base = predict_experts(config, {}, ids, usual);
  const auto longer = [&](auto change) {
    ExpertCostOptions options = usual;
    change(options);
    const auto calls = predict_experts(config, {}, ids, options);
    for (std::size_t k = 0; k < calls.size(); ++k) {
      EXPECT_GE(calls[k].seconds, base[k].seconds);
      EXPECT_EQ(calls[k].links, base[k].links);
    }
    EXPECT_GT(calls[0].seconds, base[0].seconds);
  };
  longer([](auto& o) { o.links.network_bytes_per_second /= 2; });
  longer([](auto& o) { o.step.network_message_seconds *= 4; });
  longer([](auto& o) { o.step.phase_seconds *= 2; });
  longer([](auto& o) { o.costs.kernel_seconds *= 2; });
  longer([](auto& o) { o.costs.count_seconds *= 2; });
  longer([](auto& o) { o.costs.num_sms = 4; });
}

TEST(PredictExperts, NoTokensTakeWhatACallTakes) {
  const EPConfig config = layer(2, 2, 16);
  const auto calls = predict_experts(config, {}, Ids(4));
  for (const ExpertCallPrediction& call : calls) {
    EXPECT_EQ(call.network_seconds == 0 || call.kind == low, true);
    EXPECT_EQ(call.nvlink_seconds, 0);
    EXPECT_GT(call.seconds, 11e-6);
    EXPECT_LT(call.seconds, 100e-6);
  }
}

TEST(PredictExperts, WrongInputsAreNamed) {
  const EPConfig config = layer(1, 2, 2);
  const Ids ids = uniform_ids(config, 2);
  const auto refuses = [&](const Ids& wrong, const ExpertCostOptions& options, const char* text) {
    EXPECT_TRUE(rejects([&] { (void)predict_experts(config, {}, wrong, options); }, {text}));
  };
  refuses({{}}, {}, "ids has 1 entries, expected one per rank: 2");
  refuses({{1, 2, 3}, {}}, {}, "ids[0] has 3 entries");
  refuses({{1, 2, 3, 4, 5, 6, 7, 257}, {}}, {},
          "ids[0]: token 0, topk slot 7 has expert 257, expected 0..256");
  refuses(ids, {.links = {.network_bytes_per_second = 0}}, "network");
  refuses(ids, {.message_seconds = -1}, "message_seconds");
  refuses(ids, {.costs = {.num_sms = 0}}, "costs.num_sms = 0, expected >= 1");
  refuses(ids, {.costs = {.sum_bytes_per_second = 0}}, "costs.sum_bytes_per_second = 0");
  refuses(ids, {.costs = {.put_seconds = NAN}}, "costs.put_seconds");
  refuses(ids, {.push_combine = true}, "push_combine = true, expected false");
}

}  // namespace
}  // namespace waybill
