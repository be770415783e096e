#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "core/to_size.h"
#include "moe/expert_case.h"
#include "support/expect_error.h"

namespace waybill::test {
namespace {

using detail::to_size;

EPConfig config_of(std::int32_t world, std::int32_t per_node, DType dtype) {
  EPConfig config;
  config.max_tokens = 7;
  config.hidden = 5;
  config.topk = 6;
  config.num_experts = world * 2;
  config.world_size = world;
  config.local_world_size = per_node;
  config.token_dtype = dtype;
  return config;
}

double rounded(double value, DType) { return value; }

float rounded(float value, DType dtype) {
  HostTensor one(dtype, {1});
  set_float(one, 0, value);
  return float_at(one, 0);
}

std::vector<HostTensor> random_rows(const EPConfig& config, const std::vector<std::int32_t>& rows,
                                    Random& random) {
  std::vector<HostTensor> result;
  for (const std::int32_t count : rows) {
    HostTensor& tensor = result.emplace_back(config.token_dtype, Shape{count, config.hidden});
    for (std::int64_t i = 0; i < count * config.hidden; ++i) {
      set_float(tensor, i, random.uniform_float() * 4 - 2);
    }
  }
  return result;
}

/// One element of one token, straight from the words of the specification, summed in Sum.
template <class Sum>
Sum expected_element(const ExpertDispatch& dispatch, const std::vector<HostTensor>& outputs,
                     const EPCombineOptions& options, std::size_t src, std::int64_t token,
                     std::int64_t column, Sum biases) {
  const EPConfig& config = dispatch.config;
  std::vector<std::int32_t> order;                   // groups as they first appear
  std::map<std::int32_t, std::vector<Sum>> members;  // topk slots ascending
  for (std::int64_t k = 0; k < config.topk; ++k) {
    const std::size_t entry = token * config.topk + k;
    const std::int32_t rank = config.rank_of_expert(dispatch.ids[src][entry]);
    if (rank == config.world_size) continue;
    auto value = static_cast<Sum>(
        number_at(outputs[rank], dispatch.dst_row[src][entry] * config.hidden + column));
    if (options.weighted) {
      value *= static_cast<Sum>(
          number_at(dispatch.source_weights[src], static_cast<std::int64_t>(entry)));
    }
    const std::int32_t group = config.is_intra_node() ? rank : rank / config.local_world_size;
    if (!members.contains(group)) order.push_back(group);
    members[group].push_back(value);
  }
  const bool grouped = !config.is_intra_node() || options.local_combine;
  Sum total = biases;
  if (grouped) {
    if (!config.is_intra_node()) std::ranges::sort(order);
    for (const std::int32_t group : order) {
      Sum share = 0;
      for (const Sum value : members[group]) share += value;
      total += rounded(share, config.token_dtype);
    }
    return rounded(total, config.token_dtype);
  }
  for (std::int64_t k = 0; k < config.topk; ++k) {  // not by group: in the order of the topk slots
    const std::size_t entry = token * config.topk + k;
    const std::int32_t rank = config.rank_of_expert(dispatch.ids[src][entry]);
    if (rank == config.world_size) continue;
    total += members[rank].front();
    members[rank].erase(members[rank].begin());
  }
  return rounded(total, config.token_dtype);
}

template <class Sum>
void expect_sums(std::initializer_list<DType> dtypes, DType weight_dtype) {
  Random random(21);
  for (const DType dtype : dtypes) {
    for (const auto& [world, per_node] : {std::pair{1, 1}, {4, 4}, {4, 2}, {6, 2}, {3, 1}}) {
      EPConfig config = config_of(world, per_node, dtype);
      config.weight_dtype = weight_dtype;
      const ExpertDispatch dispatch = random_case(config, random).dispatch();
      const auto outputs = random_rows(config, dispatch.rows.num_recv_rows, random);
      const auto bias_0 = random_rows(config, dispatch.rows.num_input_tokens, random);
      const auto bias_1 = random_rows(config, dispatch.rows.num_input_tokens, random);
      const auto views_0 = views_of(bias_0);
      const auto views_1 = views_of(bias_1);
      const std::vector<std::span<const ConstTensorView>> both{views_0, views_1};
      for (int variant = 0; variant < 12; ++variant) {
        const EPCombineOptions options{variant % 2 == 1, variant / 2 % 2 == 1};
        const std::size_t num_biases = variant / 4;
        const auto combined = simulate_expert_combine(dispatch, views_of(outputs), options,
                                                      std::span(both).first(num_biases));
        for (std::size_t src = 0; src < to_size(world); ++src) {
          for (std::int64_t i = 0; i < combined[src].shape()[0] * config.hidden; ++i) {
            Sum biases = 0;
            if (num_biases > 0) biases += static_cast<Sum>(number_at(bias_0[src], i));
            if (num_biases > 1) biases += static_cast<Sum>(number_at(bias_1[src], i));
            ASSERT_EQ(static_cast<Sum>(number_at(combined[src], i)),
                      expected_element<Sum>(dispatch, outputs, options, src, i / config.hidden,
                                            i % config.hidden, biases))
                << world << "/" << per_node << " variant " << variant << " element " << i;
          }
        }
      }
    }
  }
}

TEST(SimulateExpertCombine, RoundsWhereTheSpecificationSays) {
  const auto dtypes = {DType::bfloat16, DType::float16, DType::float32};
  expect_sums<float>(dtypes, DType::float32);
  expect_sums<float>({DType::float32}, DType::float64);  // weights are rounded before the product
}

TEST(SimulateExpertCombine, SumsFloat64InFloat64) {
  expect_sums<double>({DType::float64}, DType::float64);
  expect_sums<double>({DType::float64}, DType::float32);
}

TEST(SimulateExpertCombine, CompactRowsAreOneSummandARank) {
  Random random(22);
  for (const std::int32_t per_node : {4, 2}) {
    // Rounded sums of each rank, handed in as compact rows, give what local_combine gives.
    const EPConfig config = config_of(4, per_node, DType::float32);
    const ExpertCase one = random_case(config, random, {.edges = false});
    const ExpertDispatch grouped = one.dispatch();
    const ExpertDispatch compact = one.dispatch({.rows = EPRows::compact});
    const auto outputs = random_rows(config, grouped.rows.num_recv_rows, random);
    std::vector<HostTensor> sums;
    for (std::size_t dst = 0; dst < 4; ++dst) {
      HostTensor& sum =
          sums.emplace_back(compact.recv_tokens[dst].dtype(), compact.recv_tokens[dst].shape());
      const IndexArray& map = *compact.layout[dst].compact_to_grouped;
      for (std::int64_t row = 0; row < map.dim(0); ++row) {
        for (std::int64_t i = 0; i < config.hidden; ++i) {
          float total = 0;
          for (std::int64_t k = 0; k < config.topk; ++k) {
            if (map.at({row, k}) < 0) continue;
            total += float_at(outputs[dst], map.at({row, k}) * config.hidden + i);
          }
          set_float(sum, row * config.hidden + i, total);
        }
      }
    }
    const auto from_compact = simulate_expert_combine(compact, views_of(sums));
    const auto from_grouped =
        simulate_expert_combine(grouped, views_of(outputs), {.local_combine = true});
    for (std::size_t src = 0; src < 4; ++src) {
      for (std::int64_t i = 0; i < from_compact[src].shape()[0] * config.hidden; ++i) {
        const float got = float_at(from_compact[src], i);
        const float wanted = float_at(from_grouped[src], i);
        if (per_node == 4) {
          ASSERT_EQ(got, wanted);
        } else {  // several nodes sum topk slots in another order
          ASSERT_NEAR(got, wanted, 1e-5);
        }
      }
    }
  }
}

TEST(SimulateExpertCombine, RefusesWhatDoesNotFit) {
  Random random(23);
  const EPConfig config = config_of(2, 2, DType::bfloat16);
  ExpertCase one = random_case(config, random, {.tokens = 3});
  const ExpertDispatch dispatch = one.dispatch();
  auto outputs = random_rows(config, dispatch.rows.num_recv_rows, random);
  const auto combine = [&](const EPCombineOptions& options = {}) {
    (void)simulate_expert_combine(dispatch, views_of(outputs), options);
  };
  EXPECT_TRUE(rejects([&] { (void)simulate_expert_combine(dispatch, views_of({outputs[0]})); },
                      {"expert_outputs has 1 entries", "2 ranks"}));
  outputs[1] = HostTensor(DType::bfloat16, {outputs[1].shape()[0] + 1, config.hidden});
  EXPECT_TRUE(rejects([&] { combine(); }, {"expert_outputs[1] has shape", "expected ["}));
  outputs[1] = HostTensor(DType::float32, {outputs[1].shape()[0] - 1, config.hidden});
  EXPECT_TRUE(rejects([&] { combine(); }, {"expert_outputs[1] is float32", "bfloat16"}));

  one.weights.clear();
  const ExpertDispatch plain = one.dispatch();
  outputs = random_rows(config, plain.rows.num_recv_rows, random);
  EXPECT_TRUE(
      rejects([&] { (void)simulate_expert_combine(plain, views_of(outputs), {.weighted = true}); },
              {"weighted", "no weights"}));
  const auto views = views_of(outputs);
  const std::vector<std::span<const ConstTensorView>> three(3, views);
  EXPECT_TRUE(rejects([&] { (void)simulate_expert_combine(plain, views, {}, three); },
                      {"3 biases", "at most 2"}));
}

}  // namespace
}  // namespace waybill::test
