#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "simulate_support.h"
#include "support/expect_error.h"
#include "waybill/simulate/check.h"

namespace waybill {
namespace {

using test::rejects;
using test::text_of;

TEST(test_qkv_dispatch, passes_random_plans) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    for (const std::int64_t world : {1, 2, 4, 7}) {
      const QkvDispatchTest test = test_qkv_dispatch(
          {.world_size = world,
           .total_seq_len = 64,
           .num_seqs = 1 + static_cast<std::int64_t>(seed % 5),
           .max_cp_degree = std::int64_t{1} << (world == 1 ? 0 : world / 2 - (world > 4)),
           .hidden_q = 3,
           .hidden_k = 2,
           .seed = seed});
      ASSERT_TRUE(test.passed()) << "seed " << seed << "\n" << text_of(test.findings);
      EXPECT_GT(test.elements_compared, world * 64 * 5);
    }
  }
}

TEST(test_qkv_dispatch, passes_the_balanced_example_and_uneven_ranks) {
  const QkvDispatchTest balanced =
      test_qkv_dispatch(create_balanced_example(64), {.hidden_q = 2, .hidden_k = 2});
  EXPECT_TRUE(balanced.passed()) << text_of(balanced.findings);
  const QkvDispatch uneven = create_qkv_dispatch_with_custom_mapping(
      2, IndexArray::matrix({{7, 3}, {4, 0}}), IndexArray::matrix({{3, 1}, {1, 0}}),
      IndexArray::cube({{{1, 1, 0}, {0, -1, -1}}, {{0, -1, -1}, {-1, -1, -1}}}),
      IndexArray::cube({{{1, 4, 2}, {3, 0, 0}}, {{4, 0, 0}, {0, 0, 0}}}));
  const QkvDispatchTest test = test_qkv_dispatch(uneven, {.hidden_q = 2, .hidden_k = 2});
  EXPECT_TRUE(test.passed()) << text_of(test.findings);
}

struct DenseDamage {
  const char* name;
  std::function<void(E2eMetadata&)> plant;
  const char* table;  ///< that a finding must name
};

std::int64_t& entry(IndexArray& array, std::size_t idx) { return array.i64()[idx]; }

/// Index of the first entry that is not padding, from `begin`.
std::size_t used(const IndexArray& dst_rank, std::size_t begin = 0) {
  const auto values = dst_rank.i64();
  while (values[begin] < 0) ++begin;
  return begin;
}

const std::vector<DenseDamage>& dense_damages() {
  static const std::vector<DenseDamage> list{
      {"q_counts", [](E2eMetadata& m) { ++entry(m.fwd_q.num_recv_tokens, 1); }, "fwd_q"},
      {"q_totals", [](E2eMetadata& m) { ++m.rev_q.num_total_recv_tokens[0]; }, "rev_q"},
      {"q_num_seqs", [](E2eMetadata& m) { ++entry(*m.fwd_q.num_seqs, 0); }, "fwd_q"},
      {"q_offset", [](E2eMetadata& m) { ++entry(m.fwd_q.dst_offset, 0); }, "fwd_q"},
      {"q_not_sent", [](E2eMetadata& m) { entry(m.fwd_q.dst_rank, 0) = -1; }, "fwd_q"},
      {"q_negative", [](E2eMetadata& m) { entry(m.fwd_q.seq_len, 0) = -4; }, "fwd_q"},
      {"q_back_offset", [](E2eMetadata& m) { ++entry(m.rev_q.dst_offset, 0); }, "rev_q"},
      {"q_back_rank",
       [](E2eMetadata& m) {
         std::int64_t& rank = entry(m.rev_q.dst_rank, 0);
         rank = rank == 0 ? 1 : 0;
       },
       "rev_q"},
      {"q_shape",
       [](E2eMetadata& m) {
         m.fwd_q.dst_rank = IndexArray({4, 1});
       },
       "fwd_q"},
      {"kv_counts", [](E2eMetadata& m) { ++entry(m.fwd_kv.num_recv_tokens, 0); }, "fwd_kv"},
      {"kv_counts_back", [](E2eMetadata& m) { --entry(m.rev_kv.num_recv_tokens, 0); }, "rev_kv"},
      {"kv_num_seqs", [](E2eMetadata& m) { ++entry(*m.rev_kv.num_seqs, 3); }, "rev_kv"},
      {"kv_copy_lost",
       [](E2eMetadata& m) { entry(m.fwd_kv.dst_rank, used(m.fwd_kv.dst_rank)) = -1; }, "fwd_kv"},
      {"kv_offset", [](E2eMetadata& m) { ++entry(m.fwd_kv.dst_offset, used(m.fwd_kv.dst_rank)); },
       "fwd_kv"},
      {"kv_back_plane",
       [](E2eMetadata& m) {
         // The last plane is that of the copies of the first shard alone.
         entry(m.rev_kv.dst_offset, used(m.rev_kv.dst_rank)) += 64;
       },
       "rev_kv"},
      {"kv_back_lost",
       [](E2eMetadata& m) { entry(m.rev_kv.dst_rank, used(m.rev_kv.dst_rank)) = -1; }, "rev_kv"},
      {"mask",
       [](E2eMetadata& m) {
         IndexArray mask = m.rev_kv.seq_recv_mask->to(DType::int64);
         entry(mask, 0) = 1 - entry(mask, 0);
         m.rev_kv.seq_recv_mask = mask.to(DType::boolean);
       },
       "rev_kv"},
      {"mask_missing", [](E2eMetadata& m) { m.rev_kv.seq_recv_mask.reset(); }, "rev_kv"},
      {"recv_seq_lens", [](E2eMetadata& m) { ++entry(*m.rev_kv.recv_seq_lens, 0); }, "rev_kv"},
      {"cu_seqlens_q", [](E2eMetadata& m) { ++entry(m.attention.cu_seqlens_q[1], 1); },
       "attention"},
      {"cu_seqlens_kv", [](E2eMetadata& m) { m.attention.cu_seqlens_kv.pop_back(); }, "attention"},
      {"max_seqlen_q", [](E2eMetadata& m) { ++entry(m.attention.max_seqlen_q, 2); }, "attention"},
      {"max_seqlen_kv", [](E2eMetadata& m) { ++entry(m.attention.max_seqlen_kv, 2); }, "attention"},
      {"num_local_seqs", [](E2eMetadata& m) { ++entry(m.attention.num_local_seqs_recv, 0); },
       "attention"},
      {"too_large_for_the_device", [](E2eMetadata& m) { entry(m.fwd_q.num_recv_tokens, 0) = -1; },
       "fwd_q"},
  };
  return list;
}

class planted_damage_dense : public testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(all, planted_damage_dense,
                         testing::Range(std::size_t{0}, dense_damages().size()),
                         [](const auto& param) { return dense_damages()[param.param].name; });

TEST_P(planted_damage_dense, is_found) {
  const DenseDamage& damage = dense_damages()[GetParam()];
  const QkvDispatchTestOptions options{.hidden_q = 2, .hidden_k = 2};
  QkvDispatch dispatch = create_qkv_dispatch(4, 64, 3, 4, 5);
  ASSERT_TRUE(test_qkv_dispatch(dispatch, options).passed());
  damage.plant(dispatch.metadata);
  const QkvDispatchTest test = test_qkv_dispatch(dispatch, options);
  ASSERT_FALSE(test.passed());
  EXPECT_TRUE(std::ranges::any_of(test.findings, [&](const Finding& finding) {
    return finding.table == damage.table;
  })) << text_of(test.findings);
}

TEST(test_qkv_dispatch, takes_either_layout_and_finds_the_other) {
  QkvDispatch dispatch = create_qkv_dispatch(4, 64, 3, 4, 5);
  dispatch.plan.kv_layout = KvLayout::per_rank;
  EXPECT_FALSE(test_qkv_dispatch(dispatch, {}).passed());
  dispatch.metadata = to_dense(compute_qkv_routing(dispatch.plan));
  const QkvDispatchTest test = test_qkv_dispatch(dispatch, {});
  EXPECT_TRUE(test.passed()) << text_of(test.findings);
}

TEST(test_qkv_dispatch, refuses_options_out_of_range) {
  EXPECT_TRUE(rejects([] { (void)test_qkv_dispatch({.world_size = 0}); }, {"world_size = 0"}));
  EXPECT_TRUE(rejects([] { (void)test_qkv_dispatch({.hidden_q = 0}); }, {"hidden_q = 0"}));
  EXPECT_TRUE(rejects([] { (void)test_qkv_dispatch({.max_findings = 0}); }, {"max_findings = 0"}));
}

}  // namespace
}  // namespace waybill
