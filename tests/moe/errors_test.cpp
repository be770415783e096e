#include <gtest/gtest.h>

#include "moe/expert_case.h"
#include "support/expect_error.h"

namespace waybill::test {
namespace {

EPConfig good() {
  EPConfig config;
  config.max_tokens = 4;
  config.hidden = 8;
  config.topk = 2;
  config.num_experts = 8;
  config.world_size = 4;
  config.local_world_size = 2;
  return config;
}

template <class Change>
::testing::AssertionResult refuses_config(Change&& change,
                                          std::initializer_list<std::string_view> parts) {
  EPConfig config = good();
  change(config);
  return rejects([&] { config.check("EPConfig"); }, parts);
}

TEST(EPConfig, KnowsItsParts) {
  const EPConfig config = good();
  EXPECT_NO_THROW(config.check("EPConfig"));
  EXPECT_EQ(config.num_experts_per_rank(), 2);
  EXPECT_FALSE(config.is_intra_node());
  EXPECT_EQ(config.num_nodes(), 2);
  EXPECT_EQ(config.rank_of_expert(7), 3);
  EXPECT_EQ(config.rank_of_expert(8), 4);  // dropped
}

TEST(EPConfig, NamesTheWrongField) {
  EXPECT_TRUE(refuses_config([](EPConfig& c) { c.max_tokens = 0; }, {"EPConfig: max_tokens = 0"}));
  EXPECT_TRUE(refuses_config([](EPConfig& c) { c.hidden = -1; }, {"hidden = -1"}));
  EXPECT_TRUE(refuses_config([](EPConfig& c) { c.topk = 33; }, {"topk = 33", "1..32"}));
  EXPECT_TRUE(refuses_config([](EPConfig& c) { c.world_size = 0; }, {"world_size = 0"}));
  EXPECT_TRUE(refuses_config([](EPConfig& c) { c.local_world_size = 3; },
                             {"local_world_size = 3", "divisor of world_size = 4"}));
  EXPECT_TRUE(
      refuses_config([](EPConfig& c) { c.local_world_size = 0; }, {"local_world_size = 0"}));
  EXPECT_TRUE(refuses_config([](EPConfig& c) { c.num_experts = 6; },
                             {"num_experts = 6", "multiple of world_size = 4"}));
  EXPECT_TRUE(refuses_config([](EPConfig& c) { c.rank = 4; }, {"rank = 4", "0..3"}));
  EXPECT_TRUE(refuses_config([](EPConfig& c) { c.token_dtype = DType::int32; }, {"token_dtype"}));
  EXPECT_TRUE(refuses_config([](EPConfig& c) { c.weight_dtype = DType::int64; }, {"weight_dtype"}));
}

TEST(EPDispatchOptions, NamesTheWrongOption) {
  const auto refuses = [](const EPDispatchOptions& options,
                          std::initializer_list<std::string_view> parts) {
    return rejects([&] { options.check(good(), "layer"); }, parts);
  };
  EXPECT_TRUE(refuses({.dropped_id = -2}, {"layer: dropped_id = -2", "-1 or num_experts = 8"}));
  EXPECT_TRUE(refuses({.dropped_id = 0}, {"dropped_id = 0"}));
  EXPECT_TRUE(refuses({.expert_alignment = 0}, {"expert_alignment = 0"}));
  EXPECT_TRUE(refuses({.payload = EPPayload::quantized}, {"hidden = 8", "multiple of 128"}));
  EXPECT_TRUE(refuses({.expert_alignment = std::int64_t{1} << 62}, {"expert_alignment"}));
  // Tables of compact rows hold places in the grouped order.
  EXPECT_TRUE(refuses({.rows = EPRows::compact, .expert_alignment = std::int64_t{1} << 30},
                      {"a rank could have compact rows for", "expert_alignment"}));
  EPConfig wide = good();
  wide.hidden = 128;
  wide.token_dtype = DType::float64;
  EXPECT_NO_THROW((EPDispatchOptions{.payload = EPPayload::scaled}.check(wide, "layer")));
  EXPECT_TRUE(
      rejects([&] { EPDispatchOptions{.payload = EPPayload::quantized}.check(wide, "layer"); },
              {"token_dtype = float64", "quantised on the way"}));
  EPConfig huge = good();
  huge.max_tokens = std::int64_t{1} << 29;
  EXPECT_TRUE(rejects([&] { EPDispatchOptions{}.check(huge, "layer"); }, {"rows", "max_tokens"}));
}

TEST(GrowthRule, IsThatOfTheOriginal) {
  EXPECT_EQ(grown_output_rows(48, 48), 48);
  EXPECT_EQ(grown_output_rows(48, 49), 2048);
  EXPECT_EQ(grown_output_rows(2048, 2049), 3 * 1024 * 2);
  EXPECT_EQ(grown_output_rows(0, 1024), 2048);
  EXPECT_TRUE(rejects([] { (void)grown_output_rows(0, INT64_MAX); }, {"largest", "2^60"}));
}

ExpertCase good_case() {
  Random random(3);
  return random_case(good(), random, {.tokens = 3});
}

template <class Change>
::testing::AssertionResult refuses_case(Change&& change,
                                        std::initializer_list<std::string_view> parts,
                                        const EPDispatchOptions& options = {}) {
  ExpertCase one = good_case();
  change(one);
  return rejects([&] { (void)one.dispatch(options); }, parts);
}

TEST(SimulateExpertDispatchErrors, NameArgumentAndRank) {
  EXPECT_NO_THROW((void)good_case().dispatch());
  EXPECT_TRUE(refuses_case([](ExpertCase& c) { c.tokens.pop_back(); },
                           {"simulate_expert_dispatch: tokens has 3 entries", "4 ranks"}));
  EXPECT_TRUE(refuses_case([](ExpertCase& c) { c.ids.pop_back(); }, {"exp_indices has 3"}));
  EXPECT_TRUE(refuses_case([](ExpertCase& c) { c.weights.pop_back(); }, {"weights has 3"}));
  EXPECT_TRUE(refuses_case(
      [](ExpertCase& c) {
        c.tokens[2] = HostTensor(DType::bfloat16, {3, 9});
      },
      {"tokens[2] has shape [3, 9]", "[3, 8]"}));
  EXPECT_TRUE(refuses_case(
      [](ExpertCase& c) {
        c.tokens[2] = HostTensor(DType::float32, {3, 8});
      },
      {"tokens[2] is float32", "bfloat16"}));
  EXPECT_TRUE(refuses_case([](ExpertCase& c) { c.tokens[1] = HostTensor(DType::bfloat16, {8}); },
                           {"tokens[1] has shape [8]"}));
  EXPECT_TRUE(refuses_case(
      [](ExpertCase& c) {
        c.tokens[1] = HostTensor(DType::bfloat16, {5, 8});
        c.ids[1] = HostTensor(DType::int32, {5, 2});
      },
      {"tokens[1] has 5 tokens", "max_tokens = 4"}));
  EXPECT_TRUE(refuses_case(
      [](ExpertCase& c) {
        c.ids[3] = HostTensor(DType::int32, {2, 2});
      },
      {"exp_indices[3] has shape [2, 2]", "[3, 2]"}));
  EXPECT_TRUE(refuses_case(
      [](ExpertCase& c) {
        c.ids[3] = HostTensor(DType::float32, {3, 2});
      },
      {"rank 3", "exp_indices is float32"}));
  EXPECT_TRUE(refuses_case(
      [](ExpertCase& c) {
        c.weights[0] = HostTensor(DType::float32, {3, 1});
      },
      {"weights[0] has shape"}));
  EXPECT_TRUE(refuses_case(
      [](ExpertCase& c) {
        c.weights[0] = HostTensor(DType::bfloat16, {3, 2});
      },
      {"weights[0] is bfloat16"}));
  EXPECT_TRUE(refuses_case(
      [](ExpertCase& c) {
        c.scales.assign(4, HostTensor(DType::float32, {3, 1}));
      },
      {"scales", "none"}));
}

TEST(SimulateExpertDispatchErrors, NameTheIdThatIsOutOfRange) {
  for (const std::int32_t id : {-1, -2, 9, 1 << 30}) {
    EXPECT_TRUE(refuses_case([&](ExpertCase& c) { c.ids[1].as<std::int32_t>()[3] = id; },
                             {"rank 1", concat("exp_indices[1][1] = ", id), "0..7", "8"}));
  }
  EXPECT_TRUE(refuses_case([](ExpertCase& c) { c.ids[0].as<std::int32_t>()[0] = 8; },
                           {"rank 0", "= 8", "-1 for a dropped"}, {.dropped_id = -1}));
  EXPECT_TRUE(refuses_case(
      [](ExpertCase& c) {
        c.ids[0] = HostTensor(DType::int64, {3, 2});
        c.ids[0].as<std::int64_t>()[5] = (std::int64_t{1} << 32) + 1;
      },
      {"exp_indices[2][1] = 4294967297"}));
}

TEST(SimulateExpertDispatchErrors, RefusePositionsThatAreNoBijection) {
  const auto with_positions = [](ExpertCase& one) -> std::span<std::int32_t> {
    const auto positions = canonical_scatter_indices(one.config, one.dispatch().ids);
    one.positions = HostTensor(DType::int32, {12, 2});
    std::ranges::copy(positions, one.positions->as<std::int32_t>().begin());
    for (HostTensor& ids : one.ids) std::ranges::fill(ids.as<std::int32_t>(), 5);
    for (std::int32_t i = 0; i < 24; ++i) one.positions->as<std::int32_t>()[i] = i;
    return one.positions->as<std::int32_t>();
  };
  EXPECT_TRUE(refuses_case([&](ExpertCase& c) { with_positions(c)[1] = 24; },
                           {"rank 0, token 0, topk slot 1 = 24", "0..23", "rank 2"}));
  EXPECT_TRUE(refuses_case([&](ExpertCase& c) { with_positions(c)[1] = -1; }, {"= -1"}));
  EXPECT_TRUE(refuses_case([&](ExpertCase& c) { with_positions(c)[1] = 0; }, {"= 0", "taken"}));
  EXPECT_TRUE(refuses_case([&](ExpertCase& c) { with_positions(c)[23] = 0; },
                           {"rank 3, token 2, topk slot 1", "another topk slot"}));
  EXPECT_TRUE(refuses_case(
      [&](ExpertCase& c) {
        with_positions(c);
        c.positions = HostTensor(DType::int32, {3, 2});
      },
      {"full_scatter_indices has shape [3, 2]", "[12, 2]"}));
  EXPECT_TRUE(refuses_case([&](ExpertCase& c) { with_positions(c); },
                           {"full_scatter_indices", "compact rows"}, {.rows = EPRows::compact}));
}

}  // namespace
}  // namespace waybill::test
