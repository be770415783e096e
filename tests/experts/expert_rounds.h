#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "moe/expert_case.h"
#include "waybill/experts/ep_all2all_layer.h"

namespace waybill::test {

/// A small layer of four ranks.
inline EPConfig config_of_four(std::int32_t per_node) {
  EPConfig config;
  config.max_tokens = 13;
  config.hidden = 24;
  config.topk = 4;
  config.num_experts = 12;
  config.world_size = 4;
  config.local_world_size = per_node;
  return config;
}

/// One dispatch and combine of all ranks, and what the simulation makes of them.
struct ExpertRoundCase {
  ExpertCase inputs;
  ExpertDispatch dispatch;
  std::vector<HostTensor> outputs;
  std::vector<std::vector<HostTensor>> biases;
  EPCombineOptions combine;
  std::vector<HostTensor> combined;
};

inline HostTensor random_rows(const EPConfig& config, std::int64_t rows, Random& random) {
  HostTensor tensor(config.token_dtype, {rows, config.hidden});
  for (std::int64_t i = 0; i < rows * config.hidden; ++i) {
    set_float(tensor, i, random.uniform_float() * 4 - 2);
  }
  return tensor;
}

inline ExpertRoundCase make_round(const ExpertCase& inputs, const EPLayerOptions& layer,
                                  Random& random, int num_biases = 0, bool weighted = false,
                                  std::span<const std::int32_t> present = {}) {
  ExpertRoundCase round;
  round.inputs = inputs;
  round.dispatch = inputs.dispatch(layer.dispatch, present);
  round.combine = {layer.enable_local_combine, weighted};
  const EPConfig& config = inputs.config;
  for (const std::int32_t rows : round.dispatch.rows.num_recv_rows) {
    round.outputs.push_back(random_rows(config, rows, random));
  }
  std::vector<std::vector<ConstTensorView>> views;
  for (int b = 0; b < num_biases; ++b) {
    auto& bias = round.biases.emplace_back();
    for (const std::int32_t tokens : round.dispatch.rows.num_input_tokens) {
      bias.push_back(random_rows(config, tokens, random));
    }
    views.push_back(views_of(bias));
  }
  const std::vector<std::span<const ConstTensorView>> spans(views.begin(), views.end());
  round.combined =
      simulate_expert_combine(round.dispatch, views_of(round.outputs), round.combine, spans);
  return round;
}

inline ExpertDispatchInput input_of(const ExpertRoundCase& round, std::size_t rank) {
  ExpertDispatchInput input;
  input.tokens = round.inputs.tokens[rank].view();
  input.ids = round.inputs.ids[rank].view();
  if (!round.inputs.weights.empty()) input.weights = round.inputs.weights[rank].view();
  if (!round.inputs.scales.empty()) input.scales = round.inputs.scales[rank].view();
  if (round.inputs.positions) input.full_scatter_indices = round.inputs.positions->view();
  return input;
}

template <class View>
bool same_bytes(const View& view, const HostTensor& wanted) {
  if (view.shape != wanted.shape() || view.dtype != wanted.dtype()) return false;
  return std::equal(view.data, view.data + wanted.size_bytes(), wanted.bytes().begin());
}

inline void expect_same(const EPAll2AllLayoutDesc& got, const EPAll2AllLayoutDesc& wanted) {
  EXPECT_EQ(got.num_dispatch_token_cur_rank, wanted.num_dispatch_token_cur_rank);
  EXPECT_EQ(got.num_input_tokens_per_rank, wanted.num_input_tokens_per_rank);
  EXPECT_EQ(got.send_reqs_recv_tensor, wanted.send_reqs_recv_tensor);
  EXPECT_EQ(got.topk_indices_tensor, wanted.topk_indices_tensor);
  EXPECT_EQ(got.token_dst_scatter_idx, wanted.token_dst_scatter_idx);
  EXPECT_EQ(got.skipped_token_mapping_indices, wanted.skipped_token_mapping_indices);
  EXPECT_EQ(got.skipped_token_topk_mapping_indices, wanted.skipped_token_topk_mapping_indices);
  EXPECT_EQ(got.recv_expert_counts, wanted.recv_expert_counts);
  EXPECT_EQ(got.recv_expert_offsets, wanted.recv_expert_offsets);
  EXPECT_EQ(got.recv_topk_indices, wanted.recv_topk_indices);
  EXPECT_EQ(got.compact_to_grouped, wanted.compact_to_grouped);
  EXPECT_EQ(got.grouped_to_compact, wanted.grouped_to_compact);
  EXPECT_EQ(got.slot_experts, wanted.slot_experts);
  EXPECT_EQ(got.all_slot_experts, wanted.all_slot_experts);
  EXPECT_EQ(got.all_slot_quotas, wanted.all_slot_quotas);
}

inline void expect_dispatched(const EPDispatched& got, const ExpertRoundCase& round,
                              std::size_t rank) {
  EXPECT_TRUE(same_bytes(got.rows, round.dispatch.recv_tokens[rank])) << "rank " << rank;
  if (!round.dispatch.recv_weights.empty()) {
    EXPECT_TRUE(same_bytes(got.weights, round.dispatch.recv_weights[rank])) << "rank " << rank;
  } else {
    EXPECT_FALSE(is_given(got.weights));
  }
  if (!round.dispatch.recv_scales.empty()) {
    EXPECT_TRUE(same_bytes(got.scales, round.dispatch.recv_scales[rank])) << "rank " << rank;
  }
  EXPECT_EQ(got.layout->num_recv_rows(), round.dispatch.rows.num_recv_rows[rank]);
  expect_same(got.layout->describe(), round.dispatch.layout[rank]);
}

/// Combines the round's outputs, and compares.
inline void expect_combined(EPAll2AllLayer& layer, const EPLayout& layout,
                            const ExpertRoundCase& round, std::size_t rank, bool in_place = false) {
  HostTensor sums(round.combined[rank].dtype(), round.combined[rank].shape());
  std::vector<ConstTensorView> biases;
  for (const auto& bias : round.biases) biases.push_back(bias[rank].view());
  ExpertCombineInput input{.rows = round.outputs[rank].view(),
                           .options = {.weighted = round.combine.weighted},
                           .biases = biases,
                           .output = sums.view()};
  if (in_place) {
    const TensorView place = layer.combine_input(round.outputs[rank].shape()[0], {});
    std::ranges::copy(round.outputs[rank].bytes(), place.data);
    input.rows = place;
  }
  layer.combine(input, layout);
  EXPECT_TRUE(same_bytes(ConstTensorView(sums.view()), round.combined[rank])) << "rank " << rank;
}

inline EPConfig at_rank(EPConfig config, const World& world) {
  config.rank = to_int(world.rank());
  return config;
}

/// Dispatch and combine of all rounds on one layer, each compared with the simulation.
/// @param slow_ranks ranks sleep now and then
inline void run_rounds(const EPConfig& config, const EPLayerOptions& options,
                       const std::vector<ExpertRoundCase>& rounds, bool slow_ranks = false) {
  run_thread_world(config.world_size,
                   [&](World& world) {
                     const auto rank = static_cast<std::size_t>(to_int(world.rank()));
                     EPAll2AllLayer layer(world, at_rank(config, world), options);
                     Random random(100 + rank);
                     for (std::size_t i = 0; i < rounds.size(); ++i) {
                       SCOPED_TRACE(concat("round ", i));
                       if (slow_ranks && random.below(4) == 0) {
                         std::this_thread::sleep_for(std::chrono::microseconds(random.below(3000)));
                       }
                       const EPDispatched got = layer.dispatch(input_of(rounds[i], rank));
                       expect_dispatched(got, rounds[i], rank);
                       expect_combined(layer, *got.layout, rounds[i], rank, i % 3 == 1);
                     }
                     layer.finalize();
                   },
                   {.ranks_per_node = config.local_world_size});
}

}  // namespace waybill::test
