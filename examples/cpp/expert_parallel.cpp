// The program of Triton-distributed's page on EPAll2AllLayer, in C++: bfloat16 tokens to their
// experts on all ranks, and back. Ranks are four threads in host memory. Ends with 0 when all sums
// are right, else with 1.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <span>
#include <vector>

#include "waybill/core/random.h"
#include "waybill/experts.h"

namespace {

using namespace waybill;

constexpr std::int32_t world_size = 4;
constexpr std::int64_t num_tokens = 32;

/// The sizes that the layer's constructor takes in Python.
EPConfig config_of(Rank rank) {
  EPConfig config;
  config.max_tokens = 64;
  config.hidden = 256;
  config.topk = 4;
  config.num_experts = 4 * world_size;
  config.rank = to_int(rank);
  config.world_size = world_size;
  config.local_world_size = world_size;  // less: several nodes
  config.token_dtype = DType::bfloat16;
  config.weight_dtype = DType::float32;
  return config;
}

/// Tokens, and what a gate chose for them.
struct Input {
  HostTensor tokens, expert_ids, weights;
};

Input input_of(const EPConfig& config) {
  Random random(static_cast<std::uint64_t>(config.rank));
  Input input{HostTensor(config.token_dtype, {num_tokens, config.hidden}),
              HostTensor(DType::int32, {num_tokens, config.topk}),
              HostTensor(config.weight_dtype, {num_tokens, config.topk})};
  for (std::uint16_t& bits : input.tokens.as<std::uint16_t>()) {
    bits = float_to_bfloat16(static_cast<float>(random.below(4)));
  }
  const auto ids = input.expert_ids.as<std::int32_t>();
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const auto chosen = random.permutation(config.num_experts, config.topk);
    std::ranges::transform(chosen, ids.begin() + t * config.topk,
                           [](auto expert) { return static_cast<std::int32_t>(expert); });
  }
  std::ranges::fill(input.weights.as<float>(), 1.0F / static_cast<float>(config.topk));
  return input;
}

/// your_expert_ffn(recv_tokens): expert e multiplies its rows, which lie together, by e + 1.
HostTensor expert_ffn(const EPDispatched& received, const EPConfig& config) {
  HostTensor output(config.token_dtype, received.rows.shape);
  const auto rows = received.rows.as<std::uint16_t>();
  const auto weights = received.weights.as<float>();
  const auto offsets = received.layout->tables().expert_offsets.as<std::int32_t>();
  const auto hidden = static_cast<std::size_t>(config.hidden);
  for (std::int32_t p = 0; p < config.num_experts_per_rank(); ++p) {
    const auto factor = static_cast<float>(config.rank * config.num_experts_per_rank() + p + 1);
    const auto end = static_cast<std::size_t>(offsets[static_cast<std::size_t>(p) + 1]);
    for (auto row = static_cast<std::size_t>(offsets[static_cast<std::size_t>(p)]); row < end;
         ++row) {
      const auto from = rows.subspan(row * hidden, hidden);
      std::ranges::transform(
          from, output.as<std::uint16_t>().subspan(row * hidden).begin(), [&](std::uint16_t bits) {
            return float_to_bfloat16(bfloat16_to_float(bits) * factor * weights[row]);
          });
    }
  }
  return output;
}

/// The sums of a rank are tokens times the mean of (expert + 1), to two digits.
bool is_right(const Input& input, const HostTensor& combined, const EPConfig& config) {
  const auto ids = input.expert_ids.as<const std::int32_t>();
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    float factor = 0;
    for (std::int64_t k = 0; k < config.topk; ++k) {
      factor += static_cast<float>(ids[static_cast<std::size_t>(t * config.topk + k)] + 1);
    }
    factor /= static_cast<float>(config.topk);
    for (std::int64_t h = 0; h < config.hidden; ++h) {
      const auto i = static_cast<std::size_t>(t * config.hidden + h);
      const float wanted = factor * bfloat16_to_float(input.tokens.as<const std::uint16_t>()[i]);
      const float got = bfloat16_to_float(combined.as<const std::uint16_t>()[i]);
      if (std::fabs(got - wanted) > 0.02F * std::fabs(wanted)) return false;
    }
  }
  return true;
}

bool one_rank(World& world) {
  const EPConfig config = config_of(world.rank());
  EPAll2AllLayer ep_layer(world, config, {.num_sms = 20});
  const Input input = input_of(config);

  ExpertDispatchInput given;
  given.tokens = input.tokens.view();
  given.ids = input.expert_ids.view();
  given.weights = input.weights.view();
  const EPDispatched received = ep_layer.dispatch(given);  // rows, weights, layout

  const HostTensor expert_output = expert_ffn(received, config);

  HostTensor combined(config.token_dtype, {num_tokens, config.hidden});
  ep_layer.combine(
      {.rows = expert_output.view(), .options = {}, .biases = {}, .output = combined.view()},
      *received.layout);
  ep_layer.ep_barrier_all();
  ep_layer.finalize();
  return is_right(input, combined, config);
}

}  // namespace

int main() {
  try {
    std::atomic<int> num_right = 0;
    run_thread_world(world_size, [&](World& world) { num_right += one_rank(world) ? 1 : 0; });
    std::cout << num_right << " of " << world_size << " ranks have the right sums\n";
    return num_right == world_size ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
}
