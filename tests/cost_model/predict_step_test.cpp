// The cost model by hand: two to four ranks, every phase, and every link.
#include "waybill/cost_model/predict_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "cost_model_cases.h"

namespace waybill {
namespace {

using test::round_options;

// Document 0: 100 tokens at home on rank 0, the queries of its last 40 go to rank 1.
// Document 1: 30 tokens at home and attended to on rank 1.
QkvPlan two_ranks() {
  QkvPlan plan;
  plan.world_size = 2;
  plan.rank_shard_offsets = {0, 2, 3};
  plan.shard_len = {60, 40, 30};
  plan.q_dst = {0, 1, 1};
  plan.doc_shard_offsets = {0, 2, 3};
  plan.doc_shards = {0, 1, 2};
  return plan;
}

constexpr double q = 40 * 20;          // bytes: the rows of Q that travel
constexpr double kv = 100 * 8;         // bytes: all keys of document 0
constexpr double work_0 = 1830;        // 60 * 61 / 2
constexpr double work_1 = 3220 + 465;  // 5050 - 1830; 30 * 31 / 2
constexpr double phase = 7;
constexpr double message = 3;

void expect_phase(const StepPrediction& step, StepPhase which, const std::vector<double>& begin,
                  const std::vector<double>& end) {
  const PhasePrediction& got = step.phase(which);
  ASSERT_EQ(got.begin.size(), begin.size()) << to_string(which);
  for (std::size_t r = 0; r < begin.size(); ++r) {
    EXPECT_DOUBLE_EQ(got.begin[r], begin[r]) << to_string(which) << ", begin of rank " << r;
    EXPECT_DOUBLE_EQ(got.end[r], end[r]) << to_string(which) << ", end of rank " << r;
  }
}

TEST(PredictStep, EveryPhaseOfTwoRanksByHand) {
  StepOptions options = round_options();  // 10 bytes per second over NVLink; pulls at half of it
  options.hardware.ranks_per_node = 2;
  const StepPrediction step = predict_step(two_ranks(), options);
  EXPECT_EQ(step.work, (std::vector<std::int64_t>{1830, 3685}));

  // Rank 0 sends, rank 1 receives as much: both take as long.
  double end = (q + kv) / 10 + message + phase;
  EXPECT_DOUBLE_EQ(end, 170);
  expect_phase(step, StepPhase::dispatch, {0, 0}, {end, end});
  // 50 pairs a second forward.
  const double end_0 = end + work_0 / 50;
  const double end_1 = end + work_1 / 50;
  expect_phase(step, StepPhase::attention, {end, end}, {end_0, end_1});
  // Rank 0 gets its rows when rank 1, which is later, has sent them.
  end = end_1 + q / 10 + message + phase;
  expect_phase(step, StepPhase::output, {end_0, end_1}, {end, end});
  EXPECT_DOUBLE_EQ(step.forward_seconds, end);
  const double backward = end + q / 10 + message + phase;
  expect_phase(step, StepPhase::output_gradient, {end, end}, {backward, backward});
  // 20 pairs a second backward.
  const double back_0 = backward + work_0 / 20;
  const double back_1 = backward + work_1 / 20;
  expect_phase(step, StepPhase::attention_gradient, {backward, backward}, {back_0, back_1});
  const double dq = back_1 + q / 10 + message + phase;
  expect_phase(step, StepPhase::q_gradient, {back_0, back_1}, {dq, dq});
  const double dkv = dq + kv / 5 + message + phase;
  expect_phase(step, StepPhase::kv_gradient, {dq, dq}, {dkv, dkv});
  EXPECT_DOUBLE_EQ(step.seconds, dkv);
}

TEST(PredictStep, SaysWhoAndWhichDocument) {
  StepOptions options = round_options();
  options.hardware.ranks_per_node = 2;
  const StepPrediction step = predict_step(two_ranks(), options);
  const StepCause& dispatch = step.phase(StepPhase::dispatch).slowest;
  EXPECT_EQ(dispatch.rank, 0);
  EXPECT_EQ(dispatch.resource, StepResource::nvlink_out);
  EXPECT_EQ(dispatch.amount, 1600);
  EXPECT_EQ(dispatch.document, 0);
  EXPECT_EQ(dispatch.document_amount, 1600);
  EXPECT_DOUBLE_EQ(dispatch.seconds, 170);
  const StepCause& attention = step.phase(StepPhase::attention).slowest;
  EXPECT_EQ(attention.rank, 1);
  EXPECT_EQ(attention.resource, StepResource::compute);
  EXPECT_EQ(attention.amount, 3685);
  EXPECT_EQ(attention.document, 0);
  EXPECT_EQ(attention.document_amount, 3220);
  // Rank 1's queries go back: it sends, rank 0 receives.
  const StepCause& gradient = step.phase(StepPhase::kv_gradient).slowest;
  EXPECT_EQ(gradient.amount, 800);
  ASSERT_EQ(step.path.size(), 7U);
  EXPECT_EQ(step.path[1].rank, 1);
  EXPECT_EQ(step.path[2].rank, 1);
  EXPECT_EQ(step.bottleneck().phase, StepPhase::attention_gradient);
  EXPECT_EQ(step.bottleneck().rank, 1);
}

// Four ranks in two nodes; the document of rank 0 (50 tokens) is attended to by ranks 2 and 3.
QkvPlan two_nodes() {
  QkvPlan plan;
  plan.world_size = 4;
  plan.rank_shard_offsets = {0, 2, 2, 2, 2};
  plan.shard_len = {20, 30};
  plan.q_dst = {2, 3};
  plan.doc_shard_offsets = {0, 2};
  plan.doc_shards = {0, 1};
  return plan;
}

TEST(PredictStep, OverTheNetworkStraight) {
  StepOptions options = round_options();  // 2 bytes per second between nodes, 5 s a peer
  const StepPrediction step = predict_step(two_nodes(), options);
  const PhasePrediction& dispatch = step.phase(StepPhase::dispatch);
  // Q: 50 rows of 20 B. KV of 8 B: 20 rows to rank 2, 20 + 30 to rank 3. Rank 0 has two peers.
  EXPECT_EQ(dispatch.links[0], (LinkBytes{.network_out = 1560}));
  EXPECT_EQ(dispatch.links[2], (LinkBytes{.network_in = 20 * 28}));
  EXPECT_EQ(dispatch.links[3], (LinkBytes{.network_in = 30 * 28 + 20 * 8}));
  const double out = 1560 / 2.0 + 2 * 5;
  EXPECT_DOUBLE_EQ(dispatch.end[0], out + phase);
  EXPECT_DOUBLE_EQ(dispatch.end[1], phase) << "nothing comes, nothing goes";
  EXPECT_DOUBLE_EQ(dispatch.end[2], out + phase) << "its rows leave with all others of rank 0";
  EXPECT_EQ(dispatch.waits_for, (std::vector<std::int32_t>{0, 1, 0, 0}));
  EXPECT_DOUBLE_EQ(dispatch.seconds[2], 560 / 2.0 + 5 + phase) << "if it waited for nobody";
  EXPECT_EQ(dispatch.slowest.resource, StepResource::network_out);
}

TEST(PredictStep, OverTheNetworkOnceANode) {
  StepOptions options = round_options();
  options.transfer = TransferMode::once_per_node;
  const StepPrediction step = predict_step(two_nodes(), options);
  const PhasePrediction& dispatch = step.phase(StepPhase::dispatch);
  // Keys 0..19 go to rank 2 (home's place in the other node), which forwards them to rank 3. Keys
  // 20..49 are needed by rank 3 alone, and go straight.
  EXPECT_EQ(dispatch.links[0], (LinkBytes{.network_out = 1000 + 160 + 240}));
  EXPECT_EQ(dispatch.links[2], (LinkBytes{.nvlink_out = 160, .network_in = 400 + 160}));
  EXPECT_EQ(dispatch.links[3], (LinkBytes{.nvlink_in = 160, .network_in = 600 + 240}));
  const double out = 1400 / 2.0 + 2 * 5;
  EXPECT_DOUBLE_EQ(dispatch.end[2], out + phase);
  // A piece is 100 bytes.
  EXPECT_DOUBLE_EQ(dispatch.end[3], out + 100 / 10.0 + message + phase);
  EXPECT_EQ(dispatch.waits_for[3], 0);

  // Backward the sum of two copies would be as wide as both: they come straight.
  EXPECT_EQ(step.gradient_transfer, TransferMode::direct);
  EXPECT_EQ(step.phase(StepPhase::kv_gradient).links[0], (LinkBytes{.network_in = 160 + 400}));
}

// Three ranks per node: keys 0..19 are needed by ranks 3, 4 and 5, keys 20..49 by 4 and 5, the rest
// by rank 5. The first two come by way of rank 3, which has no need of the second.
TEST(PredictStep, GradientsAreSummedOnTheWay) {
  QkvPlan plan;
  plan.world_size = 6;
  plan.rank_shard_offsets = {0, 3, 3, 3, 3, 3, 3};
  plan.shard_len = {20, 30, 10};
  plan.q_dst = {3, 4, 5};
  plan.doc_shard_offsets = {0, 3};
  plan.doc_shards = {0, 1, 2};
  StepOptions options = round_options();
  options.hardware.ranks_per_node = 3;
  options.transfer = TransferMode::once_per_node;
  const StepPrediction step = predict_step(plan, options);
  const PhasePrediction& dispatch = step.phase(StepPhase::dispatch);
  EXPECT_EQ(dispatch.links[0], (LinkBytes{.network_out = 60 * 20 + 160 + 240 + 80}));
  EXPECT_EQ(dispatch.links[3],
            (LinkBytes{.nvlink_out = 2 * 160 + 2 * 240, .network_in = 20 * 20 + 160 + 240}));

  EXPECT_EQ(step.gradient_transfer, TransferMode::once_per_node);
  const PhasePrediction& gradient = step.phase(StepPhase::kv_gradient);
  // Two sums in float32 from rank 3, and rank 5's own rows.
  EXPECT_EQ(gradient.links[0], (LinkBytes{.network_in = 2 * 160 + 2 * 240 + 80}));
  EXPECT_EQ(gradient.links[3],
            (LinkBytes{.nvlink_in = 2 * 160 + 2 * 240, .network_out = 2 * 160 + 2 * 240}));
  EXPECT_EQ(gradient.links[5], (LinkBytes{.nvlink_out = 160 + 240, .network_out = 80}));
  EXPECT_DOUBLE_EQ(gradient.seconds[0], 880 / 2.0 + 2 * 5 + phase);
  EXPECT_EQ(gradient.slowest.rank, 0);
  EXPECT_EQ(gradient.slowest.resource, StepResource::network_in);
  EXPECT_EQ(gradient.slowest.amount, 880);
  // Rank 0 waits for its own link, for those of ranks 3 and 5, and for what 4 and 5 send to rank 3
  // and one piece over the network.
  const auto sent = [&](int rank, double seconds) {
    return gradient.begin[static_cast<std::size_t>(rank)] + seconds;
  };
  const double by_3 = sent(3, 800 / 2.0 + 5);
  const double by_5 = sent(5, std::max(400 / 5.0 + 3, 80 / 2.0 + 5));
  const double by_4 = sent(4, 400 / 5.0 + 3);
  const double passed_on = std::max(by_4, by_5) + 100 / 2.0 + 5;
  EXPECT_DOUBLE_EQ(gradient.end[0],
                   std::max({sent(0, 880 / 2.0 + 10), by_3, by_5, passed_on}) + phase);
  options.model.dtype = DType::float32;  // then sums are as wide as rows
  EXPECT_EQ(predict_step(plan, options).phase(StepPhase::kv_gradient).links[0].network_in,
            2 * (160 + 240 + 80));
}

TEST(PredictStep, RelayFollowsItsHops) {
  // Rank 0 sends all keys to rank 2, which forwards them to rank 3: 20 of them to be precise.
  RelaySchedule relay;
  relay.links.resize(4);
  relay.num_stages = 2;
  relay.hops = {{.src_rank = 0, .dst_rank = 2, .shard = 0, .num_rows = 20},
                {.src_rank = 2, .dst_rank = 3, .shard = 0, .stage = 1, .num_rows = 20, .after = 0},
                {.src_rank = 0, .dst_rank = 3, .shard = 1, .num_rows = 30}};
  StepOptions options = round_options();
  const QkvPlan plan = two_nodes();
  const StepPredictor predictor(plan, &relay);
  options.transfer = TransferMode::once_per_node;
  const StepPrediction node = predictor.predict(options);
  options.transfer = TransferMode::relay;
  const StepPrediction relayed = predictor.predict(options);
  ASSERT_EQ(relayed.phases.size(), node.phases.size());
  for (std::size_t i = 0; i < node.phases.size(); ++i) EXPECT_EQ(relayed.phases[i], node.phases[i]);
  EXPECT_EQ(relayed.path, node.path);
}

TEST(PredictStep, OneRankHasOnlyKernelsAndStarts) {
  QkvPlan plan;
  plan.world_size = 1;
  plan.rank_shard_offsets = plan.doc_shard_offsets = {0, 1};
  plan.shard_len = {100};
  plan.q_dst = plan.doc_shards = {0};
  const StepPrediction step = predict_step(plan, round_options());
  EXPECT_DOUBLE_EQ(step.seconds, 5 * phase + 5050 / 50.0 + 5050 / 20.0);
  EXPECT_EQ(step.phase(StepPhase::dispatch).slowest.resource, StepResource::nothing);
  EXPECT_EQ(step.phase(StepPhase::dispatch).slowest.document, -1);
}

TEST(PredictStep, WorkFollowsTheWindow) {
  StepOptions options = round_options();
  options.mask.window = 10;
  const StepPrediction step = predict_step(two_ranks(), options);
  // 10 * 11 / 2 + 50 * 10; 40 * 10 and 55 + 20 * 10.
  EXPECT_EQ(step.work, (std::vector<std::int64_t>{555, 655}));
}

TEST(PredictStep, KnownSpeedOfPairsIsUsed) {
  StepOptions options = round_options();
  options.hardware.pairs_per_second = 100;
  const StepPrediction step = predict_step(two_ranks(), options);
  EXPECT_DOUBLE_EQ(step.phase(StepPhase::attention).seconds[0], work_0 / 100);
  EXPECT_DOUBLE_EQ(step.phase(StepPhase::attention_gradient).seconds[0], work_0 / 40);
}

TEST(PredictStep, RefusesWhatMakesNoSense) {
  const auto message_of = [](const auto& change, const QkvPlan& plan = two_ranks()) {
    StepOptions options;
    change(options);
    try {
      (void)predict_step(plan, options);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_EQ(message_of([](StepOptions& o) { o.transfer = TransferMode::relay; }),
            "predict_step: options.transfer = relay, expected direct or once_per_node: the plan "
            "has no relay schedule");
  EXPECT_EQ(
      message_of([](StepOptions& o) { o.hardware.network_bytes_per_second = 0; }),
      "predict_step: hardware.network_bytes_per_second = 0, expected 1 to 1e+18 bytes per second");
  EXPECT_EQ(message_of([](StepOptions& o) { o.costs.phase_seconds = -1; }),
            "predict_step: costs.phase_seconds = -1, expected a number >= 0");
  EXPECT_EQ(message_of([](StepOptions& o) { o.costs.forward_chunk_bytes = -1; }),
            "predict_step: costs.forward_chunk_bytes = -1, expected >= 0");
  QkvPlan huge = two_ranks();
  huge.shard_len = {std::int64_t{1} << 39, 1, 1};
  huge.q_dst[0] = 1;
  EXPECT_NE(message_of([](StepOptions& o) { o.model.q_hidden = 1 << 24; }, huge).find("2^62"),
            std::string::npos);
  RelaySchedule relay;
  relay.links.resize(2);
  relay.hops = {{.src_rank = 0, .dst_rank = 1, .shard = 0, .num_rows = 61}};
  const QkvPlan plan = two_ranks();
  EXPECT_THROW(StepPredictor(plan, &relay), InvalidArgument);
  relay.hops = {{.src_rank = 0, .dst_rank = 1, .shard = 0, .num_rows = 6, .after = 0}};
  EXPECT_THROW(StepPredictor(plan, &relay), InvalidArgument);
}

}  // namespace
}  // namespace waybill
