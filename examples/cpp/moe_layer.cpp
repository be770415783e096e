// Experts on four ranks that are threads, on two logical nodes: tokens go to their experts, the
// experts work on the rows they got, and weighted sums come home. The result is compared with the
// simulation of all ranks in one process, bit for bit.

#include <algorithm>
#include <iostream>
#include <vector>

#include "waybill/core/random.h"
#include "waybill/experts/ep_all2all_layer.h"
#include "waybill/moe/simulate.h"

namespace {

using namespace waybill;

constexpr std::int32_t num_ranks = 4;

EPConfig layer_config(std::int32_t rank) {
  EPConfig config;
  config.max_tokens = 64;
  config.hidden = 32;
  config.topk = 2;
  config.num_experts = 8;
  config.rank = rank;
  config.world_size = num_ranks;
  config.local_world_size = 2;
  config.token_dtype = DType::float32;
  return config;
}

struct RankInput {
  HostTensor tokens, ids, weights;
};

RankInput random_input(std::int32_t rank) {
  const EPConfig config = layer_config(rank);
  Random random(static_cast<std::uint64_t>(rank));
  const std::int64_t count = 20 + random.below(40);
  RankInput input{HostTensor(DType::float32, {count, config.hidden}),
                  HostTensor(DType::int32, {count, config.topk}),
                  HostTensor(DType::float32, {count, config.topk})};
  for (float& x : input.tokens.as<float>()) x = random.uniform_float();
  for (float& w : input.weights.as<float>()) w = random.uniform_float();
  for (std::int32_t& id : input.ids.as<std::int32_t>()) {
    id = static_cast<std::int32_t>(random.below(config.num_experts + 1));  // the last: dropped
  }
  return input;
}

/// Expert e of all multiplies by e + 1. Rows are grouped by expert, as offsets say.
HostTensor run_experts(const float* rows, std::int64_t num_rows, const std::int32_t* offsets,
                       std::int32_t rank) {
  const EPConfig config = layer_config(rank);
  HostTensor outputs(DType::float32, {num_rows, config.hidden});
  const auto out = outputs.as<float>();
  for (std::int32_t p = 0; p < config.num_experts_per_rank(); ++p) {
    const auto factor = static_cast<float>(rank * config.num_experts_per_rank() + p + 1);
    for (std::int64_t i = offsets[p] * config.hidden; i < offsets[p + 1] * config.hidden; ++i) {
      out[static_cast<std::size_t>(i)] = rows[i] * factor;
    }
  }
  return outputs;
}

/// One rank's step of a layer.
HostTensor step(World& world, const RankInput& input) {
  const std::int32_t rank = to_int(world.rank());
  EPAll2AllLayer layer(world, layer_config(rank));
  ExpertDispatchInput given;
  given.tokens = input.tokens.view();
  given.ids = input.ids.view();
  given.weights = input.weights.view();
  const EPDispatched dispatched = layer.dispatch(given);
  const ExpertTableViews tables = dispatched.layout->tables();
  const HostTensor outputs =
      run_experts(reinterpret_cast<const float*>(dispatched.rows.data), dispatched.rows.shape[0],
                  reinterpret_cast<const std::int32_t*>(tables.expert_offsets.data), rank);
  HostTensor sums(DType::float32, input.tokens.shape());
  layer.combine(
      {.rows = outputs.view(), .options = {.weighted = true}, .biases = {}, .output = sums.view()},
      *dispatched.layout);
  layer.finalize();
  return sums;
}

std::vector<HostTensor> simulated(const std::vector<RankInput>& inputs) {
  std::vector<ConstTensorView> tokens, ids, weights;
  for (const RankInput& input : inputs) {
    tokens.emplace_back(input.tokens.view());
    ids.emplace_back(input.ids.view());
    weights.emplace_back(input.weights.view());
  }
  const ExpertDispatch dispatched =
      simulate_expert_dispatch(layer_config(0), {tokens, ids, weights, {}, {}});
  std::vector<HostTensor> outputs;
  std::vector<ConstTensorView> views;
  for (std::int32_t r = 0; r < num_ranks; ++r) {
    const HostTensor& rows = dispatched.recv_tokens[static_cast<std::size_t>(r)];
    const IndexArray& offsets = dispatched.layout[static_cast<std::size_t>(r)].recv_expert_offsets;
    outputs.push_back(run_experts(rows.as<float>().data(), rows.shape()[0],
                                  static_cast<const std::int32_t*>(offsets.data()), r));
  }
  for (const HostTensor& output : outputs) views.emplace_back(output.view());
  std::cout << "tokens that cross between nodes: "
            << to_string(dispatched.traffic.inter_node_tokens) << "\n";
  return simulate_expert_combine(dispatched, views, {.weighted = true});
}

}  // namespace

int main() {
  std::vector<RankInput> inputs;
  for (std::int32_t r = 0; r < num_ranks; ++r) inputs.push_back(random_input(r));
  std::vector<HostTensor> results(num_ranks);
  run_thread_world(num_ranks,
                   [&](World& world) {
                     const auto r = static_cast<std::size_t>(to_int(world.rank()));
                     results[r] = step(world, inputs[r]);
                   },
                   {.ranks_per_node = 2});
  const auto expected = simulated(inputs);
  for (std::size_t r = 0; r < results.size(); ++r) {
    if (!std::ranges::equal(results[r].bytes(), expected[r].bytes())) {
      std::cerr << "rank " << r << " got something else than the simulation\n";
      return 1;
    }
  }
  std::cout << "4 ranks got what the simulation says, bit for bit\n";
}
