// The rule by which GPU ranks move copies of experts (src/cuda/experts/copies), on the CPU, against
// the transfers that CPU ranks make.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "cuda/experts/copies/rounds.h"
#include "cuda/experts/copies/rule.h"
#include "moe/copied_experts.h"
#include "support/run_ranks.h"
#include "waybill/core/random.h"
#include "waybill/experts/copy_store.h"

namespace waybill::test {
namespace {

using cuda::CopyTable;

/// A rank's transfers in its order: (copies in the order of keys).
template <class Key>
std::vector<std::int32_t> in_order(const CopyTable& table, std::int32_t rank, const Key& key) {
  std::vector<std::uint64_t> keys;
  for (std::int32_t i = 0; i < table.size(); ++i) keys.push_back(key(table, i, rank));
  const auto count = table.size() - std::ranges::count(keys, cuda::no_copy_key);
  std::vector<std::int32_t> order(count, -1);
  for (std::int32_t i = 0; i < table.size(); ++i) {
    if (keys[i] == cuda::no_copy_key) continue;
    const std::int32_t place = cuda::place_of(keys.data(), table.size(), i);
    EXPECT_EQ(order.at(place), -1);
    order.at(place) = i;
  }
  return order;
}

struct RuleCase {
  RuleCase(std::int32_t ranks, std::int32_t per_rank, std::int32_t spare, std::uint64_t seed,
           std::int32_t nodes = 1)
      : drawn(ranks, per_rank, spare, seed) {
    const ExpertSlotTable slots = drawn.slots();
    for (std::int32_t r = 0; r < ranks; ++r) {
      for (std::int32_t s = 0; s < spare; ++s)
        spare_experts.push_back(slots.experts[r * slots.slots_per_rank() + per_rank + s]);
    }
    table = {spare_experts.data(), ranks, per_rank, spare, ranks / nodes};
  }

  /// Where a copy lies: (rank, slot), as transfers have it.
  [[nodiscard]] std::pair<std::int32_t, std::int32_t> place(std::int32_t copy) const {
    return {copy / table.spare, table.homes + copy % table.spare};
  }
  /// The transfer to a copy from its home or from another copy.
  [[nodiscard]] ExpertTransfer transfer(std::int32_t copy, std::int32_t sender) const {
    const std::int32_t expert = spare_experts[copy];
    const auto [target, target_slot] = place(copy);
    if (sender < 0)
      return {expert, expert / table.homes, expert % table.homes, target, target_slot};
    const auto [source, source_slot] = place(sender);
    return {expert, source, source_slot, target, target_slot};
  }

  CopiedExperts drawn;
  std::vector<std::int32_t> spare_experts;
  CopyTable table{};
};

std::vector<RuleCase> rule_cases() {
  std::vector<RuleCase> cases;
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    for (const auto& [ranks, per_rank, spare] :
         {std::tuple{2, 1, 1}, {3, 2, 2}, {8, 4, 2}, {8, 2, 5}, {17, 3, 1}, {33, 1, 2}})
      cases.emplace_back(ranks, per_rank, spare, seed);
  }
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    for (const auto& [ranks, nodes, per_rank, spare] :
         {std::tuple{2, 2, 1, 1}, {8, 2, 2, 2}, {12, 4, 2, 3}, {32, 8, 1, 2}, {9, 3, 3, 1}})
      cases.emplace_back(ranks, per_rank, spare, seed, nodes);
  }
  cases.emplace_back(1, 3, 2, 0);
  cases.emplace_back(4, 2, 0, 1);
  return cases;
}

using Transfers = std::vector<ExpertTransfer>;

/// In an order of their own.
Transfers sorted(Transfers transfers) {
  const auto key = [](const ExpertTransfer& one) {
    return std::tuple(one.expert, one.target, one.target_slot);
  };
  std::ranges::sort(transfers, {}, key);
  return transfers;
}

TEST(DeviceCopies, WeightsTakeTheWaysOfCpuRanks) {
  for (const RuleCase& one : rule_cases()) {
    Transfers made;
    for (std::int32_t r = 0; r < one.table.num_ranks; ++r) {
      for (const std::int32_t copy : in_order(one.table, r, cuda::weight_key)) {
        made.push_back(one.transfer(copy, cuda::sender_of(one.table, copy)));
        EXPECT_EQ(made.back().source, r);
      }
    }
    const ExpertSlotTable slots = one.drawn.slots();
    EXPECT_EQ(sorted(made), sorted(plan_weight_transfers(slots, one.table.node_ranks)));
  }
}

/// Ranks that make their transfers in this order, each once the sender has the expert, all end.
TEST(DeviceCopies, NoTwoRanksWaitForEachOther) {
  for (const RuleCase& one : rule_cases()) {
    const std::int32_t ranks = one.table.num_ranks;
    std::vector<std::vector<std::int32_t>> orders;
    for (std::int32_t r = 0; r < ranks; ++r)
      orders.push_back(in_order(one.table, r, cuda::weight_key));
    std::vector<std::size_t> next(ranks);
    std::set<std::int32_t> arrived;
    for (bool moved = true; moved;) {
      moved = false;
      for (std::int32_t r = 0; r < ranks; ++r) {
        if (next[r] == orders[r].size()) continue;
        const std::int32_t copy = orders[r][next[r]];
        const std::int32_t sender = cuda::sender_of(one.table, copy);
        if (sender >= 0 && !arrived.contains(sender)) continue;
        arrived.insert(copy);
        ++next[r];
        moved = true;
      }
    }
    EXPECT_EQ(std::ssize(arrived), one.drawn.num_copies());
  }
}

TEST(DeviceCopies, WhatHomesHaveIsSentBeforeWhatIsForwarded) {
  for (const RuleCase& one : rule_cases()) {
    for (std::int32_t r = 0; r < one.table.num_ranks; ++r) {
      const auto order = in_order(one.table, r, cuda::weight_key);
      const auto forwards = [&](std::int32_t i) { return cuda::sender_of(one.table, i) >= 0; };
      EXPECT_TRUE(std::ranges::is_partitioned(order, [&](std::int32_t i) { return !forwards(i); }));
      // The targets of one tensor follow each other: it is read once for all of them.
      std::set<std::int32_t> seen;
      for (std::size_t i = 0; i < order.size(); ++i) {
        const std::int32_t expert = one.spare_experts[order[i]];
        if (i > 0 && one.spare_experts[order[i - 1]] == expert) continue;
        EXPECT_TRUE(seen.insert(expert).second);
      }
    }
  }
}

TEST(DeviceCopies, GradientsAreAddedInTheOrderOfCpuRanks) {
  for (const RuleCase& one : rule_cases()) {
    const Transfers all = plan_gradient_transfers(one.drawn.slots());
    for (std::int32_t r = 0; r < one.table.num_ranks; ++r) {
      Transfers wanted;
      for (const ExpertTransfer& transfer : all) {
        if (transfer.target == r) wanted.push_back(transfer);
      }
      Transfers made;
      for (const std::int32_t copy : in_order(one.table, r, cuda::gradient_key)) {
        const ExpertTransfer back = one.transfer(copy, -1);
        made.push_back({back.expert, back.target, back.target_slot, back.source, back.source_slot});
      }
      EXPECT_EQ(made, wanted);
    }
  }
}

/// The windows of ranks that move copies in rounds. A store lies before the stage.
struct RoundsCase {
  RoundsCase(const RuleCase& of, bool sums, std::int64_t half_bytes)
      : one(of), rounds(of.table, parts_of(of), sums, {stage_at(of), half_bytes}) {
    Random random(7);
    for (std::int32_t r = 0; r < of.table.num_ranks; ++r) {
      std::vector<std::uint8_t> window(stage_at(of) + 2 * half_bytes);
      for (auto& byte : window) byte = static_cast<std::uint8_t>(random.below(256));
      windows.push_back(window);
      std::vector<std::uint8_t> home(of.table.homes * expert_bytes);
      for (auto& byte : home) byte = static_cast<std::uint8_t>(random.below(256));
      homes.push_back(home);
    }
  }

  static constexpr std::int64_t sizes[] = {40, 0, 100, 7, 64};  ///< bytes of parts
  static constexpr std::int64_t expert_bytes = 211;

  static std::vector<cuda::StreamPart> parts_of(const RuleCase& of) {
    std::vector<cuda::StreamPart> parts;
    std::int64_t begin = 0;
    std::int64_t at = 16;
    for (const std::int64_t bytes : sizes) {
      parts.push_back({begin, bytes, at});
      begin = cuda::next_in_stream(begin, bytes);
      at += of.table.spare * bytes;
    }
    return parts;
  }
  static std::int64_t stage_at(const RuleCase& of) { return 16 + of.table.spare * expert_bytes; }

  /// The parts of a copy in a rank's store, one after the other.
  [[nodiscard]] std::vector<std::uint8_t> copy_in(std::int32_t copy) const {
    std::vector<std::uint8_t> bytes;
    for (const cuda::StreamPart& part : parts_of(one)) {
      const auto first = windows[copy / one.table.spare].begin() + part.copies_at +
                         copy % one.table.spare * part.bytes;
      bytes.insert(bytes.end(), first, first + part.bytes);
    }
    return bytes;
  }
  [[nodiscard]] std::vector<std::uint8_t> home_of(std::int32_t expert) const {
    const auto& home = homes[expert / one.table.homes];
    const auto first = home.begin() + expert % one.table.homes * expert_bytes;
    return {first, first + expert_bytes};
  }

  /// All ranks make the moves of a round, of which both ends know the same.
  void move(std::int64_t round) {
    const auto before = windows;
    for (std::int32_t r = 0; r < one.table.num_ranks; ++r) {
      for (const cuda::WindowMove& move : rounds.moves(r, round)) {
        EXPECT_TRUE(move.source == r || move.target == r);
        EXPECT_NE(move.source / one.table.node_ranks, move.target / one.table.node_ranks);
        EXPECT_EQ(pair(r, move, round),
                  pair(r == move.source ? move.target : move.source, move, round));
        if (move.source != r) continue;
        std::copy_n(before[r].begin() + move.from, move.bytes,
                    windows[move.target].begin() + move.to);
      }
    }
  }

  /// The moves between two ranks in one direction, as a rank has them.
  [[nodiscard]] std::vector<std::array<std::int64_t, 3>> pair(std::int32_t rank,
                                                              const cuda::WindowMove& like,
                                                              std::int64_t round) const {
    std::vector<std::array<std::int64_t, 3>> found;
    for (const cuda::WindowMove& move : rounds.moves(rank, round)) {
      if (move.source == like.source && move.target == like.target)
        found.push_back({move.from, move.to, move.bytes});
    }
    return found;
  }

  const RuleCase& one;
  cuda::CopyRounds rounds;
  std::vector<std::vector<std::uint8_t>> windows;
  std::vector<std::vector<std::uint8_t>> homes;  ///< [P, expert_bytes]: parts one after the other
};

TEST(DeviceCopies, RoundsBringWeightsToTheFirstCopyOnEachNode) {
  std::int64_t most_rounds = 0;
  for (const RuleCase& of : rule_cases()) {
    for (const std::int64_t half : {std::int64_t{96}, std::int64_t{4096}}) {
      RoundsCase one(of, false, half);
      const RoundsCase before(of, false, half);
      most_rounds = std::max(most_rounds, one.rounds.num_rounds());
      for (std::int64_t round = 0; round < one.rounds.num_rounds(); ++round) {
        for (std::int32_t r = 0; r < of.table.num_ranks; ++r) {
          for (const cuda::StagedRange& range : one.rounds.staged(r, round)) {
            std::int64_t at = range.home * RoundsCase::expert_bytes + range.offset;
            for (std::int32_t i = 0; i < range.part; ++i) at += RoundsCase::sizes[i];
            std::copy_n(one.homes[r].begin() + at, range.bytes, one.windows[r].begin() + range.to);
          }
        }
        one.move(round);
      }
      for (std::int32_t copy = 0; copy < of.table.size(); ++copy) {
        const bool comes =
            cuda::crosses_nodes(of.table, copy) && cuda::first_of_node(of.table, copy) == copy;
        const auto now = one.copy_in(copy);
        EXPECT_EQ(now, comes ? one.home_of(of.spare_experts[copy]) : before.copy_in(copy));
      }
    }
  }
  EXPECT_GT(most_rounds, 3);
}

TEST(DeviceCopies, RoundsBringGradientsHomeWhileEarlierOnesAreAdded) {
  std::int64_t most_rounds = 0;
  for (const RuleCase& of : rule_cases()) {
    RoundsCase one(of, true, 2048);
    most_rounds = std::max(most_rounds, one.rounds.num_rounds());
    std::vector<std::vector<std::uint8_t>> landed(of.table.size());
    const auto parts = RoundsCase::parts_of(of);
    const std::int64_t range = one.rounds.range_bytes();
    const auto take = [&](std::int64_t round) {
      for (std::int32_t copy = 0; copy < of.table.size(); ++copy) {
        if (!cuda::crosses_nodes(of.table, copy)) continue;
        const auto& window = one.windows[of.spare_experts[copy] / of.table.homes];
        const std::int64_t place =
            one.rounds.half(round) + cuda::landing_of(of.table, copy) * range;
        for (std::int64_t i = round * range; i < (round + 1) * range; ++i) {
          const bool is_there = std::ranges::any_of(parts, [&](const cuda::StreamPart& part) {
            return part.begin <= i && i < part.begin + part.bytes;
          });
          if (is_there) landed[copy].push_back(window[place + i - round * range]);
        }
      }
    };
    for (std::int64_t round = 0; round < one.rounds.num_rounds(); ++round) {
      one.move(round);
      if (round > 0) take(round - 1);  // a rank may be late by one
    }
    if (one.rounds.num_rounds() > 0) take(one.rounds.num_rounds() - 1);
    for (std::int32_t copy = 0; copy < of.table.size(); ++copy) {
      if (cuda::crosses_nodes(of.table, copy)) {
        EXPECT_EQ(landed[copy], one.copy_in(copy));
      }
    }
  }
  EXPECT_GT(most_rounds, 3);
}

TEST(DeviceCopies, StripesHaveEachChunkOnce) {
  for (const std::int64_t bytes : {0L, 1L, 131'071L, 131'072L, 131'073L, 4'194'304L, 88'080'384L}) {
    const std::int64_t chunks = cuda::copy_chunks(bytes);
    EXPECT_EQ(chunks, (bytes + 131'071) / 131'072);
    std::int64_t counted = 0;
    for (std::int32_t stripe = 0; stripe < cuda::copy_stripes; ++stripe) {
      std::int64_t of_stripe = 0;
      for (std::int64_t c = stripe; c < chunks; c += cuda::copy_stripes) ++of_stripe;
      EXPECT_EQ(cuda::chunks_of_stripe(chunks, stripe), of_stripe);
      counted += of_stripe;
    }
    EXPECT_EQ(counted, chunks);
  }
}

TEST(DeviceCopies, ProgressGrowsFromCallToCall) {
  EXPECT_LT(cuda::progress_word(7, 5), cuda::progress_word(7, 6));
  EXPECT_LT(cuda::progress_word(7, 1'000'000), cuda::progress_word(8, 0));
}

TEST(DeviceCopies, RanksInHostMemoryHaveNoStore) {
  run_thread_world(2, [](World& world) {
    EXPECT_THROW(CopyStore(world, 256, 1), Unsupported);
    EXPECT_THROW(CopyStore(world, -1, 1), InvalidArgument);
    EXPECT_THROW(CopyStore(world, 256, -1), InvalidArgument);
  });
}

}  // namespace
}  // namespace waybill::test
