// The rule by which GPU ranks move copies of experts (src/cuda/experts/copies), on the CPU, against
// the transfers that CPU ranks make.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "cuda/experts/copies/rule.h"
#include "moe/copied_experts.h"
#include "support/run_ranks.h"
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
