// Any single change of the routing is noticed, and whatever the arrays hold, the validator returns.

#include <gtest/gtest.h>

#include "validate_plans.h"
#include "waybill/core/error.h"
#include "waybill/routing/validate.h"

namespace waybill::test {
namespace {

constexpr std::int64_t extremes[] = {INT64_MIN, INT32_MIN,     -2,       -1, 0, 1, 2, 1 << 20,
                                     INT32_MAX, INT64_MAX / 2, INT64_MAX};

/// Calls visit(name, array) for every flat array of the routing.
template <class Visit>
void for_each_array(QkvRouting& routing, const Visit& visit) {
  for (SparseMetadata* table : {&routing.fwd_q, &routing.rev_q, &routing.fwd_kv, &routing.rev_kv}) {
    visit("rank_offsets", table->rank_offsets);
    visit("seq_len", table->seq_len);
    visit("copy_offsets", table->copy_offsets);
    visit("dst_rank", table->dst_rank);
    visit("dst_offset", table->dst_offset);
    visit("recv.offsets", table->recv.offsets);
    visit("recv.src_rank", table->recv.src_rank);
    visit("recv.tokens", table->recv.tokens);
    visit("recv.total", table->recv.total);
  }
  SparseAttnLayout& attention = routing.attention;
  visit("attention.rank_offsets", attention.rank_offsets);
  visit("attention.shard", attention.shard);
  visit("attention.q_begin", attention.q_begin);
  visit("attention.q_len", attention.q_len);
  visit("attention.kv_row", attention.kv_row);
  visit("attention.kv_len", attention.kv_len);
  visit("attention.max_seqlen_q", attention.max_seqlen_q);
  visit("attention.max_seqlen_kv", attention.max_seqlen_kv);
}

/// The plan determines its routing, so no value can be another one unnoticed.
TEST(ValidateHostile, EveryChangedValueIsNoticed) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const QkvPlan plan =
        draw_plan(random, {.max_world_size = 8, .max_shards = 14, .empty_shards = false});
    QkvRouting routing = compute_qkv_routing(plan);
    for_each_array(routing, [&](const char* name, auto& array) {
      using Value = typename std::remove_reference_t<decltype(array)>::value_type;
      for (std::size_t i = 0; i < array.size(); ++i) {
        const Value right = array[i];
        const std::int64_t wrong = random.below(2) == 0
                                       ? right + 1 - 2 * random.below(2)
                                       : extremes[random.below(std::ssize(extremes))];
        array[i] = static_cast<Value>(wrong);
        if (array[i] != right) {
          EXPECT_FALSE(validate(plan, routing).empty())
              << "seed " << seed << ", " << name << "[" << i << "] = " << wrong << ", was "
              << right;
        }
        array[i] = right;
      }
    });
    EXPECT_TRUE(validate(plan, routing).empty());
  }
}

/// Several wild changes at once: values, lengths of arrays, whole arrays gone.
template <class Array>
void ravage(Array& array, Random& random) {
  using Value = typename Array::value_type;
  const auto any = [&] { return static_cast<Value>(extremes[random.below(std::ssize(extremes))]); };
  switch (random.below(6)) {
    case 0:
      array.clear();
      break;
    case 1:
      if (!array.empty()) array.pop_back();
      break;
    case 2:
      array.push_back(any());
      break;
    default:
      if (!array.empty()) array[random.below(std::ssize(array))] = any();
      break;
  }
}

TEST(ValidateHostile, ReturnsForAnySparseRouting) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Random random(seed);
    QkvPlan plan = draw_plan(random, {.max_world_size = 8, .max_shards = 20});
    QkvRouting routing = compute_qkv_routing(plan);
    const std::int64_t one_in = 1 + random.below(30);
    for_each_array(routing, [&](const char*, auto& array) {
      if (random.below(one_in) == 0) ravage(array, random);
    });
    EXPECT_NO_THROW((void)validate(plan, routing)) << seed;
    EXPECT_NO_THROW((void)validate(routing.fwd_kv, routing.rev_q)) << seed;
    EXPECT_NO_THROW((void)validate(routing.fwd_q, routing.rev_kv)) << seed;
    switch (random.below(6)) {
      case 0:
        ravage(plan.rank_shard_offsets, random);
        break;
      case 1:
        ravage(plan.shard_len, random);
        break;
      case 2:
        ravage(plan.q_dst, random);
        break;
      case 3:
        ravage(plan.doc_shard_offsets, random);
        break;
      case 4:
        ravage(plan.doc_shards, random);
        break;
      default:
        ravage(plan.kv_begin, random);
        break;
    }
    EXPECT_NO_THROW((void)validate(plan)) << seed;
    EXPECT_NO_THROW((void)validate(plan, {.q_capacity = 5, .kv_capacity = 7})) << seed;
    EXPECT_NO_THROW((void)validate(plan, routing)) << seed;
  }
}

IndexArray any_array(Random& random) {
  constexpr DType dtypes[] = {DType::int64, DType::int32, DType::uint32, DType::uint64,
                              DType::boolean};
  Shape shape;
  for (std::int64_t axis = random.below(5); axis > 0; --axis) shape.push_back(random.below(4));
  IndexArray array(shape, dtypes[random.below(5)]);
  auto* bytes = static_cast<unsigned char*>(array.data());
  const std::int64_t num_bytes = array.size() * dtype_bytes(array.dtype());
  for (std::int64_t i = 0; i < num_bytes; ++i) {
    bytes[i] = static_cast<unsigned char>(random.below(3) == 0 ? 255 : random.below(2));
  }
  return array;
}

void ravage(Metadata& m, Random& random) {
  const auto change = [&](IndexArray& array) {
    if (random.below(4) == 0) {
      array = any_array(random);
    } else if (array.dtype() == DType::int64 && array.size() > 0) {
      array.i64()[random.below(array.size())] = extremes[random.below(std::ssize(extremes))];
    }
  };
  switch (random.below(10)) {
    case 0:
      change(m.dst_rank);
      break;
    case 1:
      change(m.dst_offset);
      break;
    case 2:
      change(m.seq_len);
      break;
    case 3:
      change(m.num_recv_tokens);
      break;
    case 4:
      m.seq_recv_mask = any_array(random);
      break;
    case 5:
      m.recv_seq_lens = any_array(random);
      break;
    case 6:
      m.num_seqs = any_array(random);
      break;
    case 7:
      m.world_size = extremes[random.below(std::ssize(extremes))];
      break;
    case 8:
      m.normalized = !m.normalized;
      break;
    default:
      ravage(m.num_total_recv_tokens, random);
      break;
  }
}

TEST(ValidateHostile, ReturnsForAnyDenseMetadata) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Random random(seed);
    const QkvPlan plan = draw_plan(random, {.max_world_size = 6, .max_shards = 20});
    E2eMetadata dense = to_dense(compute_qkv_routing(plan));
    for (Metadata* table : {&dense.fwd_q, &dense.rev_q, &dense.fwd_kv, &dense.rev_kv}) {
      for (std::int64_t n = random.below(3); n > 0; --n) ravage(*table, random);
    }
    AttnLayout& attention = dense.attention;
    for (auto* arrays : {&attention.cu_seqlens_q, &attention.cu_seqlens_kv, &attention.kv_row,
                         &attention.kv_len}) {
      if (!arrays->empty() && random.below(2) == 0) arrays->back() = any_array(random);
    }
    if (random.below(3) == 0) attention.max_seqlen_q = any_array(random);
    if (random.below(3) == 0) attention.num_local_seqs_recv = any_array(random);
    EXPECT_NO_THROW((void)validate(plan, dense)) << seed;
    EXPECT_NO_THROW((void)validate(dense.fwd_kv, dense.rev_kv)) << seed;
    EXPECT_NO_THROW((void)validate(dense.rev_kv, dense.fwd_kv)) << seed;
    EXPECT_NO_THROW((void)validate(dense.fwd_q, dense.rev_kv)) << seed;
  }
}

TEST(ValidateHostile, ReturnsForNothingAtAll) {
  EXPECT_FALSE(validate(QkvPlan{}).empty());
  EXPECT_FALSE(validate(QkvPlan{}, QkvRouting{}).empty());
  EXPECT_FALSE(validate(QkvPlan{}, E2eMetadata{}).empty());
  EXPECT_FALSE(validate(Metadata{}, Metadata{}).empty());
  EXPECT_FALSE(validate(SparseMetadata{}, SparseMetadata{}).empty());
  IndexArray moved = IndexArray::matrix({{1}});
  Metadata hollow;
  hollow.seq_len = std::move(moved);
  hollow.dst_rank = moved;  // NOLINT(bugprone-use-after-move): what is left must be bearable
  EXPECT_FALSE(validate(hollow, hollow).empty());
}

// The routing's layout is the one finding that may be said; the plan is not safe to index all the
// same.
TEST(ValidateHostile, ABadPlanIsNotIndexedWhenNoMoreFindingsMayBeSaid) {
  QkvPlan plan;
  plan.world_size = 1;
  plan.kv_layout = KvLayout::per_rank;
  plan.rank_shard_offsets = {0, 1};
  plan.shard_len = {4};
  plan.q_dst = {0};
  plan.doc_shard_offsets = {0, 1};
  plan.doc_shards = {0};
  QkvRouting routing = compute_qkv_routing(plan);
  routing.kv_layout = KvLayout::per_query;
  plan.doc_shards = {1 << 28};
  plan.q_dst = {1 << 28};
  const auto findings = validate(plan, routing, {.max_findings = 1});
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0].field, "kv_layout");
}

}  // namespace
}  // namespace waybill::test
