// Lists of rows that cross between nodes, and copies of these rows to the front of a slice and
// back. They run on one GPU without other ranks, against support/forwarded_ids.h.

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/experts/nodes/nodes.h"
#include "cuda/one_of_many.h"
#include "support/forwarded_ids.h"
#include "waybill/core/random.h"

namespace waybill {
namespace {

using cuda::MoveNodeRowsParams;
using cuda::NodeRowsParams;
using test::cuda_ok;
using test::DeviceBlocks;
using test::ForwardedIds;

constexpr std::int32_t own_node = 1;
constexpr std::uint64_t ticket = 7;

struct Tokens {
  std::int32_t nodes;
  std::int32_t max;
  std::int32_t topk;
};

cuda::MoeShape shape_of(const Tokens& tokens) {
  cuda::MoeShape shape{};
  shape.num_nodes = tokens.nodes;
  shape.node_ranks = 2;
  shape.world_size = 2 * tokens.nodes;
  shape.first_rank = 2 * own_node;
  shape.rank = shape.first_rank + 1;
  shape.experts_per_rank = 3;
  shape.num_experts = shape.experts_per_rank * shape.world_size;
  shape.topk = tokens.topk;
  shape.max_tokens = tokens.max;
  return shape;
}

/// [nodes, M, K], with dropped topk slots and slices that end early.
std::vector<std::int32_t> random_ids(const cuda::MoeShape& s) {
  Random random(static_cast<std::uint64_t>(s.max_tokens));
  std::vector<std::int32_t> ids;
  for (std::int32_t n = 0; n < s.num_nodes; ++n) {
    const std::int64_t tokens = n == 2          ? 0
                                : n == own_node ? s.max_tokens
                                                : random.below(s.max_tokens + 1);
    for (std::int64_t i = 0; i < std::int64_t{s.max_tokens} * s.topk; ++i) {
      ids.push_back(i < tokens * s.topk ? static_cast<std::int32_t>(random.below(s.num_experts + 1))
                                        : -1);
    }
  }
  return ids;
}

class GpuNodeRows : public testing::TestWithParam<Tokens> {
 protected:
  GpuNodeRows() : shape_(shape_of(GetParam())), ids_(random_ids(shape_)) {
    const std::int64_t lists = std::int64_t{2} * shape_.num_nodes;
    NodeRowsParams params{};
    params.shape = shape_;
    params.ids = blocks_.upload(ids_);
    params.tokens = tokens_ = blocks_.take<std::int32_t>(lists * shape_.max_tokens);
    params.counts = counts_ = blocks_.take<std::int32_t>(lists);
    host_ = blocks_.pinned<std::uint64_t>(lists);
    params.host = host_;
    params.ticket = ticket;
    cuda_ok(cuda::launch_node_rows(params, nullptr));
    cuda_ok(cudaDeviceSynchronize());
  }

  [[nodiscard]] ForwardedIds view() const {
    return {ids_,        shape_.num_nodes,
            own_node,    shape_.max_tokens,
            shape_.topk, shape_.experts_per_rank * shape_.node_ranks};
  }

  DeviceBlocks blocks_;
  cuda::MoeShape shape_;
  std::vector<std::int32_t> ids_;
  std::int32_t* tokens_ = nullptr;
  std::int32_t* counts_ = nullptr;
  std::uint64_t* host_ = nullptr;
};

TEST_P(GpuNodeRows, lists_equal_those_of_the_host) {
  const NodeRows want = count_node_rows(view());
  for (std::int32_t n = 0; n < shape_.num_nodes; ++n) {
    for (const bool comes : {false, true}) {
      const std::int32_t which = (comes ? shape_.num_nodes : 0) + n;
      const auto count = (comes ? want.received : want.sent)[n];
      EXPECT_EQ(host_[which], ticket << 32 | static_cast<std::uint32_t>(count)) << n;
      EXPECT_EQ(blocks_.download(counts_ + which, 1).front(), count);
      if (n == own_node) continue;
      const auto order =
          comes ? tokens_for_node(view(), n, own_node) : tokens_for_node(view(), own_node, n);
      EXPECT_EQ(blocks_.download(tokens_ + std::int64_t{which} * shape_.max_tokens, count), order);
    }
  }
}

TEST_P(GpuNodeRows, rows_come_back_to_their_places) {
  for (const int word : {16, 8, 4, 2, 1}) {
    const std::int64_t row_bytes = word * 37;
    const std::int64_t slice = shape_.max_tokens * row_bytes;
    Random random(5);
    std::vector<std::uint8_t> own(slice);
    for (auto& byte : own) byte = static_cast<std::uint8_t>(random.below(256));
    auto* const from = reinterpret_cast<std::byte*>(blocks_.upload(own));
    auto* const packed = blocks_.take<std::byte>(slice * shape_.num_nodes);
    auto* const back = blocks_.take<std::uint8_t>(slice * shape_.num_nodes);
    MoveNodeRowsParams params{};
    params.shape = shape_;
    params.tokens = tokens_;
    params.counts = counts_;
    params.packs = true;
    params.from = from;
    params.to = packed;
    params.to_node_bytes = slice;
    params.row_bytes = row_bytes;
    cuda_ok(cuda::launch_move_node_rows(params, word, 5, nullptr));
    params.packs = false;
    params.from = packed;
    params.from_node_bytes = slice;
    params.to = reinterpret_cast<std::byte*>(back);
    cuda_ok(cuda::launch_move_node_rows(params, word, 5, nullptr));
    cuda_ok(cudaDeviceSynchronize());
    const auto got = blocks_.download(back, slice * shape_.num_nodes);
    const auto got_packed =
        blocks_.download(reinterpret_cast<std::uint8_t*>(packed), slice * shape_.num_nodes);
    for (std::int32_t n = 0; n < shape_.num_nodes; ++n) {
      const auto order =
          n == own_node ? std::vector<std::int32_t>{} : tokens_for_node(view(), own_node, n);
      std::vector<std::uint8_t> want(slice);
      for (std::size_t i = 0; i < order.size(); ++i) {
        const auto row = own.begin() + order[i] * row_bytes;
        std::copy_n(row, row_bytes, want.begin() + order[i] * row_bytes);
        EXPECT_TRUE(
            std::equal(row, row + row_bytes,
                       got_packed.begin() + n * slice + static_cast<std::int64_t>(i) * row_bytes));
      }
      EXPECT_TRUE(std::equal(want.begin(), want.end(), got.begin() + n * slice))
          << "node " << n << ", words of " << word;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Tokens, GpuNodeRows,
                         testing::Values(Tokens{2, 1, 1}, Tokens{4, 33, 3}, Tokens{3, 1024, 8},
                                         Tokens{8, 2500, 4}, Tokens{130, 40, 32}));

}  // namespace
}  // namespace waybill
