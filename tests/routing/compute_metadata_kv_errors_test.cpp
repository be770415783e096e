#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string_view>

#include "support/expect_error.h"
#include "waybill/routing/compute_metadata.h"

namespace waybill {
namespace {

using test::rejects;

/// One document of two shards, (0, 0) and (1, 0), and one of a single shard, (0, 1).
struct Call {
  KvMapping mapping{.kv_to_q_mapping = IndexArray(Shape{2, 2, 2, 2}, {0, 0, 1, 0, 0, 1, -1, -1, 1,
                                                                      0, -1, -1, -1, -1, -1, -1}),
                    .kv_to_q_rank = IndexArray::cube({{{0, 0}, {0, -1}}, {{1, -1}, {-1, -1}}}),
                    .kv_context_size = IndexArray::matrix({{0, 0}, {3, 0}}),
                    .q_to_num_kv_seq = IndexArray::matrix({{1, 1}, {2, 0}}),
                    .q_to_num_kv_token = IndexArray::matrix({{3, 2}, {7, 0}})};
  IndexArray seq_len = IndexArray::matrix({{3, 2}, {4, 0}});
  IndexArray num_seqs = IndexArray::vector({2, 1});
  IndexArray q_dispatch = IndexArray::matrix({{1, 1}, {0, -1}});
};

/// Expects that a good call is rejected after `damage`, in words that hold every part.
::testing::AssertionResult rejected(const std::function<void(Call&)>& damage,
                                    std::initializer_list<std::string_view> parts) {
  Call call;
  damage(call);
  const auto run = [&] {
    (void)compute_metadata_kv(call.mapping, call.seq_len, call.num_seqs, call.q_dispatch);
  };
  const ::testing::AssertionResult named = rejects(run, {"compute_metadata_kv: "});
  return named ? rejects(run, parts) : named;
}

void set(IndexArray& array, std::size_t at, std::int64_t value) { array.i64()[at] = value; }

TEST(ComputeMetadataKvErrors, TheUndamagedCallIsGood) {
  const Call call;
  EXPECT_NO_THROW(
      (void)compute_metadata_kv(call.mapping, call.seq_len, call.num_seqs, call.q_dispatch));
}

TEST(ComputeMetadataKvErrors, Shapes) {
  const IndexArray wide(Shape{2, 3});
  EXPECT_TRUE(rejected(
      [&](Call& c) {
        c.mapping.kv_to_q_mapping = IndexArray(Shape{2, 2, 2});
      },
      {"kv_to_q_mapping", "[2, 2, 2]"}));
  EXPECT_TRUE(rejected(
      [&](Call& c) {
        c.mapping.kv_to_q_mapping = IndexArray(Shape{2, 2, 2, 3});
      },
      {"kv_to_q_mapping", "[2, 2, 2, 3]", "[2, 2, 2, 2]"}));
  EXPECT_TRUE(rejected(
      [&](Call& c) {
        c.mapping.kv_to_q_mapping = IndexArray(Shape{2, 3, 2, 2});
      },
      {"kv_to_q_mapping", "[2, 3, 2, 2]", "[2, 2, 2, 2]"}));
  EXPECT_TRUE(rejected(
      [&](Call& c) {
        c.mapping.kv_to_q_rank = IndexArray(Shape{2, 2, 3});
      },
      {"kv_to_q_rank", "[2, 2, 3]", "[2, 2, 2]"}));
  EXPECT_TRUE(rejected([&](Call& c) { c.mapping.kv_context_size = wide; },
                       {"kv_context_size", "[2, 3]", "[2, 2]"}));
  EXPECT_TRUE(rejected([&](Call& c) { c.mapping.q_to_num_kv_seq = wide; },
                       {"q_to_num_kv_seq", "[2, 3]", "[2, 2]"}));
  EXPECT_TRUE(rejected([&](Call& c) { c.mapping.q_to_num_kv_token = wide; },
                       {"q_to_num_kv_token", "[2, 3]", "[2, 2]"}));
  EXPECT_TRUE(
      rejected([&](Call& c) { c.num_seqs = IndexArray(Shape{3}); }, {"num_seqs", "[3]", "[2]"}));
  EXPECT_TRUE(rejected([&](Call& c) { c.q_dispatch = wide; }, {"q_dispatch", "[2, 3]", "[2, 2]"}));
  EXPECT_TRUE(rejected([&](Call& c) { c.seq_len = IndexArray(Shape{2}); }, {"seq_len", "[2]"}));
}

TEST(ComputeMetadataKvErrors, WorldOfZeroRanks) {
  EXPECT_TRUE(rejected([](Call& c) { c.seq_len = IndexArray(Shape{0, 2}); }, {"world_size", "0"}));
}

/// Whether the call gives what the undamaged one does.
bool gives_the_same(const Call& call) {
  const auto run = [](const Call& c) {
    return compute_metadata_kv(c.mapping, c.seq_len, c.num_seqs, c.q_dispatch, true);
  };
  const KvMetadata got = run(call);
  const KvMetadata expected = run(Call{});
  return got.fwd == expected.fwd && got.rev == expected.rev &&
         got.kv_dst_global_seq_id == expected.kv_dst_global_seq_id;
}

TEST(ComputeMetadataKv, TablesOfAnyIntegerType) {
  Call narrow;
  for (IndexArray KvMapping::*table :
       {&KvMapping::kv_to_q_mapping, &KvMapping::kv_to_q_rank, &KvMapping::kv_context_size,
        &KvMapping::q_to_num_kv_seq, &KvMapping::q_to_num_kv_token}) {
    narrow.mapping.*table = (narrow.mapping.*table).to(DType::int32);
    EXPECT_TRUE(gives_the_same(narrow));
  }
  narrow.seq_len = narrow.seq_len.to(DType::uint32);
  narrow.num_seqs = narrow.num_seqs.to(DType::uint64);
  narrow.q_dispatch = narrow.q_dispatch.to(DType::int32);
  EXPECT_TRUE(gives_the_same(narrow));
}

TEST(ComputeMetadataKv, NumSeqsMayBeAColumn) {
  Call column;
  column.num_seqs = column.num_seqs.reshaped({2, 1});
  EXPECT_TRUE(gives_the_same(column));
}

TEST(ComputeMetadataKvErrors, Dtypes) {
  const IndexArray flags({2, 2}, DType::boolean);
  EXPECT_TRUE(rejected([&](Call& c) { c.seq_len = flags; }, {"seq_len", "bool", "integers"}));
  EXPECT_TRUE(rejected([&](Call& c) { c.q_dispatch = flags; }, {"q_dispatch", "bool"}));
  EXPECT_TRUE(rejected([&](Call& c) { c.mapping.kv_context_size = flags; },
                       {"kv_context_size", "bool", "integers"}));
}

TEST(ComputeMetadataKvErrors, QueriesOutsideTheWorld) {
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.kv_to_q_mapping, 2, 2); },
                       {"kv_to_q_mapping", "rank 0", "copy 1", "(2, 0)"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.kv_to_q_mapping, 3, 2); },
                       {"kv_to_q_mapping", "rank 0", "copy 1", "(1, 2)"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.kv_to_q_mapping, 0, -2); },
                       {"kv_to_q_mapping", "(-2, 0)"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.kv_to_q_mapping, 0, -1); },
                       {"kv_to_q_mapping", "(-1, 0)"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.kv_to_q_mapping, 1, -1); },
                       {"kv_to_q_mapping", "(0, -1)"}));
}

TEST(ComputeMetadataKvErrors, DestinationsOutsideTheWorld) {
  EXPECT_TRUE(rejected([](Call& c) { set(c.q_dispatch, 2, 2); }, {"q_dispatch", "rank 1", " = 2"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.q_dispatch, 0, -2); }, {"q_dispatch", "rank 0", "-2"}));
}

TEST(ComputeMetadataKvErrors, ACopyWhoseQueryGoesNowhere) {
  EXPECT_TRUE(rejected([](Call& c) { set(c.q_dispatch, 1, -1); },
                       {"kv_to_q_mapping", "rank 0", "q_dispatch"}));
}

TEST(ComputeMetadataKvErrors, NegativeValues) {
  EXPECT_TRUE(rejected([](Call& c) { set(c.seq_len, 2, -4); }, {"seq_len", "rank 1", "-4"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.num_seqs, 1, -1); }, {"num_seqs", "-1"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.kv_context_size, 0, -3); },
                       {"kv_context_size", "rank 0", "-3"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.q_to_num_kv_seq, 3, -1); },
                       {"q_to_num_kv_seq", "rank 1", "-1"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.q_to_num_kv_token, 2, -7); },
                       {"q_to_num_kv_token", "rank 1", "-7"}));
}

TEST(ComputeMetadataKvErrors, PlaceOutsideTheQuerysContext) {
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.kv_to_q_rank, 4, 2); },
                       {"kv_to_q_rank", "rank 1", "copy 0", " = 2", "0..1"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.kv_to_q_rank, 4, -1); },
                       {"kv_to_q_rank", "rank 1", " = -1"}));
}

TEST(ComputeMetadataKvErrors, TwoShardsAtOnePlace) {
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.kv_to_q_rank, 4, 0); }, {"kv_to_q_rank", "0"}));
}

TEST(ComputeMetadataKvErrors, AMissingShard) {
  const auto drop = [](Call& c) {
    set(c.mapping.kv_to_q_mapping, 2, -1);
    set(c.mapping.kv_to_q_mapping, 3, -1);
    set(c.mapping.kv_to_q_rank, 1, -1);
  };
  EXPECT_TRUE(rejected(drop, {"query", "rank 1", "q_to_num_kv_seq", "2"}));
}

TEST(ComputeMetadataKvErrors, AQueryWithRowsThatReadsNothing) {
  const auto drop = [](Call& c) {
    set(c.mapping.kv_to_q_mapping, 4, -1);
    set(c.mapping.kv_to_q_mapping, 5, -1);
    set(c.mapping.kv_to_q_rank, 2, -1);
    set(c.mapping.q_to_num_kv_seq, 1, 0);
  };
  EXPECT_TRUE(rejected(drop, {"q_to_num_kv_token", "rank 0", " = 2", "0"}));
}

TEST(ComputeMetadataKvErrors, GapsAndOverlapsInTheContext) {
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.kv_context_size, 2, 4); },
                       {"kv_context_size", "rank 1", " = 4", "expected 3"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.kv_context_size, 2, 2); },
                       {"kv_context_size", "rank 1", " = 2", "expected 3"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.kv_context_size, 1, 1); },
                       {"kv_context_size", "rank 0", " = 1", "expected 0"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.q_to_num_kv_token, 2, 8); },
                       {"q_to_num_kv_token", "rank 1", " = 8", "expected 7"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.seq_len, 2, 5); },
                       {"q_to_num_kv_token", "rank 1", " = 7", "expected 8"}));
}

TEST(ComputeMetadataKvErrors, HugeValues) {
  constexpr std::int64_t huge = std::int64_t{1} << 62;
  EXPECT_TRUE(rejected([](Call& c) { set(c.seq_len, 0, huge); }, {"seq_len"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.q_to_num_kv_seq, 2, huge); },
                       {"q_to_num_kv_seq", "rank 1"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.q_to_num_kv_token, 2, huge); },
                       {"q_to_num_kv_token", "rank 1"}));
  EXPECT_TRUE(rejected([](Call& c) { set(c.mapping.kv_context_size, 2, huge); },
                       {"kv_context_size", "rank 1"}));
}

}  // namespace
}  // namespace waybill
