#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string_view>

#include "support/difference.h"
#include "support/expect_error.h"
#include "support/seeded.h"
#include "support/slow_model.h"
#include "waybill/routing/generators.h"

namespace waybill {
namespace {

using test::Dice;
using test::difference;
using test::for_seeds;
using test::rejects;

/// Uneven shards, a destination twice, more shards than ranks and an empty rank.
struct MappingCall {
  std::int64_t world_size = 2;
  IndexArray seq_lens = IndexArray::matrix({{6, 4}, {0, 0}});
  IndexArray cp_num = IndexArray::matrix({{3, 1}, {0, 0}});
  IndexArray cp_dst = IndexArray::cube({{{1, 0, 1}, {0, -1, -1}}, {{-1, -1, -1}, {-1, -1, -1}}});
  IndexArray shard_lens = IndexArray::cube({{{1, 3, 2}, {4, 0, 0}}, {{0, 0, 0}, {0, 0, 0}}});
};

QkvDispatch make(const MappingCall& call, bool intermediates = false) {
  return create_qkv_dispatch_with_custom_mapping(call.world_size, call.seq_lens, call.cp_num,
                                                 call.cp_dst, call.shard_lens, intermediates);
}

TEST(CustomMapping, UnevenShardsByHand) {
  const QkvDispatch made = make(MappingCall{}, true);
  EXPECT_EQ(made.raw.cp_seq_lens, IndexArray::matrix({{1, 3, 2, 4}, {0, 0, 0, 0}}));
  EXPECT_EQ(made.raw.num_cp_shards, IndexArray::vector({4, 0}));
  EXPECT_EQ(made.raw.cp_query_dst, IndexArray::matrix({{1, 0, 1, 0}, {-1, -1, -1, -1}}));
  EXPECT_EQ(made.raw.kv.kv_context_size, IndexArray::matrix({{0, 1, 4, 0}, {0, 0, 0, 0}}));
  EXPECT_EQ(made.raw.kv.q_to_num_kv_seq, IndexArray::matrix({{1, 2, 3, 1}, {0, 0, 0, 0}}));
  EXPECT_EQ(made.raw.kv.q_to_num_kv_token, IndexArray::matrix({{1, 4, 6, 4}, {0, 0, 0, 0}}));
  EXPECT_EQ(made.raw.kv.kv_to_q_rank,
            IndexArray::cube({{{0, 0, 0}, {1, 1, -1}, {2, -1, -1}, {0, -1, -1}},
                              {{-1, -1, -1}, {-1, -1, -1}, {-1, -1, -1}, {-1, -1, -1}}}));
  EXPECT_EQ(made.seq_lens, MappingCall{}.seq_lens);
  EXPECT_EQ(made.metadata.fwd_q.dst_offset, IndexArray::matrix({{0, 0, 1, 3}, {0, 0, 0, 0}}));
  // Rank 0 holds the contexts of shards 1 and 3, rank 1 those of shards 0 and 2.
  EXPECT_EQ(made.metadata.fwd_kv.dst_offset,
            IndexArray::cube({{{0, 0, 1}, {1, 2, 0}, {5, 0, 0}, {4, 0, 0}},
                              {{0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}}}));
  EXPECT_EQ(made.metadata.attention.cu_seqlens_kv,
            (std::vector{IndexArray::vector({0, 4, 8}), IndexArray::vector({0, 1, 7})}));
  EXPECT_TRUE(made.metadata.q_intermediates.has_value());
}

TEST(CustomMapping, TablesOfAnyIntegerType) {
  MappingCall narrow;
  narrow.seq_lens = narrow.seq_lens.to(DType::int32);
  narrow.cp_num = narrow.cp_num.to(DType::uint32);
  narrow.cp_dst = narrow.cp_dst.to(DType::int32);
  narrow.shard_lens = narrow.shard_lens.to(DType::uint64);
  const QkvDispatch made = make(narrow);
  EXPECT_EQ(made.plan, make(MappingCall{}).plan);
  EXPECT_EQ(made.seq_lens, MappingCall{}.seq_lens);
}

TEST(CustomMappingProperty, EqualsItsDenseForm) {
  for_seeds([](Dice& dice) {
    MappingCall call;
    call.world_size = dice.in_range<std::int64_t>(1, 7);
    const auto num_seqs = dice.in_range<std::int64_t>(1, 5);
    const auto slots = dice.in_range<std::int64_t>(1, 9);
    call.seq_lens = IndexArray(Shape{call.world_size, num_seqs});
    call.cp_num = call.seq_lens;
    call.cp_dst = IndexArray::full({call.world_size, num_seqs, slots}, -1);
    call.shard_lens = IndexArray(Shape{call.world_size, num_seqs, slots});
    for (std::int64_t w = 0; w < call.world_size; ++w) {
      const std::int64_t used = dice.below(num_seqs + 1);
      for (std::int64_t i = 0; i < used; ++i) {
        const std::int64_t cp = 1 + dice.below(slots);
        test::element(call.cp_num, {w, i}) = cp;
        for (std::int64_t c = 0; c < cp; ++c) {
          const std::int64_t rows = 1 + dice.below(9);
          test::element(call.cp_dst, {w, i, c}) = dice.below(call.world_size);
          test::element(call.shard_lens, {w, i, c}) = rows;
          test::element(call.seq_lens, {w, i}) += rows;
        }
      }
    }
    const QkvDispatch made = make(call);
    made.plan.check("custom mapping");
    EXPECT_EQ(made.plan.kv_layout, KvLayout::per_query);
    EXPECT_TRUE(made.raw == to_raw_dispatch(made.plan, slots));
    const E2eMetadata again = compute_e2e_metadata(made.raw.cp_seq_lens, made.raw.num_cp_shards,
                                                   made.raw.cp_query_dst, made.raw.kv);
    EXPECT_EQ(difference(made.metadata, again), "");
    std::vector<std::int64_t> lens = call.shard_lens.to_vector();
    std::vector<std::int64_t> to = call.cp_dst.to_vector();
    std::erase(lens, 0);
    std::erase(to, -1);
    EXPECT_EQ(made.plan.shard_len, lens);
    EXPECT_EQ((std::vector<std::int64_t>(made.plan.q_dst.begin(), made.plan.q_dst.end())), to);
  });
}

::testing::AssertionResult rejected(const std::function<void(MappingCall&)>& damage,
                                    std::initializer_list<std::string_view> parts) {
  MappingCall call;
  damage(call);
  const auto named =
      rejects([&] { (void)make(call); }, {"create_qkv_dispatch_with_custom_mapping: "});
  return named ? rejects([&] { (void)make(call); }, parts) : named;
}

TEST(CustomMappingErrors, Shapes) {
  EXPECT_TRUE(rejected([](MappingCall& c) { c.world_size = 3; }, {"seq_lens", "2", "3"}));
  EXPECT_TRUE(rejected([](MappingCall& c) { c.world_size = 0; }, {"world_size", "0"}));
  EXPECT_TRUE(
      rejected([](MappingCall& c) { c.seq_lens = IndexArray(Shape{4}); }, {"seq_lens", "[4]"}));
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        c.cp_num = IndexArray(Shape{2, 3});
      },
      {"cp_num", "[2, 3]", "[2, 2]"}));
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        c.cp_dst = IndexArray(Shape{2, 2});
      },
      {"cp_dst", "[2, 2]"}));
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        c.cp_dst = IndexArray(Shape{2, 3, 3});
      },
      {"cp_dst", "[2, 3, 3]", "[2, 2, 3]"}));
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        c.shard_lens = IndexArray(Shape{2, 2, 4});
      },
      {"seq_shard_lens", "[2, 2, 4]", "[2, 2, 3]"}));
}

TEST(CustomMappingErrors, SequencesOfOneRank) {
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        test::element(c.seq_lens, {0, 0}) = -6;
      },
      {"seq_lens", "rank 0", "-6"}));
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        test::element(c.seq_lens, {1, 1}) = 5;
      },
      {"seq_lens", "rank 1", "sequence 1", "5"}));
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        test::element(c.seq_lens, {0, 0}) = 7;
      },
      {"seq_shard_lens", "rank 0", "sequence 0", "6", "expected 7"}));
}

TEST(CustomMappingErrors, NumberOfShards) {
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        test::element(c.cp_num, {0, 0}) = 4;
      },
      {"cp_num", "rank 0", "sequence 0", "4", "3"}));
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        test::element(c.cp_num, {0, 1}) = 0;
      },
      {"cp_num", "rank 0", "sequence 1", "0"}));
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        test::element(c.cp_num, {0, 1}) = -1;
      },
      {"cp_num", "-1"}));
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        test::element(c.cp_num, {1, 0}) = 1;
      },
      {"cp_num", "rank 1", "sequence 0", "1"}));
}

TEST(CustomMappingErrors, Destinations) {
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        test::element(c.cp_dst, {0, 0, 1}) = 2;
      },
      {"cp_dst", "rank 0", "sequence 0", "shard 1", "2", "0..1"}));
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        test::element(c.cp_dst, {0, 0, 2}) = -1;
      },
      {"cp_dst", "rank 0", "sequence 0", "shard 2", "-1", "0..1"}));
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        test::element(c.cp_dst, {0, 1, 2}) = 0;
      },
      {"cp_dst", "rank 0", "sequence 1", "shard 2", "0", "-1"}));
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        test::element(c.cp_dst, {1, 1, 0}) = 1;
      },
      {"cp_dst", "rank 1", "sequence 1", "shard 0"}));
}

TEST(CustomMappingErrors, ShardLengths) {
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        test::element(c.shard_lens, {0, 0, 1}) = 0;
      },
      {"seq_shard_lens", "rank 0", "sequence 0", "shard 1", "0", "> 0"}));
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        test::element(c.shard_lens, {0, 0, 1}) = -3;
      },
      {"seq_shard_lens", "rank 0", "sequence 0", "shard 1", "-3"}));
  EXPECT_TRUE(rejected(
      [](MappingCall& c) {
        test::element(c.shard_lens, {0, 1, 1}) = 2;
      },
      {"seq_shard_lens", "rank 0", "sequence 1", "shard 1", "2", "0"}));
}

}  // namespace
}  // namespace waybill
