// The validator agrees with everything that the library computes.

#include <gtest/gtest.h>

#include "validate_plans.h"
#include "waybill/core/error.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/validate.h"

namespace waybill {
namespace {

std::string text(const std::vector<Finding>& findings) {
  std::string lines;
  for (const Finding& finding : findings) lines += to_string(finding) + "\n";
  return lines;
}

class ValidateClean : public ::testing::TestWithParam<int> {};

TEST_P(ValidateClean, RandomPlansSparse) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(concat("block ", GetParam(), ", seed ", seed));
    Random random(1000 * static_cast<std::uint64_t>(GetParam()) + seed);
    const QkvPlan plan = test::draw_plan(random);
    EXPECT_EQ(text(validate(plan)), "");
    const QkvRouting routing = compute_qkv_routing(plan);
    EXPECT_EQ(text(validate(plan, routing)), "");
    EXPECT_EQ(text(validate(routing.fwd_q, routing.rev_q)), "");
    EXPECT_EQ(text(validate(routing.fwd_kv, routing.rev_kv)), "");
  }
}

TEST_P(ValidateClean, RandomPlansDense) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(concat("block ", GetParam(), ", seed ", seed));
    Random random(1000 * static_cast<std::uint64_t>(GetParam()) + seed);
    const QkvPlan plan = test::draw_plan(random);
    E2eMetadata dense = to_dense(compute_qkv_routing(plan));
    EXPECT_EQ(text(validate(plan, dense)), "");
    EXPECT_EQ(text(validate(dense.fwd_kv, dense.rev_kv)), "");
    for (Metadata* table : {&dense.fwd_q, &dense.rev_q, &dense.fwd_kv, &dense.rev_kv}) {
      *table = table->normalize_dtype();
    }
    EXPECT_EQ(text(validate(plan, dense)), "");
  }
}

TEST_P(ValidateClean, GeneratedPlans) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    SCOPED_TRACE(concat("block ", GetParam(), ", seed ", seed));
    const std::int64_t world = 1 + (GetParam() * 7 + static_cast<int>(seed)) % 16;
    const std::int64_t degree = world >= 4 ? 4 : 1;
    const QkvDispatch made = create_qkv_dispatch(world, 256, 3, degree, seed);
    EXPECT_EQ(text(validate(made.plan, made.metadata)), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Blocks, ValidateClean, ::testing::Range(0, 8));

TEST(Validate, BalancedExampleIsClean) {
  const QkvDispatch made = create_balanced_example();
  EXPECT_EQ(text(validate(made.plan, made.metadata)), "");
}

TEST(Validate, CopiesThatGoAnywhereAreClean) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const std::int64_t world = 1 + random.below(8);
    const std::int64_t shards = random.below(6);
    const std::int64_t copies = 1 + random.below(4);
    IndexArray len({world, shards});
    IndexArray dst({world, shards, copies});
    for (std::int64_t i = 0; i < len.size(); ++i) {
      bool sent = false;
      for (std::int64_t k = 0; k < copies; ++k) {
        const std::int64_t rank = random.below(world + 1) - 1;  // -1 anywhere among the copies
        dst.i64()[i * copies + k] = rank;
        sent |= rank >= 0;
      }
      len.i64()[i] = sent ? random.below(5) : 0;
    }
    const DispatchMetadata made = compute_metadata(len, dst);
    EXPECT_EQ(text(validate(made.fwd, made.rev)), "");
  }
}

TEST(Validate, RowsThatStayBehindAreNamed) {
  const auto len = IndexArray::matrix({{4, 6}, {5, 0}});
  const auto dst = IndexArray::matrix({{1, -1}, {0, -1}});
  const DispatchMetadata made = compute_metadata(len, dst, false, Undispatched::keep);
  EXPECT_EQ(text(validate(made.fwd, made.rev)),
            "fwd.dst_rank: rank 0, shard 1: got no destination for 6 rows, expected one "
            "(undispatched)\n");
}

TEST(Validate, EmptyPlans) {
  for (const KvLayout layout : {KvLayout::per_query, KvLayout::per_rank}) {
    QkvPlan plan;
    plan.world_size = 3;
    plan.kv_layout = layout;
    plan.rank_shard_offsets = {0, 0, 0, 0};
    plan.doc_shard_offsets = {0};
    EXPECT_EQ(text(validate(plan)), "");
    const QkvRouting routing = compute_qkv_routing(plan);
    EXPECT_EQ(text(validate(plan, routing)), "");
    EXPECT_EQ(text(validate(plan, to_dense(routing))), "");
  }
}

TEST(Validate, FindingsArePrinted) {
  const Finding finding{.kind = FindingKind::overlap,
                        .table = "fwd_q",
                        .field = "dst_offset",
                        .rank = 3,
                        .shard = 7,
                        .copy = 0,
                        .got = "120",
                        .expected = "128"};
  EXPECT_EQ(to_string(finding),
            "fwd_q.dst_offset: rank 3, shard 7, copy 0: got 120, expected 128 (overlap)");
  const Finding whole{.kind = FindingKind::shape,
                      .table = "plan",
                      .field = "world_size",
                      .got = "0",
                      .expected = "1"};
  EXPECT_EQ(to_string(whole), "plan.world_size: got 0, expected 1 (shape)");
}

}  // namespace
}  // namespace waybill
