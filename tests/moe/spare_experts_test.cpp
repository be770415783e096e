// Rows of a dispatch with spare experts: each lies in the slot that the plan says.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "moe/expert_case.h"
#include "support/expect_error.h"

namespace waybill::test {
namespace {

EPConfig config_with_slots(std::int32_t world, std::int32_t per_node, std::int32_t topk) {
  EPConfig config;
  config.max_tokens = 11;
  config.hidden = 8;
  config.topk = topk;
  config.num_experts = 3 * world;
  config.world_size = world;
  config.local_world_size = per_node;
  config.token_dtype = DType::float32;
  return config;
}

/// Source rank, token, topk slot.
using Origin = std::array<std::int64_t, 3>;

/// The topk slots of each expert, by source rank, token and topk slot.
std::vector<std::vector<Origin>> rows_of_experts(const ExpertCase& one) {
  std::vector<std::vector<Origin>> rows(one.config.num_experts);
  for (std::size_t src = 0; src < one.ids.size(); ++src) {
    const auto ids = one.ids[src].as<std::int32_t>();
    for (std::int64_t i = 0; i < std::ssize(ids); ++i) {
      if (ids[i] == one.config.num_experts) continue;
      rows[ids[i]].push_back(
          {static_cast<std::int64_t>(src), i / one.config.topk, i % one.config.topk});
    }
  }
  return rows;
}

/// Local first, from the quotas alone: the rows of each rank and slot.
std::vector<std::vector<Origin>> rows_of_slots(const ExpertCase& one, const EvenExperts& plan) {
  auto left = rows_of_experts(one);
  std::vector<std::vector<Origin>> slots(plan.slots.size());
  for (const bool own : {true, false}) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (plan.slots[i] < 0) continue;
      const auto rank = static_cast<std::int64_t>(i) / plan.slots_per_rank;
      std::erase_if(left[plan.slots[i]], [&](const Origin& row) {
        if (std::ssize(slots[i]) == plan.quotas[i] || (own && row[0] != rank)) return false;
        slots[i].push_back(row);
        return true;
      });
    }
  }
  for (auto& rows : slots) std::ranges::sort(rows);
  return slots;
}

void expect_rows_in_slots(const ExpertCase& one, const EPDispatchOptions& options) {
  const ExpertDispatch dispatch = one.dispatch(options);
  ASSERT_TRUE(dispatch.slots.has_value());
  const EvenExperts& plan = dispatch.slots->plan;
  const auto slots = rows_of_slots(one, plan);
  for (std::int32_t rank = 0; rank < one.config.world_size; ++rank) {
    const EPAll2AllLayoutDesc& layout = dispatch.layout[rank];
    std::int64_t row = 0;
    for (std::int64_t s = 0; s < plan.slots_per_rank; ++s) {
      const std::int64_t i = rank * plan.slots_per_rank + s;
      EXPECT_EQ(layout.slot_experts->at({s}), plan.slots[i]);
      EXPECT_EQ(layout.all_slot_experts->at({rank, s}), plan.slots[i]);
      EXPECT_EQ(layout.all_slot_quotas->at({rank, s}), plan.quotas[i]);
      EXPECT_EQ(layout.recv_expert_counts.at({s}), plan.quotas[i]);
      EXPECT_EQ(layout.recv_expert_offsets.at({s}), row);
      ASSERT_EQ(std::ssize(slots[i]), plan.quotas[i]);
      for (const Origin& from : slots[i]) {
        for (std::int64_t field = 0; field < 3; ++field) {
          ASSERT_EQ(dispatch.recv_origin[rank].at({row, field}), from[field]);
        }
        const std::int64_t hidden = one.config.hidden;
        ASSERT_EQ(float_at(dispatch.recv_tokens[rank], row * hidden),
                  float_at(one.tokens[from[0]], from[1] * hidden));
        ++row;
      }
      while (row % options.expert_alignment != 0) ++row;
    }
    EXPECT_EQ(dispatch.rows.num_recv_rows[rank], row);
  }
}

TEST(SimulateSpareExperts, RowsLieInTheirSlotsLocalFirst) {
  Random random(51);
  for (int round = 0; round < 80; ++round) {
    SCOPED_TRACE(round);
    const std::int32_t world = 1 << random.below(4);
    const EPConfig config = config_with_slots(world, round % 3 == 0 ? 1 : world, round % 4 + 1);
    EPDispatchOptions options;
    options.spare_experts = round % 3 + 1;
    options.expert_alignment = round % 4 == 1 ? 4 : 1;
    options.limit = round % 5 == 0 ? 1.5 : 1.0;
    options.min_rows = round % 7 == 0 ? 5 : 0;
    expect_rows_in_slots(random_case(config, random), options);
  }
}

TEST(SimulateSpareExperts, AllTokensToOneExpertAreSpreadEvenly) {
  const EPConfig config = config_with_slots(4, 4, 1);
  Random random(52);
  const auto one = random_case(config, random, {.draw = Draw::one_expert, .drop = 0, .tokens = 10});
  EPDispatchOptions options;
  EXPECT_EQ(one.dispatch(options).rows.num_recv_rows, (std::vector<std::int32_t>{0, 0, 0, 40}));
  options.spare_experts = 1;
  const ExpertDispatch even = one.dispatch(options);
  EXPECT_EQ(even.rows.num_recv_rows, (std::vector<std::int32_t>{10, 10, 10, 10}));
  EXPECT_EQ(even.traffic.crossings, IndexArray({4, 4}));  // local first: nothing travels
  EXPECT_EQ(even.layout[0].slot_experts->to_vector(), (std::vector<std::int64_t>{0, 1, 2, 11}));
  EXPECT_EQ(even.layout[3].slot_experts->to_vector(), (std::vector<std::int64_t>{9, 10, 11, -1}));
}

TEST(SimulateSpareExperts, PresentCopiesAreUsedAgain) {
  const EPConfig config = config_with_slots(4, 4, 1);
  Random random(53);
  const auto one = random_case(config, random, {.draw = Draw::one_expert, .drop = 0, .tokens = 10});
  EPDispatchOptions options;
  options.spare_experts = 2;
  const std::vector<std::int32_t> present = {-1, 11, -1, 11, -1, 11, -1, -1};
  const ExpertDispatch without = one.dispatch(options);
  const ExpertDispatch with = one.dispatch(options, present);
  const auto sum = [](const std::vector<std::int32_t>& values) {
    return std::accumulate(values.begin(), values.end(), 0);
  };
  EXPECT_EQ(sum(without.slots->plan.weights_in), 3);
  EXPECT_EQ(sum(with.slots->plan.weights_in), 0);
  EXPECT_EQ(with.layout[1].slot_experts->at({4}), 11);
}

TEST(SimulateSpareExperts, WithoutThemThereAreNoSlots) {
  Random random(54);
  const ExpertDispatch plain = random_case(config_with_slots(2, 2, 2), random).dispatch();
  EXPECT_FALSE(plain.slots.has_value());
  EXPECT_FALSE(plain.layout[0].slot_experts.has_value());
  EXPECT_FALSE(plain.layout[0].all_slot_experts.has_value());
  EXPECT_FALSE(plain.layout[0].all_slot_quotas.has_value());
}

TEST(SimulateSpareExperts, SumsOfOneNodeAreThoseWithoutCopies) {
  Random random(55);
  const EPConfig config = config_with_slots(4, 4, 3);
  const ExpertCase one = random_case(config, random, {.edges = false});
  EPDispatchOptions options;
  const auto sums = [&] {
    const ExpertDispatch dispatch = one.dispatch(options);
    return simulate_expert_combine(dispatch, views_of(dispatch.recv_tokens));
  };
  const auto plain = sums();
  options.spare_experts = 2;
  const auto even = sums();
  for (std::size_t r = 0; r < plain.size(); ++r) {
    EXPECT_TRUE(std::ranges::equal(plain[r].bytes(), even[r].bytes()));
  }
}

TEST(SimulateSpareExperts, BadInputIsRefusedByName) {
  Random random(56);
  const EPConfig config = config_with_slots(2, 2, 2);
  ExpertCase one = random_case(config, random, {.tokens = 3});
  const auto refuses = [&](auto&& change, std::initializer_list<std::string_view> parts,
                           std::span<const std::int32_t> present = {}) {
    EPDispatchOptions options;
    options.spare_experts = 1;
    change(options);
    EXPECT_TRUE(rejects([&] { (void)one.dispatch(options, present); }, parts));
  };
  const auto same = [](EPDispatchOptions&) {};
  const double nan = std::numeric_limits<double>::quiet_NaN();
  refuses([](auto& o) { o.spare_experts = -1; }, {"simulate_expert_dispatch: spare_experts = -1"});
  refuses([](auto& o) { o.spare_experts = 7; },
          {"spare_experts = 7", "expected 0..num_experts = 6"});
  refuses([](auto& o) { o.limit = 0.99; }, {"limit = 0.99", "expected >= 1"});
  refuses([&](auto& o) { o.limit = nan; }, {"limit = nan", "expected >= 1"});
  refuses([](auto& o) { o.min_rows = -1; }, {"min_rows = -1", "expected >= 0"});
  refuses([](auto& o) { o.spare_experts = 0; }, {"present is given, expected none"},
          std::vector<std::int32_t>{-1, -1});
  refuses(same, {"present of rank 0, slot 0 is 2, a home expert"}, std::vector<std::int32_t>{2, 0});
  refuses(same, {"present of rank 1, slot 0 is 6"}, std::vector<std::int32_t>{-1, 6});
  refuses(same, {"present has 3 slots, expected 2 x 1"}, std::vector<std::int32_t>{-1, -1, -1});
  refuses([](auto& o) { o.spare_experts = 2; }, {"present names expert 4 twice on rank 0"},
          std::vector<std::int32_t>{4, 4, -1, -1});
  one.positions = HostTensor(DType::int32, {6, 2});
  refuses(same, {"full_scatter_indices are given, expected none with spare_experts = 1"});
}

}  // namespace
}  // namespace waybill::test
