#include <gtest/gtest.h>

#include "simulate_support.h"
#include "support/expect_error.h"
#include "support/random_plan.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/simulate/orchestrate.h"

namespace waybill {
namespace {

using test::bytes_of;
using test::filled_tensor;
using test::random_plan;
using test::random_tensor;
using test::rejects;
using test::simulate_plainly;

/// Ranks with 3, 0 and 2 rows; rank 0 receives 2, rank 1 nothing, rank 2 receives 5.
struct UnevenRanks {
  UnevenRanks() {
    metadata.seq_len = IndexArray::matrix({{2, 1}, {0, 0}, {2, 0}});
    metadata.dst_rank =
        IndexArray::cube({{{2, -1}, {2, -1}}, {{-1, -1}, {-1, -1}}, {{2, 0}, {-1, -1}}});
    metadata.dst_offset = IndexArray::cube({{{0, 0}, {2, 0}}, {{0, 0}, {0, 0}}, {{3, 0}, {0, 0}}});
    metadata.num_recv_tokens = IndexArray::matrix({{0, 0, 2, 2}, {0, 0, 0, 0}, {3, 0, 2, 5}});
    std::uint64_t seed = 1;
    for (const std::int64_t rows : {3, 0, 2}) {
      tensors.push_back(random_tensor(DType::bfloat16, {rows, 4}, seed++));
    }
  }

  [[nodiscard]] std::vector<ConstTensorView> views() const {
    std::vector<ConstTensorView> result;
    for (const HostTensor& tensor : tensors) result.push_back(tensor.view());
    return result;
  }

  Metadata metadata;
  std::vector<HostTensor> tensors;
};

TEST(simulate_communication, gives_every_rank_what_it_receives) {
  const UnevenRanks ranks;
  const std::vector<HostTensor> got = simulate_communication(ranks.views(), ranks.metadata);
  ASSERT_EQ(got.size(), 3U);
  EXPECT_EQ(got[0].shape(), (Shape{2, 4}));
  EXPECT_EQ(got[1].shape(), (Shape{0, 4}));
  EXPECT_EQ(got[2].shape(), (Shape{5, 4}));
  EXPECT_EQ(got[0].dtype(), DType::bfloat16);
  EXPECT_EQ(bytes_of(got[0]), bytes_of(ranks.tensors[2]));
  std::vector<std::byte> both = bytes_of(ranks.tensors[0]);
  const std::vector<std::byte> rest = bytes_of(ranks.tensors[2]);
  both.insert(both.end(), rest.begin(), rest.end());
  EXPECT_EQ(bytes_of(got[2]), both);
}

TEST(simulate_communication, refuses_counts_that_do_not_fit) {
  UnevenRanks ranks;
  ranks.metadata.num_recv_tokens.i64()[11] = 6;
  EXPECT_TRUE(rejects([&] { (void)simulate_communication(ranks.views(), ranks.metadata); },
                      {"num_recv_tokens of rank 2 gives 6", "expected 5"}));
  ranks.metadata.num_recv_tokens.i64()[11] = 4;
  EXPECT_TRUE(rejects([&] { (void)simulate_communication(ranks.views(), ranks.metadata); },
                      {"source rank 2", "destination rank 2", "copy 0", "offset 3", "length 2",
                       "source shape [2, 4]", "output shape [4, 4]", "rows consumed 0"}));
  ranks.metadata.num_recv_tokens.i64()[11] = std::int64_t{1} << 60;
  EXPECT_TRUE(rejects([&] { (void)simulate_communication(ranks.views(), ranks.metadata); },
                      {"expected 5"}));
  ranks.metadata.num_recv_tokens.i64()[11] = -1;
  EXPECT_TRUE(
      rejects([&] { (void)simulate_communication(ranks.views(), ranks.metadata); }, {"-1"}));
  ranks.metadata.num_recv_tokens = IndexArray({2, 3});
  EXPECT_TRUE(rejects([&] { (void)simulate_communication(ranks.views(), ranks.metadata); },
                      {"num_recv_tokens has shape [2, 3]", "[3, 4]"}));
}

TEST(simulate_communication, refuses_tensors_that_do_not_fit) {
  UnevenRanks ranks;
  EXPECT_TRUE(
      rejects([&] { (void)simulate_communication({}, ranks.metadata); }, {"world_size = 0"}));
  ranks.tensors[1] = HostTensor(DType::bfloat16, {0, 3});
  EXPECT_TRUE(rejects([&] { (void)simulate_communication(ranks.views(), ranks.metadata); },
                      {"source of rank 1", "[0, 3]", "hidden = 4"}));
  ranks.tensors[1] = HostTensor(DType::float16, {0, 4});
  EXPECT_TRUE(rejects([&] { (void)simulate_communication(ranks.views(), ranks.metadata); },
                      {"source of rank 1", "float16", "bfloat16"}));
}

/// The rows of one rank of [W, n, H].
HostTensor rank_of(const HostTensor& all, std::int64_t rank, std::int64_t rows) {
  HostTensor result(all.dtype(), {rows, all.shape()[2]});
  const std::int64_t rank_bytes = all.size_bytes() / all.shape()[0];
  const auto from = all.bytes().subspan(static_cast<std::size_t>(rank * rank_bytes),
                                        static_cast<std::size_t>(result.size_bytes()));
  std::ranges::copy(from, result.bytes().begin());
  return result;
}

struct Ends {
  std::vector<HostTensor> sources;
  std::vector<HostTensor> outputs;

  void dispatch(const SparseMetadata& metadata, const SimulateOptions& options = {}) {
    std::vector<ConstTensorView> from;
    std::vector<TensorView> to;
    for (const HostTensor& source : sources) from.push_back(source.view());
    for (HostTensor& output : outputs) to.push_back(output.view());
    simulate_dispatch(from, to, metadata, options);
  }
};

TEST(simulate_dispatch, moves_what_the_dense_form_moves) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const QkvPlan plan =
        random_plan(seed, {.windows = seed % 3 == 1,
                           .full = seed % 3 == 2,
                           .kv_layout = seed % 2 == 0 ? KvLayout::per_rank : KvLayout::per_query});
    const SparseMetadata metadata = compute_qkv_routing(plan).fwd_kv;
    const Metadata dense = to_dense(metadata);
    const std::int64_t rows = test::most_rows_of_a_rank(plan);
    std::int64_t most = 0;
    for (const std::int64_t total : metadata.recv.total) most = std::max(most, total);
    const HostTensor all = random_tensor(DType::float16, {4, rows, 6}, seed);
    HostTensor expected(DType::float16, {4, most, 6});
    simulate_plainly(all, expected, dense);
    Ends ends;
    for (std::size_t w = 0; w < 4; ++w) {
      ends.sources.push_back(rank_of(all, static_cast<std::int64_t>(w), rows));
      ends.outputs.emplace_back(DType::float16, Shape{metadata.recv.total[w], 6});
    }
    ends.dispatch(metadata);
    std::vector<ConstTensorView> views;
    for (const HostTensor& source : ends.sources) views.push_back(source.view());
    const std::vector<HostTensor> received = simulate_communication(views, dense);
    for (std::int64_t w = 0; w < 4; ++w) {
      const auto r = static_cast<std::size_t>(w);
      const HostTensor wanted = rank_of(expected, w, metadata.recv.total[r]);
      ASSERT_EQ(bytes_of(ends.outputs[r]), bytes_of(wanted)) << "seed " << seed << ", rank " << w;
      ASSERT_EQ(bytes_of(received[r]), bytes_of(wanted)) << "seed " << seed << ", rank " << w;
    }
  }
}

/// Two ranks of two rows that swap their first rows and keep the second.
struct SmallDispatch {
  SmallDispatch() {
    metadata.world_size = 2;
    metadata.rank_offsets = {0, 2, 4};
    metadata.seq_len = {1, 1, 1, 1};
    metadata.dst_rank = {1, 0, 0, 1};
    metadata.dst_offset = {0, 1, 0, 1};
    for (std::uint64_t w = 0; w < 2; ++w) {
      ends.sources.push_back(random_tensor(DType::uint8, {2, 3}, w));
      ends.outputs.push_back(filled_tensor(DType::uint8, {2, 3}, 9));
    }
  }

  void expect_rejected(std::initializer_list<std::string_view> parts) {
    const auto before = ends.outputs;
    EXPECT_TRUE(rejects([&] { ends.dispatch(metadata); }, parts));
    for (std::size_t w = 0; w < before.size(); ++w) {
      EXPECT_EQ(bytes_of(ends.outputs[w]), bytes_of(before[w]));
    }
  }

  SparseMetadata metadata;
  Ends ends;
};

TEST(simulate_dispatch, refuses_tables_that_do_not_fit) {
  SmallDispatch().ends.dispatch(SmallDispatch().metadata);
  const auto rejected = [](const auto& spoil, std::initializer_list<std::string_view> parts) {
    SmallDispatch dispatch;
    spoil(dispatch.metadata);
    dispatch.expect_rejected(parts);
  };
  rejected([](SparseMetadata& m) { m.world_size = 3; }, {"world_size = 3", "expected 2"});
  rejected([](SparseMetadata& m) { m.rank_offsets = {0, 4}; }, {"rank_offsets has 2"});
  rejected([](SparseMetadata& m) { m.rank_offsets = {0, 5, 4}; }, {"rank_offsets[2] = 4"});
  rejected([](SparseMetadata& m) { m.rank_offsets = {1, 2, 4}; }, {"rank_offsets[0] = 1"});
  rejected([](SparseMetadata& m) { m.rank_offsets = {0, 2, 3}; }, {"ends with 3", "expected 4"});
  rejected([](SparseMetadata& m) { m.dst_rank.pop_back(); }, {"dst_rank has 3"});
  rejected([](SparseMetadata& m) { m.dst_offset.pop_back(); }, {"dst_offset has 3"});
  rejected([](SparseMetadata& m) { m.copy_offsets = {0, 1, 2, 3}; }, {"copy_offsets has 4"});
  rejected([](SparseMetadata& m) { m.copy_offsets = {0, 1, 3, 2, 4}; }, {"copy_offsets[3] = 2"});
}

TEST(simulate_dispatch, names_the_entry_that_is_wrong) {
  const auto rejected = [](const auto& spoil, std::initializer_list<std::string_view> parts) {
    SmallDispatch dispatch;
    spoil(dispatch);
    dispatch.expect_rejected(parts);
  };
  rejected(
      [](SmallDispatch& d) { d.metadata.dst_offset[3] = 2; },
      {"simulate_dispatch", "source rank 1", "destination rank 1", "shard 1", "copy 0", "offset 2",
       "length 1", "source shape [2, 3]", "output shape [2, 3]", "rows consumed 1"});
  rejected([](SmallDispatch& d) { d.metadata.seq_len[1] = 2; }, {"source rank 0", "1 rows left"});
  rejected([](SmallDispatch& d) { d.metadata.dst_rank[3] = 2; }, {"destination rank = 2"});
  rejected([](SmallDispatch& d) { d.metadata.dst_offset[3] = 0; },
           {"also written by source rank 0, shard 0, copy 0"});
  rejected([](SmallDispatch& d) { d.ends.outputs.pop_back(); }, {"1 outputs, expected 2"});
  rejected(
      [](SmallDispatch& d) {
        d.ends.outputs[1] = HostTensor(DType::int8, {2, 3});
      },
      {"output of rank 1", "int8"});
}

TEST(simulate_dispatch, refuses_memory_used_twice) {
  SmallDispatch dispatch;
  HostTensor& a = dispatch.ends.outputs[0];
  const std::vector<ConstTensorView> sources{dispatch.ends.sources[0].view(),
                                             dispatch.ends.sources[1].view()};
  EXPECT_TRUE(rejects(
      [&] {
        simulate_dispatch(sources, std::vector{a.view(), a.view()}, dispatch.metadata);
      },
      {"shares memory with output"}));
  const std::vector<ConstTensorView> aliased{dispatch.ends.sources[0].view(), a.view()};
  EXPECT_TRUE(rejects(
      [&] {
        simulate_dispatch(aliased, std::vector{a.view(), dispatch.ends.outputs[1].view()},
                          dispatch.metadata);
      },
      {"output 0", "shares memory with source 1"}));
}

TEST(simulate_dispatch, sources_may_be_one_tensor) {
  SmallDispatch dispatch;
  dispatch.ends.sources[1] = dispatch.ends.sources[0];
  const std::vector<ConstTensorView> same{dispatch.ends.sources[0].view(),
                                          dispatch.ends.sources[0].view()};
  const std::vector<TensorView> outputs{dispatch.ends.outputs[0].view(),
                                        dispatch.ends.outputs[1].view()};
  simulate_dispatch(same, outputs, dispatch.metadata);
  SmallDispatch apart;
  apart.ends.sources = dispatch.ends.sources;
  apart.ends.dispatch(apart.metadata);
  for (std::size_t w = 0; w < 2; ++w) {
    EXPECT_EQ(bytes_of(dispatch.ends.outputs[w]), bytes_of(apart.ends.outputs[w]));
  }
}

}  // namespace
}  // namespace waybill
