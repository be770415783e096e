// Gradients of rows and weights where the rows are.

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "experts/expert_rounds.h"
#include "experts/host_executor.h"
#include "support/expect_error.h"

namespace waybill::test {
namespace {

constexpr float untouched = -7;

ExpertGradientInput input_of(std::vector<float>& gradients, std::vector<float>& rows,
                             std::vector<float>& weights, std::vector<float>& to_rows,
                             std::vector<float>& to_weights) {
  const auto count = static_cast<std::int64_t>(weights.size());
  const auto hidden = static_cast<std::int64_t>(gradients.size()) / count;
  const Shape shape{count, hidden};
  ExpertGradientInput input;
  input.gradients = {gradients.data(), DType::float32, shape};
  input.rows = {rows.data(), DType::float32, shape};
  input.weights = {weights.data(), DType::float32, {count}};
  input.row_gradients = {to_rows.data(), DType::float32, shape};
  input.weight_gradients = {to_weights.data(), DType::float32, {count}};
  return input;
}

TEST(WeighGradients, InTheWrittenOrder) {
  // 2^24 and ones: other orders give other numbers.
  constexpr std::int64_t hidden = 600;
  std::vector<float> rows(2 * hidden, 1);
  std::vector<float> gradients(2 * hidden, 1);
  rows[0] = 0x1p24F;       // partial sum 0: 2^24 + 1 + 1 stays 2^24
  rows[hidden + 3] = 0.5;  // exact
  std::vector<float> weights = {2, 3};
  std::vector<float> to_rows(2 * hidden, untouched);
  std::vector<float> to_weights(2, untouched);
  detail::weigh_gradients(input_of(gradients, rows, weights, to_rows, to_weights), 2);
  // Partial sums: 0: 2^24; 1..87: 3; the others 2. Neighbours: 2^24 + 3 rounds to 2^24 + 4, and
  // 6, 12, 24, 48, 96, 152, 256 come to it.
  EXPECT_EQ(to_weights[0], 0x1p24F + 598);
  EXPECT_EQ(to_weights[1], 599.5F);
  EXPECT_EQ(to_rows[0], 2);
  EXPECT_EQ(to_rows[hidden], 3);
}

TEST(WeighGradients, TouchesNothingBehindTheRowsThatCame) {
  std::vector<float> rows(12, 1);
  std::vector<float> gradients(12, 2);
  std::vector<float> weights(3, 5);
  std::vector<float> to_rows(12, untouched);
  std::vector<float> to_weights(3, untouched);
  detail::weigh_gradients(input_of(gradients, rows, weights, to_rows, to_weights), 1);
  EXPECT_EQ(to_weights, (std::vector<float>{8, untouched, untouched}));
  EXPECT_EQ(to_rows[3], 10);
  EXPECT_EQ(to_rows[4], untouched);
}

TEST(WeighGradients, OneOfBoth) {
  std::vector<float> rows = {1, 2};
  std::vector<float> gradients = {3, 4};
  std::vector<float> weights = {0.5};
  std::vector<float> to_rows(2, untouched);
  std::vector<float> to_weights(1, untouched);
  ExpertGradientInput input = input_of(gradients, rows, weights, to_rows, to_weights);
  ExpertGradientInput rows_alone = input;
  rows_alone.rows = rows_alone.weight_gradients = {};
  detail::weigh_gradients(rows_alone, 1);
  EXPECT_EQ(to_rows, (std::vector<float>{1.5, 2}));
  EXPECT_EQ(to_weights[0], untouched);
  to_rows.assign(2, untouched);
  input.weights = {};
  input.row_gradients = {};
  detail::weigh_gradients(input, 1);
  EXPECT_EQ(to_weights[0], 11);
  EXPECT_EQ(to_rows[0], untouched);
}

TEST(WeighGradients, OfALayer) {
  const EPConfig config = config_of_four(4);
  EPLayerOptions options;
  options.fixed_rows = 100;
  Random random(5);
  const auto round = make_round(random_case(config, random, {.edges = false}), options, random);
  run_thread_world(4, [&](World& world) {
    const auto rank = static_cast<std::size_t>(to_int(world.rank()));
    EPAll2AllLayer layer(world, at_rank(config, world), options);
    EPAll2AllLayer other(world, at_rank(config, world), options);
    const EPDispatched there = layer.dispatch(test::input_of(round, rank));
    const std::int64_t count = there.layout->num_recv_rows();
    ASSERT_LE(count, 100);
    HostTensor copy(config.token_dtype, {100, config.hidden});
    layer.copy_rows(there.rows, copy.view(), *there.layout);
    EXPECT_EQ(std::memcmp(copy.view().data, there.rows.data,
                          static_cast<std::size_t>(count * config.hidden *
                                                   dtype_bytes(config.token_dtype))),
              0);
    EXPECT_EQ(there.layout->tables().required_rows.as<std::int32_t>()[0],
              round.dispatch.rows.largest_recv_rows);
    EXPECT_TRUE(rejects(
        [&] {
          layer.copy_rows(there.rows, copy.view(),
                          *other.dispatch(test::input_of(round, rank)).layout);
        },
        {"copy_rows: the layout belongs to another layer"}));
    HostTensor small(config.token_dtype, {99, config.hidden});
    EXPECT_TRUE(rejects([&] { layer.copy_rows(there.rows, small.view(), *there.layout); },
                        {"copy_rows: the copy has shape [99, 24], expected [100, 24]"}));
    ExpertGradientInput input;
    input.gradients = there.rows;
    input.rows = there.rows;
    EXPECT_TRUE(rejects([&] { layer.weigh_gradients(input, *there.layout); },
                        {"one of rows and weight_gradients is given"}));
    input.rows = {};
    input.row_gradients = copy.view();
    EXPECT_TRUE(rejects([&] { layer.weigh_gradients(input, *there.layout); },
                        {"weigh_gradients: weights"}));
    layer.finalize();
    other.finalize();
  });
}

}  // namespace
}  // namespace waybill::test
