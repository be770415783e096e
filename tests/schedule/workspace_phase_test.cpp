#include "schedule/workspace_phase.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "core/to_size.h"

namespace waybill {
namespace {

using detail::to_size;

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
                                    bool meets) {
  std::vector<NetworkPhase> phases;
  for (std::int32_t r = 0; r < topology.world_size; ++r)
    phases.push_back(workspace_phase(topology, r, parts, one_row(topology, r), first_slot, meets));
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
    for (const bool meets : {false, true}) {
      auto workspaces = want;
      std::vector<NetworkPhase> phases;
      for (std::int32_t r = 0; r < topology.world_size; ++r) {
        const std::int32_t node = r / topology.ranks_per_node;
        const WorkspacePart parts[] = {
            {.from_bytes = 256 + node * 40, .to_bytes = 256, .to_node_bytes = 40, .row_bytes = 40},
            {.from_bytes = 1024 + node * 7, .to_bytes = 1024, .to_node_bytes = 7, .row_bytes = 7}};
        phases.push_back(
            workspace_phase(topology, r, parts, one_row(topology, r), first_slot, meets));
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

}  // namespace
}  // namespace waybill
