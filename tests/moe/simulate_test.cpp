#include "waybill/moe/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "core/to_size.h"
#include "moe/expert_case.h"

namespace waybill::test {
namespace {

using detail::to_size;

EPConfig config_of(std::int32_t world, std::int32_t per_node, std::int32_t experts_per_rank,
                   std::int32_t topk, DType dtype = DType::bfloat16) {
  EPConfig config;
  config.max_tokens = 9;
  config.hidden = 24;
  config.topk = topk;
  config.num_experts = world * experts_per_rank;
  config.world_size = world;
  config.local_world_size = per_node;
  config.token_dtype = dtype;
  return config;
}

std::int64_t id_at(const ExpertCase& one, std::size_t src, std::int64_t idx) {
  return one.ids[src].dtype() == DType::int32 ? one.ids[src].as<std::int32_t>()[idx]
                                              : one.ids[src].as<std::int64_t>()[idx];
}

/// One topk slot: expert, source, token, topk slot. Sorted, that is the order of rows.
using TopkSlot = std::array<std::int64_t, 4>;

std::vector<TopkSlot> ids_of(const ExpertCase& one, std::int64_t rank) {
  const EPConfig& config = one.config;
  std::vector<TopkSlot> result;
  for (std::size_t src = 0; src < one.ids.size(); ++src) {
    for (std::int64_t i = 0; i < one.ids[src].shape()[0] * config.topk; ++i) {
      const std::int64_t id = id_at(one, src, i);
      if (id < 0 || id / config.num_experts_per_rank() != rank) continue;
      result.push_back({id, static_cast<std::int64_t>(src), i / config.topk, i % config.topk});
    }
  }
  std::ranges::sort(result);
  return result;
}

void expect_row(const ExpertDispatch& dispatch, const ExpertCase& one, std::size_t dst,
                std::int64_t row, const TopkSlot& from) {
  const std::int64_t hidden = one.config.hidden;
  for (std::int64_t field = 0; field < 3; ++field) {
    ASSERT_EQ(dispatch.recv_origin[dst].at({row, field}), from[field + 1]);
  }
  for (std::int64_t i = 0; i < hidden; ++i) {
    ASSERT_EQ(float_at(dispatch.recv_tokens[dst], row * hidden + i),
              float_at(one.tokens[from[1]], from[2] * hidden + i));
  }
}

void expect_padding(const ExpertDispatch& dispatch, std::size_t dst, std::int64_t row) {
  ASSERT_EQ(dispatch.recv_origin[dst].at({row, 0}), -1);
  ASSERT_EQ(float_at(dispatch.recv_weights[dst], row), 0);
  for (std::int64_t i = 0; i < dispatch.config.hidden; ++i) {
    ASSERT_EQ(float_at(dispatch.recv_tokens[dst], row * dispatch.config.hidden + i), 0);
  }
}

TEST(SimulateExpertDispatch, RowsAreSortedChoicesPaddedPerExpert) {
  Random random(11);
  for (int round = 0; round < 60; ++round) {
    const std::int32_t world = 1 << random.below(4);
    constexpr std::int32_t topks[] = {1, 2, 3, 5, 32};
    const EPConfig config = config_of(world, world, 3, topks[random.below(5)]);
    RandomCaseOptions draw;
    draw.id_dtype = round % 2 == 0 ? DType::int32 : DType::int64;
    const ExpertCase one = random_case(config, random, draw);
    EPDispatchOptions options;
    options.expert_alignment = random.below(6) + 1;
    const ExpertDispatch dispatch = one.dispatch(options);
    for (std::int32_t dst = 0; dst < world; ++dst) {
      std::int64_t row = 0;
      std::int64_t expert = std::int64_t{dst} * 3;
      const auto close_expert = [&] {
        for (; row % options.expert_alignment != 0; ++row)
          expect_padding(dispatch, to_size(dst), row);
        ++expert;
        EXPECT_EQ(dispatch.layout[dst].recv_expert_offsets.at({expert - dst * 3}), row);
      };
      for (const TopkSlot& topk_slot : ids_of(one, dst)) {
        while (expert < topk_slot[0]) close_expert();
        ASSERT_NO_FATAL_FAILURE(expect_row(dispatch, one, to_size(dst), row, topk_slot));
        ASSERT_EQ(float_at(dispatch.recv_weights[dst], row),
                  float_at(one.weights[topk_slot[1]], topk_slot[2] * config.topk + topk_slot[3]));
        ++row;
      }
      while (expert < (dst + 1) * 3) close_expert();
      EXPECT_EQ(dispatch.recv_tokens[dst].shape()[0], row);
    }
  }
}

TEST(SimulateExpertDispatch, CompactRowsAndTheirMapsGiveTheGroupedRows) {
  Random random(12);
  for (int round = 0; round < 40; ++round) {
    const std::int32_t world = 1 << random.below(4);
    const EPConfig config = config_of(world, world > 2 ? world / 2 : world, 2, 4);
    const ExpertCase one = random_case(config, random);
    EPDispatchOptions options;
    options.expert_alignment = round % 3 + 1;
    const ExpertDispatch grouped = one.dispatch(options);
    options.rows = EPRows::compact;
    const ExpertDispatch compact = one.dispatch(options);
    for (std::size_t dst = 0; dst < to_size(world); ++dst) {
      const IndexArray& map = *compact.layout[dst].grouped_to_compact;
      const IndexArray& back = *compact.layout[dst].compact_to_grouped;
      const IndexArray& experts = *compact.layout[dst].recv_topk_indices;
      ASSERT_EQ(map.dim(0), grouped.recv_tokens[dst].shape()[0]);
      std::set<std::int64_t> used;
      for (std::int64_t row = 0; row < map.dim(0); ++row) {
        const std::int64_t from = map.at({row});
        used.insert(from);
        if (from < 0) {
          EXPECT_EQ(grouped.recv_origin[dst].at({row, 0}), -1);
          continue;
        }
        const std::int64_t topk_slot = grouped.recv_origin[dst].at({row, 2});
        EXPECT_EQ(back.at({from, topk_slot}), row);
        EXPECT_LE(grouped.layout[dst].recv_expert_offsets.at({experts.at({from, topk_slot})}), row);
        EXPECT_GT(grouped.layout[dst].recv_expert_offsets.at({experts.at({from, topk_slot}) + 1}),
                  row);
        EXPECT_EQ(float_at(compact.recv_weights[dst], from * config.topk + topk_slot),
                  float_at(grouped.recv_weights[dst], row));
        for (std::int64_t i = 0; i < config.hidden; ++i) {
          ASSERT_EQ(float_at(compact.recv_tokens[dst], from * config.hidden + i),
                    float_at(grouped.recv_tokens[dst], row * config.hidden + i));
        }
      }
      used.erase(-1);
      EXPECT_EQ(static_cast<std::int64_t>(used.size()), compact.recv_tokens[dst].shape()[0]);
    }
  }
}

TEST(SimulateExpertDispatch, MinusOneDropsWhereItIsAskedFor) {
  Random random(13);
  const EPConfig config = config_of(4, 2, 2, 3);
  ExpertCase one = random_case(config, random, {.edges = false});
  const ExpertDispatch usual = one.dispatch();
  for (HostTensor& ids : one.ids) {
    std::ranges::replace(ids.as<std::int32_t>(), config.num_experts, -1);
  }
  EPDispatchOptions options;
  options.dropped_id = -1;
  const ExpertDispatch other = one.dispatch(options);
  EXPECT_EQ(other.ids, usual.ids);
  EXPECT_EQ(other.rows, usual.rows);
}

TEST(SimulateExpertDispatch, CanonicalPositionsChangeNothing) {
  Random random(14);
  for (const std::int32_t per_node : {4, 2, 1}) {
    ExpertCase one = random_case(config_of(4, per_node, 3, 4), random);
    const ExpertDispatch usual = one.dispatch();
    const auto positions = canonical_scatter_indices(one.config, usual.ids);
    one.positions = HostTensor(DType::int32, {static_cast<std::int64_t>(positions.size()) / 4, 4});
    std::ranges::copy(positions, one.positions->as<std::int32_t>().begin());
    const ExpertDispatch same = one.dispatch();
    EXPECT_EQ(same.dst_row, usual.dst_row);
    for (std::size_t r = 0; r < 4; ++r) EXPECT_EQ(same.recv_origin[r], usual.recv_origin[r]);
  }
}

TEST(SimulateExpertDispatch, QuantisesOnceAtTheSource) {
  Random random(15);
  EPConfig config = config_of(2, 2, 2, 2);
  config.hidden = 256;
  ExpertCase one = random_case(config, random, {.tokens = 5});
  std::ranges::fill(one.tokens[0].as<std::uint16_t>().first(128), std::uint16_t{0});
  const ExpertDispatch quantized = one.dispatch({.payload = EPPayload::quantized});
  const ExpertDispatch scaled = test::quantized_case(one).dispatch({.payload = EPPayload::scaled});
  for (std::size_t dst = 0; dst < 2; ++dst) {
    EXPECT_EQ(quantized.recv_tokens[dst].dtype(), DType::float8_e4m3fn);
    EXPECT_TRUE(
        std::ranges::equal(quantized.recv_tokens[dst].bytes(), scaled.recv_tokens[dst].bytes()));
    EXPECT_TRUE(
        std::ranges::equal(quantized.recv_scales[dst].bytes(), scaled.recv_scales[dst].bytes()));
    for (std::int64_t row = 0; row < quantized.recv_tokens[dst].shape()[0]; ++row) {
      const bool zeros = quantized.recv_origin[dst].at({row, 0}) == 0 &&
                         quantized.recv_origin[dst].at({row, 1}) == 0;
      EXPECT_EQ(quantized.recv_scales[dst].as<float>()[row * 2] == 0, zeros);
    }
  }
}

TEST(SimulateExpertDispatch, CrossingsFollowTheTwoStages) {
  Random random(16);
  const EPConfig config = config_of(8, 4, 2, 4);
  const ExpertDispatch dispatch = random_case(config, random, {.edges = false}).dispatch();
  const ExpertTraffic& traffic = dispatch.traffic;
  for (std::int64_t from = 0; from < 8; ++from) {
    for (std::int64_t to = 0; to < 8; ++to) {
      const std::int64_t crossed = traffic.crossings.at({from, to});
      if (from == to) {
        EXPECT_EQ(crossed, 0);
      } else if (from / 4 != to / 4) {
        EXPECT_EQ(crossed, from % 4 == to % 4 ? traffic.inter_node_tokens.at({from, to / 4}) : 0);
      } else {  // its own tokens, and those of the rank of the same local index
        EXPECT_EQ(crossed, traffic.unique_tokens_per_rank_pair.at({from, to}) +
                               traffic.unique_tokens_per_rank_pair.at({(from + 4) % 8, to}));
      }
    }
  }
}

/// All tokens go to the two experts of rank 0: 9 rows each, which alignment 4 makes 12. One row
/// less of an expert is padded as far, one row more to 12, too: no other counts need more rows.
TEST(SimulateExpertDispatch, ARankCanGetAsManyRowsAsMostRecvRowsSays) {
  const EPConfig config = config_of(2, 2, 2, 1);
  ExpertCase one;
  one.config = config;
  for (std::int32_t r = 0; r < 2; ++r) {
    one.tokens.emplace_back(config.token_dtype, Shape{config.max_tokens, config.hidden});
    HostTensor& ids = one.ids.emplace_back(DType::int32, Shape{config.max_tokens, 1});
    std::ranges::fill(ids.as<std::int32_t>(), r);
  }
  EPDispatchOptions options{.expert_alignment = 4};
  EXPECT_EQ(one.dispatch(options).recv_tokens[0].shape()[0], 24);
  EXPECT_EQ(most_recv_rows(config, options), 24);
  options.rows = EPRows::compact;
  const ExpertDispatch compact = one.dispatch(options);
  EXPECT_EQ(compact.recv_tokens[0].shape()[0], 18);
  EXPECT_EQ(most_recv_rows(config, options), 18);
  ASSERT_TRUE(compact.layout[0].grouped_to_compact.has_value());
  EXPECT_EQ(compact.layout[0].grouped_to_compact->shape()[0], 24);  // with places of padding
}

/// What a case has of the edges, as names.
std::vector<std::string> edges_of(const ExpertCase& one) {
  const EPConfig& config = one.config;
  std::vector<std::string> edges;
  std::vector<std::int64_t> chosen(config.num_experts + 1);
  std::int64_t tokens = 0;
  std::int64_t full = 0;
  std::int64_t same = 0;
  for (std::size_t r = 0; r < one.ids.size(); ++r) {
    const std::int64_t count = one.ids[r].shape()[0];
    tokens += count;
    full += count == config.max_tokens ? 1 : 0;
    if (count == 0) edges.push_back(concat("rank ", r, " without tokens"));
    const auto ids = one.ids[r].as<std::int32_t>();
    for (const std::int32_t id : ids) ++chosen[id];
    for (std::size_t t = 0; t < to_size(count); ++t) {
      const auto token = ids.subspan(t * to_size(config.topk), config.topk);
      same += std::ranges::count(token, token[0]) == config.topk ? 1 : 0;
    }
  }
  const std::int64_t entries = tokens * config.topk;
  if (tokens == 1) edges.emplace_back("one token");
  if (full == config.world_size) edges.emplace_back("exactly max_tokens");
  if (entries > 8 && chosen.back() == entries) edges.emplace_back("all dropped");
  if (entries > 8 && same == tokens && chosen.back() == 0) edges.emplace_back("repeated experts");
  if (entries > 99 && std::ranges::count(chosen, 0) == 1 + (chosen.back() == 0 ? 1 : 0)) {
    edges.emplace_back("an expert of nobody");
  }
  if (entries > 8 && std::ranges::max(chosen) + chosen.back() == entries && chosen.back() < entries)
    edges.emplace_back("all to one expert");
  return edges;
}

// A case that breaks something is drawn often, not once in a hundred.
TEST(RandomExpertCase, DrawsTheEdges) {
  Random random(17);
  EPConfig config = config_of(4, 4, 2, 4);
  config.max_tokens = 20;
  std::map<std::string, int> found;
  for (int i = 0; i < 600; ++i) {
    const ExpertCase one = random_case(config, random, {.drop = i % 2 == 0 ? 0 : 0.1});
    for (const std::string& edge : edges_of(one)) ++found[edge];
  }
  std::vector<std::string> expected = {"one token",           "exactly max_tokens",
                                       "all dropped",         "repeated experts",
                                       "an expert of nobody", "all to one expert"};
  for (int r = 0; r < 4; ++r) expected.push_back(concat("rank ", r, " without tokens"));
  for (const std::string& edge : expected) EXPECT_GE(found[edge], 12) << edge;
}

}  // namespace
}  // namespace waybill::test
