// Ulysses by hand: bytes, times, repeated heads, groups and nodes.
#include "waybill/cost_model/predict_ulysses.h"

#include <gtest/gtest.h>

#include "cost_model_cases.h"
#include "waybill/core/error.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/routing/generators.h"

namespace waybill {
namespace {

using Lengths = std::vector<std::int64_t>;

/// 4 heads of Q and one of K and V, of 2 elements of 2 bytes; 50 and 20 pairs a second. See
/// round_options for the links.
StepOptions four_heads() {
  StepOptions options = test::round_options();
  options.model = {.q_hidden = 8, .kv_hidden = 2};
  options.costs.forward_flops_per_second = 50 * 4 * 8;
  options.costs.backward_flops_per_second = 20 * 10 * 8;
  return options;
}

StepPrediction predicted(const Lengths& lengths, const StaticPlanOptions& groups,
                         const StepOptions& options) {
  return predict_ulysses(lengths, groups, 2, options);
}

TEST(PredictUlysses, EveryPhaseOfTwoRanksByHand) {
  // 130 tokens, 65 a rank. A rank has 2 heads of Q, 8 bytes a row, and the KV head, 8 bytes of K
  // and V: one rank too many for it.
  const StepPrediction step =
      predicted({100, 30}, {.world_size = 2, .tokens_per_rank = 65, .degree = 2}, four_heads());
  EXPECT_EQ(step.work, (Lengths{2758, 2757})) << "5050 + 465, halved";
  const double message = 3;
  const double phase = 7;
  const double q = 65 * 8 / 10. + message + phase;
  const double qkv = 65 * 16 / 10. + message + phase;
  double end = qkv;
  const auto expect_end = [&](StepPhase which) {
    EXPECT_DOUBLE_EQ(step.phase(which).end[0], end) << to_string(which);
  };
  expect_end(StepPhase::dispatch);
  EXPECT_DOUBLE_EQ(step.phase(StepPhase::attention).end[1], end + 2757 / 50.);
  end += 2758 / 50.;
  expect_end(StepPhase::attention);
  end += q;
  expect_end(StepPhase::output);
  EXPECT_DOUBLE_EQ(step.forward_seconds, end);
  end += q;
  expect_end(StepPhase::output_gradient);
  end += 2758 / 20.;
  expect_end(StepPhase::attention_gradient);
  end += q;
  expect_end(StepPhase::q_gradient);
  end += q;  // dK and dV have as many bytes as dQ here; all are pushed, none pulled
  expect_end(StepPhase::kv_gradient);
  EXPECT_DOUBLE_EQ(step.seconds, end);
  const StepCause& longest = step.bottleneck();
  EXPECT_EQ(longest.phase, StepPhase::attention_gradient);
  EXPECT_EQ(longest.amount, 2758);
  EXPECT_EQ(longest.document, 0);
  EXPECT_EQ(longest.document_amount, 2525);
  EXPECT_EQ(step.path.front().amount, 65 * 16);
  EXPECT_EQ(step.path.front().document, -1) << "all rows travel";
}

TEST(PredictUlysses, RowsOverNodesThatDoNotDivide) {
  // 10 tokens: 3, 3, 2, 2 rows. A head of Q is 4 bytes a row; K and V of the one KV head, which all
  // four ranks get, 8.
  const StepPrediction step =
      predicted({10}, {.world_size = 4, .tokens_per_rank = 3, .degree = 4}, four_heads());
  const auto links = [&](StepPhase phase, int rank) { return step.phase(phase).links[rank]; };
  EXPECT_EQ(links(StepPhase::dispatch, 0),
            (LinkBytes{.nvlink_in = 36, .nvlink_out = 36, .network_in = 48, .network_out = 72}));
  EXPECT_EQ(links(StepPhase::dispatch, 3),
            (LinkBytes{.nvlink_in = 24, .nvlink_out = 24, .network_in = 72, .network_out = 48}));
  EXPECT_EQ(links(StepPhase::output, 0),
            (LinkBytes{.nvlink_in = 12, .nvlink_out = 12, .network_in = 24, .network_out = 16}));
  EXPECT_EQ(links(StepPhase::kv_gradient, 0),
            (LinkBytes{.nvlink_in = 24, .nvlink_out = 24, .network_in = 48, .network_out = 32}));
  // Over the network 2 bytes a second, 5 seconds a peer.
  EXPECT_DOUBLE_EQ(step.phase(StepPhase::dispatch).seconds[0], 72 / 2. + 2 * 5 + 7);
}

TEST(PredictUlysses, DocumentsLieOnTheGroupInWhichTheyBegin) {
  const StaticPlanOptions groups{.world_size = 4, .tokens_per_rank = 10, .degree = 2};
  StepOptions options = four_heads();
  const StepPrediction step = predicted({15, 15, 5}, groups, options);
  EXPECT_EQ(step.work, (Lengths{120, 120, 8, 7}));
  EXPECT_EQ(step.phase(StepPhase::output).links[0].in(), 15 * 8);
  EXPECT_EQ(step.phase(StepPhase::output).links[3].in(), 2 * 8);
  options.mask = {.window = 1};
  EXPECT_EQ(predicted({15, 15, 5}, groups, options).work, (Lengths{15, 15, 3, 2}));
  options.mask = {.kind = MaskKind::full};
  options.hardware.row_pairs = 2;  // of the kernel, for each row of all heads
  EXPECT_EQ(predicted({15, 15, 5}, groups, options).work, (Lengths{255, 255, 18, 17}));
}

TEST(PredictUlysses, NothingToDo) {
  const StaticPlanOptions one{.world_size = 1, .tokens_per_rank = 10, .degree = 1};
  const StepPrediction alone = predicted({10}, one, four_heads());
  EXPECT_DOUBLE_EQ(alone.seconds, 55 / 50. + 55 / 20. + 5 * 7) << "phases in which nothing moves";
  const StepPrediction empty = predicted({}, {.world_size = 2, .degree = 2}, four_heads());
  EXPECT_EQ(empty.work, (Lengths{0, 0}));
  EXPECT_EQ(empty.bottleneck().resource, StepResource::nothing);
}

TEST(UlyssesHeads, DivideOrAreRepeated) {
  const HeadCounts heads{32, 8};
  EXPECT_EQ(heads_of({.q_hidden = 4096, .kv_hidden = 1024}, 128), heads);
  EXPECT_EQ(heads_of({.q_hidden = 4096, .kv_hidden = 1000}, 128), std::nullopt);
  EXPECT_EQ(ulysses_heads(heads, 8), (HeadCounts{4, 1}));
  EXPECT_EQ(ulysses_heads(heads, 16), (HeadCounts{2, 1})) << "each KV head on two ranks";
  EXPECT_EQ(ulysses_heads(heads, 64), std::nullopt);
  EXPECT_EQ(ulysses_heads({12, 4}, 6), std::nullopt) << "6 ranks, 4 KV heads";
  EXPECT_THROW((void)heads_of({}, 0), InvalidArgument);
}

TEST(PredictUlysses, RefusesHeadsAndGroupsThatDoNotDivide) {
  const auto refuses = [](const Lengths& lengths, const StaticPlanOptions& groups,
                          const std::string& text) {
    try {
      (void)predicted(lengths, groups, four_heads());
    } catch (const InvalidArgument& error) {
      return std::string(error.what()).find(text) != std::string::npos;
    }
    return false;
  };
  EXPECT_TRUE(refuses({9}, {.world_size = 3, .tokens_per_rank = 4, .degree = 3}, "degree = 3"));
  EXPECT_TRUE(refuses({9}, {.world_size = 4, .tokens_per_rank = 4, .degree = 3},
                      "predict_ulysses: degree = 3, expected a divisor of world_size = 4"));
  EXPECT_TRUE(refuses({9}, {.world_size = 2, .tokens_per_rank = 4, .degree = 2}, "exceed"));
  EXPECT_TRUE(refuses({0}, {.world_size = 2, .tokens_per_rank = 4, .degree = 2}, "[0] = 0"));
}

/// A uniform batch of one node: Ulysses is even, as few bytes as 8 ranks make of Q, K, V and O.
TEST(PredictUlysses, BytesOfAModelAsPublished) {
  const Lengths lengths = sample_documents(length_distribution("wlbllm"), 8 * 4096, 1);
  const StepPrediction step =
      predict_ulysses(lengths, {.world_size = 8, .tokens_per_rank = 4096, .degree = 8}, 128);
  std::int64_t tokens = 0;
  for (const std::int64_t length : lengths) tokens += length;
  // 7/8 of the 12 KiB of Q, K and V of each row leave its rank.
  EXPECT_EQ(step.phase(StepPhase::dispatch).links[7].nvlink_out,
            tokens / 8 * (8192 + 4096) / 8 * 7);
}

}  // namespace
}  // namespace waybill
