#include "schedule/node_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "schedule/workspace_phase.h"
#include "waybill/core/random.h"

namespace waybill {
namespace {

struct Layer {
  Topology topology;
  std::int64_t max_tokens = 0;
  std::int32_t topk = 1;
  std::int32_t experts_per_node = 1;

  [[nodiscard]] std::int32_t nodes() const { return topology.num_nodes(); }
  [[nodiscard]] std::int32_t node(std::int32_t rank) const {
    return rank / topology.ranks_per_node;
  }
  [[nodiscard]] std::int32_t peer(std::int32_t rank, std::int32_t on) const {
    return on * topology.ranks_per_node + rank % topology.ranks_per_node;
  }
};

constexpr Layer layers[] = {{{2, 1}, 9, 3, 4},
                            {{6, 2}, 7, 2, 3},
                            {{3, 1}, 5, 1, 1},
                            {{8, 4}, 33, 8, 16},
                            {{16, 2}, 6, 4, 2}};

using Ids = std::vector<std::int32_t>;  ///< [max_tokens, topk]

/// Some ranks have fewer tokens, or none; some topk slots are dropped (num_experts) or far off.
std::vector<Ids> random_ids(const Layer& layer, Random& random) {
  const std::int32_t experts = layer.experts_per_node * layer.nodes();
  std::vector<Ids> all;
  for (std::int32_t r = 0; r < layer.topology.world_size; ++r) {
    Ids& ids = all.emplace_back(layer.max_tokens * layer.topk, -1);
    const std::int64_t tokens = r % 3 == 2 ? 0 : random.below(layer.max_tokens + 1);
    for (std::int64_t i = 0; i < tokens * layer.topk; ++i)
      ids[i] = static_cast<std::int32_t>(random.below(experts + 1));
  }
  return all;
}

/// What `rank` has after the ids were exchanged.
Ids forwarded(const Layer& layer, const std::vector<Ids>& all, std::int32_t rank) {
  Ids ids;
  for (std::int32_t n = 0; n < layer.nodes(); ++n) {
    const Ids& of = all[layer.peer(rank, n)];
    ids.insert(ids.end(), of.begin(), of.end());
  }
  return ids;
}

ForwardedIds view(const Layer& layer, const Ids& ids, std::int32_t rank) {
  return {ids,        layer.nodes(),         layer.node(rank), layer.max_tokens,
          layer.topk, layer.experts_per_node};
}

bool goes(const Layer& layer, const Ids& ids, std::int64_t token, std::int32_t node) {
  for (std::int32_t k = 0; k < layer.topk; ++k) {
    const std::int32_t id = ids[token * layer.topk + k];
    if (id >= node * layer.experts_per_node && id < (node + 1) * layer.experts_per_node)
      return true;
  }
  return false;
}

TEST(NodeRows, both_ends_of_a_pair_know_the_same_number) {
  Random random(3);
  for (const Layer& layer : layers) {
    const auto all = random_ids(layer, random);
    std::vector<NodeRows> rows;
    for (std::int32_t r = 0; r < layer.topology.world_size; ++r) {
      const Ids ids = forwarded(layer, all, r);
      rows.push_back(count_node_rows(view(layer, ids, r)));
    }
    for (std::int32_t r = 0; r < layer.topology.world_size; ++r) {
      const NodeRows& mine = rows[r];
      const NodeRows back = returned_rows(mine);
      EXPECT_EQ(mine.sent[layer.node(r)], 0);
      for (std::int32_t n = 0; n < layer.nodes(); ++n) {
        const NodeRows& peers = rows[layer.peer(r, n)];
        EXPECT_EQ(mine.sent[n], peers.received[layer.node(r)]);
        EXPECT_EQ(back.sent[n], mine.received[n]);
        std::int32_t want = 0;
        for (std::int64_t t = 0; t < layer.max_tokens && n != layer.node(r); ++t)
          want += goes(layer, all[r], t, n) ? 1 : 0;
        EXPECT_EQ(mine.sent[n], want) << "rank " << r << " to node " << n;
      }
    }
  }
}

/// A row's number in a message, on its way as NCCL carries it: k-th piece to k-th piece.
struct Carried {
  std::map<std::int64_t, std::int64_t> bytes;  ///< of the receiver: where from, in the sender
  std::int64_t total = 0;
};

Carried carry(const NetworkPhase& from, std::int32_t sender, const NetworkPhase& to,
              std::int32_t receiver) {
  const auto only = [](const std::vector<NetworkPiece>& pieces, std::int32_t peer) {
    std::vector<NetworkPiece> some;
    std::ranges::copy_if(pieces, std::back_inserter(some),
                         [&](const NetworkPiece& piece) { return piece.peer == peer; });
    return some;
  };
  const auto sent = only(from.sent, receiver);
  const auto received = only(to.received, sender);
  EXPECT_EQ(sent.size(), received.size());
  Carried carried;
  for (std::size_t i = 0; i < std::min(sent.size(), received.size()); ++i) {
    EXPECT_EQ(sent[i].size_bytes, received[i].size_bytes);
    carried.total += sent[i].size_bytes;
    for (std::int64_t b = 0; b < sent[i].size_bytes; ++b)
      carried.bytes[received[i].offset_bytes + b] = sent[i].offset_bytes + b;
  }
  return carried;
}

/// Packed at the sender, unpacked at the receiver: each row that a node needs, and no other.
TEST(NodeRows, packed_slices_bring_each_row_that_is_needed_once) {
  constexpr std::int64_t row_bytes = 3;
  constexpr std::int64_t from = 1000;
  constexpr std::int64_t to = 5000;
  Random random(4);
  for (const Layer& layer : layers) {
    const std::int64_t slice = layer.max_tokens * row_bytes;
    const auto all = random_ids(layer, random);
    const WorkspacePart part{.from_bytes = from,
                             .from_node_bytes = slice,
                             .to_bytes = to,
                             .to_node_bytes = slice,
                             .row_bytes = row_bytes};
    const auto phase_of = [&](std::int32_t r, bool back) {
      const Ids ids = forwarded(layer, all, r);
      const NodeRows rows = count_node_rows(view(layer, ids, r));
      return workspace_phase(layer.topology, r, std::span(&part, 1),
                             back ? returned_rows(rows) : rows, 100, false);
    };
    for (std::int32_t r = 0; r < layer.topology.world_size; ++r) {
      for (std::int32_t n = 0; n < layer.nodes(); ++n) {
        if (n == layer.node(r)) continue;
        const std::int32_t peer = layer.peer(r, n);
        const Ids ids = forwarded(layer, all, r);
        const Ids theirs = forwarded(layer, all, peer);
        const auto order = tokens_for_node(view(layer, ids, r), layer.node(r), n);
        EXPECT_EQ(order, tokens_for_node(view(layer, theirs, peer), layer.node(r), n));
        const Carried there = carry(phase_of(r, false), r, phase_of(peer, false), peer);
        EXPECT_EQ(there.total, std::ssize(order) * row_bytes);
        for (std::int64_t i = 0; i < std::ssize(order) * row_bytes; ++i)
          EXPECT_EQ(there.bytes.at(to + layer.node(r) * slice + i), from + n * slice + i);
        const Carried back = carry(phase_of(peer, true), peer, phase_of(r, true), r);
        EXPECT_EQ(back.total, there.total);
      }
    }
  }
}

TEST(NodeRows, a_pair_without_rows_still_says_that_it_has_come) {
  const WorkspacePart part{.to_node_bytes = 80, .row_bytes = 8};
  const NodeRows none = whole_slices(3, 1, 0);
  const NetworkPhase rows = workspace_phase({6, 2}, 2, std::span(&part, 1), none, 100, false);
  EXPECT_TRUE(rows.sent.empty() && rows.received.empty());
  EXPECT_EQ(rows.slots.size(), 2U);  // nobody waits for what does not come
  const NetworkPhase begin = workspace_phase({6, 2}, 2, std::span(&part, 1), none, 100, true);
  EXPECT_EQ(begin.sent.size(), 4U);
  EXPECT_EQ(begin.received.size(), 4U);
}

TEST(NodeRows, whole_slices_are_all_rows_but_the_own_nodes) {
  const NodeRows rows = whole_slices(3, 2, 7);
  EXPECT_EQ(rows.sent, (std::vector<std::int32_t>{7, 7, 0}));
  EXPECT_EQ(rows.received, rows.sent);
}

}  // namespace
}  // namespace waybill
