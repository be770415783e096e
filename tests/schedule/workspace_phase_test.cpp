#include "schedule/workspace_phase.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "core/to_size.h"
#include "support/forwarded_ids.h"
#include "waybill/core/random.h"

namespace waybill {
namespace {

using detail::to_size;
using test::ForwardedIds;

constexpr std::int64_t workspace_bytes = 4096;
constexpr std::int32_t first_slot = 100;

/// [rank][byte]
using Workspaces = std::vector<std::vector<std::int64_t>>;

/// Carries all phases out as NCCL does: the k-th piece to a peer is what it receives k-th.
void carry_out(Workspaces& workspaces, const std::vector<NetworkPhase>& phases) {
  const auto before = workspaces;
  for (std::size_t r = 0; r < phases.size(); ++r) {
    std::map<std::int32_t, std::vector<NetworkPiece>> sent;  // to r, by sender
    for (std::size_t s = 0; s < phases.size(); ++s) {
      for (const NetworkPiece& piece : phases[s].sent) {
        if (to_size(piece.peer) == r) sent[static_cast<std::int32_t>(s)].push_back(piece);
      }
    }
    std::map<std::int32_t, std::size_t> taken;
    for (const NetworkPiece& piece : phases[r].received) {
      const std::size_t k = taken[piece.peer]++;
      ASSERT_LT(k, sent[piece.peer].size()) << "rank " << r << " from " << piece.peer;
      const NetworkPiece& from = sent[piece.peer][k];
      ASSERT_EQ(from.size_bytes, piece.size_bytes);
      std::copy_n(before[piece.peer].begin() + from.offset_bytes, piece.size_bytes,
                  workspaces[r].begin() + piece.offset_bytes);
    }
    for (const auto& [sender, pieces] : sent) EXPECT_EQ(taken[sender], pieces.size());
  }
}

/// One row a slice.
NodeRows one_row(const Topology& topology, std::int32_t rank) {
  return whole_slices(topology.num_nodes(), rank / topology.ranks_per_node, 1);
}

std::vector<NetworkPhase> phases_of(const Topology& topology, std::span<const WorkspacePart> parts,
                                    bool begins) {
  std::vector<NetworkPhase> phases;
  for (std::int32_t r = 0; r < topology.world_size; ++r)
    phases.push_back(workspace_phase(topology, r, parts, one_row(topology, r), first_slot, begins));
  return phases;
}

/// A number of its own for each address of each workspace.
Workspaces numbered(std::int32_t ranks) {
  Workspaces workspaces(to_size(ranks), std::vector<std::int64_t>(workspace_bytes));
  for (std::int64_t r = 0; r < ranks; ++r)
    for (std::int64_t i = 0; i < workspace_bytes; ++i) workspaces[r][i] = r * workspace_bytes + i;
  return workspaces;
}

constexpr Topology topologies[] = {{4, 2}, {6, 2}, {3, 1}, {8, 4}};

/// Each rank has slice n of a part from the rank of its local index on node n.
TEST(WorkspacePhase, slices_of_the_own_node_come_to_all_others) {
  for (const Topology& topology : topologies) {
    const auto want = numbered(topology.world_size);
    for (const bool begins : {false, true}) {
      auto workspaces = want;
      std::vector<NetworkPhase> phases;
      for (std::int32_t r = 0; r < topology.world_size; ++r) {
        const std::int32_t node = r / topology.ranks_per_node;
        const WorkspacePart parts[] = {
            {.from_bytes = 256 + node * 40, .to_bytes = 256, .to_node_bytes = 40, .row_bytes = 40},
            {.from_bytes = 1024 + node * 7, .to_bytes = 1024, .to_node_bytes = 7, .row_bytes = 7}};
        phases.push_back(
            workspace_phase(topology, r, parts, one_row(topology, r), first_slot, begins));
      }
      carry_out(workspaces, phases);
      for (std::int32_t r = 0; r < topology.world_size; ++r) {
        for (std::int64_t i = 0; i < workspace_bytes; ++i) {
          std::int64_t node = r / topology.ranks_per_node;
          if (i >= 256 && i < 256 + topology.num_nodes() * 40) node = (i - 256) / 40;
          if (i >= 1024 && i < 1024 + topology.num_nodes() * 7) node = (i - 1024) / 7;
          const std::size_t owner = node * topology.ranks_per_node + r % topology.ranks_per_node;
          ASSERT_EQ(workspaces[r][i], want[owner][i]) << "rank " << r << ", byte " << i;
        }
      }
    }
  }
}

/// Slice n of what is sent goes to node n, which finds it at the sender's node.
TEST(WorkspacePhase, each_node_gets_a_slice_of_its_own) {
  for (const Topology& topology : topologies) {
    const auto before = numbered(topology.world_size);
    auto workspaces = before;
    const WorkspacePart part{.from_bytes = 2048,
                             .from_node_bytes = 24,
                             .to_bytes = 512,
                             .to_node_bytes = 24,
                             .row_bytes = 24};
    carry_out(workspaces, phases_of(topology, std::span(&part, 1), false));
    for (std::int32_t r = 0; r < topology.world_size; ++r) {
      const std::int64_t own = r / topology.ranks_per_node;
      for (std::int64_t node = 0; node < topology.num_nodes(); ++node) {
        const std::int64_t peer = node * topology.ranks_per_node + r % topology.ranks_per_node;
        for (std::int64_t i = 0; i < 24; ++i) {
          const std::int64_t want =
              node == own ? before[r][512 + own * 24 + i] : before[peer][2048 + own * 24 + i];
          ASSERT_EQ(workspaces[r][512 + node * 24 + i], want);
        }
      }
    }
  }
}

TEST(WorkspacePhase, a_meeting_hears_of_all_ranks_of_other_nodes_once) {
  for (const Topology& topology : topologies) {
    const WorkspacePart part{.row_bytes = 8};
    for (const std::size_t num_parts : {std::size_t{0}, std::size_t{1}}) {
      const auto phases = phases_of(topology, std::span(&part, num_parts), true);
      for (std::int32_t r = 0; r < topology.world_size; ++r) {
        const NetworkPhase& phase = phases[r];
        std::vector<std::int32_t> others;
        std::vector<std::int32_t> peers;
        for (std::int32_t o = 0; o < topology.world_size; ++o) {
          if (o / topology.ranks_per_node == r / topology.ranks_per_node) continue;
          others.push_back(o);
          if (o % topology.ranks_per_node == r % topology.ranks_per_node)
            peers.push_back(first_slot + o);
        }
        auto arrived = phase.arrived;
        auto slots = phase.slots;
        std::ranges::sort(arrived);
        std::ranges::sort(slots);
        EXPECT_EQ(arrived, others);
        EXPECT_EQ(slots, num_parts == 0 ? std::vector<std::int32_t>() : peers);
        EXPECT_EQ(phase.sent.size(), others.size());  // one piece each: a part, or a message
        EXPECT_EQ(phase.received.size(), others.size());
        EXPECT_TRUE(phase.waits.empty());
      }
    }
  }
}

TEST(WorkspacePhase, one_node_has_nothing_to_send) {
  const WorkspacePart part{.row_bytes = 8};
  const NetworkPhase phase =
      workspace_phase({4, 4}, 1, std::span(&part, 1), whole_slices(1, 0, 1), first_slot, true);
  EXPECT_TRUE(phase.sent.empty() && phase.received.empty() && phase.slots.empty() &&
              phase.arrived.empty());
}

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
