#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "support/expect_error.h"
#include "waybill/core/error.h"
#include "waybill/core/random.h"
#include "waybill/planner/expert_balance.h"

namespace waybill {
namespace {

std::vector<std::int64_t> random_rows(Random& random, std::int32_t cells) {
  std::vector<std::int64_t> rows(cells);
  for (std::int64_t& n : rows) {
    const std::int64_t draw = random.below(4096);
    n = draw < 512 ? 0 : draw % 97 == 0 ? draw * 50 : draw;
  }
  return rows;
}

void expect_equal(const EvenExperts& a, const EvenExperts& b) {
  EXPECT_EQ(a.slots, b.slots);
  EXPECT_EQ(a.quotas, b.quotas);
  EXPECT_EQ(a.local_rows, b.local_rows);
  EXPECT_EQ(a.first_row, b.first_row);
  EXPECT_EQ(a.weights_out, b.weights_out);
  EXPECT_EQ(a.weights_in, b.weights_in);
  EXPECT_EQ(a.max_rows, b.max_rows);
  EXPECT_EQ(a.bound, b.bound);
}

TEST(EvenExperts, APlannerUsedAgainPlansAsANewOne) {
  Random random(7);
  for (const std::int32_t num_ranks : {1, 2, 8, 16}) {
    const std::int32_t num_experts = num_ranks * 4;
    const EvenExpertsOptions options{.spare_experts = 2, .limit = 1.01};
    EvenExpertsPlanner planner(num_ranks, num_experts, options);
    EvenExperts plan;
    for (int call = 0; call < 20; ++call) {
      const std::vector<std::int64_t> rows = random_rows(random, num_ranks * num_experts);
      planner.plan(rows, plan);
      expect_equal(plan, even_experts(rows, num_ranks, num_experts, options));
    }
  }
}

TEST(EvenExperts, ARefusedCallLeavesThePlannerUsable) {
  EvenExpertsPlanner planner(2, 4, {.spare_experts = 1});
  EvenExperts plan;
  EXPECT_THROW(planner.plan(std::vector<std::int64_t>{1, 2, 3, 4, 5, 6, 7, -1}, plan),
               InvalidArgument);
  EXPECT_THROW(planner.plan(std::vector<std::int64_t>{1, 2, 3}, plan), InvalidArgument);
  planner.plan(std::vector<std::int64_t>{9, 0, 0, 0, 1, 0, 0, 0}, plan);
  EXPECT_EQ(plan.max_rows, 5);
  EXPECT_EQ(plan.slots, (std::vector<std::int32_t>{0, 1, -1, 2, 3, 0}));
}

TEST(EvenExperts, SaysWhatALimitMayBe) {
  for (const double limit : {0.5, 1e300}) {
    const EvenExpertsOptions options{.spare_experts = 1, .limit = limit};
    EXPECT_TRUE(test::rejects([&] { EvenExpertsPlanner(2, 4, options); },
                              {concat("limit = ", limit, ", expected >= 1 and < 1e+09")}));
  }
}

TEST(SlotIds, MeetTheQuotasAndTakeLocalRowsFirst) {
  Random random(11);
  constexpr std::int32_t num_ranks = 4;
  constexpr std::int32_t num_experts = 8;
  std::vector<std::int64_t> rows(num_ranks * num_experts);
  for (std::int64_t& n : rows) n = random.below(30);
  const EvenExperts plan = even_experts(rows, num_ranks, num_experts, {.spare_experts = 2});
  std::vector<std::int64_t> in_slots(plan.slots.size());
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    std::vector<std::int32_t> ids;
    for (std::int32_t e = 0; e < num_experts; ++e) ids.insert(ids.end(), rows[rank * 8 + e], e);
    ids.push_back(num_experts);
    const std::vector<std::int32_t> slots = slot_ids(plan, rows, ids, rank);
    EXPECT_EQ(slots.back(), std::ssize(plan.slots));
    std::vector<std::int64_t> own(plan.slots_per_rank);
    for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
      EXPECT_EQ(plan.slots[slots[i]], ids[i]);
      ++in_slots[slots[i]];
      if (slots[i] / plan.slots_per_rank == rank) ++own[slots[i] % plan.slots_per_rank];
    }
    for (std::int32_t s = 0; s < plan.slots_per_rank; ++s) {
      EXPECT_GE(own[s], plan.local_rows[rank * plan.slots_per_rank + s]);
    }
  }
  EXPECT_EQ(in_slots, plan.quotas);
  EXPECT_THROW((void)slot_ids(plan, rows, std::vector<std::int32_t>{0}, 0), InvalidArgument);
}

}  // namespace
}  // namespace waybill
