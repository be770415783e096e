#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>

#include "moe/copied_experts.h"
#include "support/expect_error.h"
#include "waybill/moe/expert_routing.h"

namespace waybill::test {
namespace {

using Transfers = std::vector<ExpertTransfer>;

ExpertSlotTable slots_of(std::int32_t num_ranks, std::int32_t num_experts,
                         const std::vector<std::int32_t>& experts) {
  return {num_ranks, num_experts, experts};
}

TEST(ExpertTransfers, OneCopyComesFromHomeAndItsGradientGoesThere) {
  const std::vector<std::int32_t> experts{0, 1, -1, 2, 3, 1};
  const ExpertSlotTable slots = slots_of(2, 4, experts);
  EXPECT_EQ(plan_weight_transfers(slots, 2), (Transfers{{1, 0, 1, 1, 2}}));
  EXPECT_EQ(plan_gradient_transfers(slots), (Transfers{{1, 1, 2, 0, 1}}));
}

TEST(ExpertTransfers, ManyCopiesAreForwardedInATree) {
  // Expert 0 on all of 8 ranks with one expert each: three rounds, no rank sends twice in one.
  std::vector<std::int32_t> experts;
  for (std::int32_t r = 0; r < 8; ++r) experts.insert(experts.end(), {r, r == 0 ? -1 : 0});
  const Transfers transfers = plan_weight_transfers(slots_of(8, 8, experts), 8);
  std::vector<std::pair<std::int32_t, std::int32_t>> hops;
  for (const ExpertTransfer& one : transfers) hops.emplace_back(one.source, one.target);
  EXPECT_EQ(hops, (std::vector<std::pair<std::int32_t, std::int32_t>>{
                      {0, 1}, {0, 2}, {1, 3}, {0, 4}, {1, 5}, {2, 6}, {3, 7}}));
}

TEST(ExpertTransfers, ANodeIsSentAnExpertOnce) {
  // Home is rank 2 of nodes of 2; copies on all others.
  std::vector<std::int32_t> experts;
  for (std::int32_t r = 0; r < 8; ++r) experts.insert(experts.end(), {r, r == 2 ? -1 : 2});
  const Transfers transfers = plan_weight_transfers(slots_of(8, 8, experts), 2);
  ASSERT_EQ(transfers.size(), 7U);
  std::map<std::int32_t, int> into_node;
  for (const ExpertTransfer& one : transfers) {
    if (one.source / 2 != one.target / 2) ++into_node[one.target / 2];
  }
  EXPECT_EQ(into_node, (std::map<std::int32_t, int>{{0, 1}, {2, 1}, {3, 1}}));
}

// Every copy gets its expert once, from a rank that has it by then; in rounds that are as few as a
// doubling allows. And what moves in this order is what the simulation says.
TEST(ExpertTransfers, BringWhatTheSimulationSays) {
  constexpr std::int64_t row_bytes = 5;
  for (const auto& [ranks, per_rank, spare, per_node] : {std::array{1, 3, 2, 1},
                                                         {2, 2, 1, 2},
                                                         {4, 1, 3, 2},
                                                         {4, 3, 2, 4},
                                                         {8, 2, 2, 2},
                                                         {8, 1, 7, 4}}) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const CopiedExperts drawn(ranks, per_rank, spare, seed);
      const ExpertSlotTable slots = drawn.slots();
      const auto home = drawn.home_bytes(row_bytes);
      const std::vector<std::span<const std::byte>> views(home.begin(), home.end());
      const auto wanted = simulate_expert_copies(slots, views, row_bytes);

      std::vector<std::vector<std::byte>> memory(ranks);
      for (std::int32_t r = 0; r < ranks; ++r) {
        memory[r] = home[r];
        memory[r].resize(std::int64_t{slots.slots_per_rank()} * row_bytes);
      }
      std::set<std::pair<std::int32_t, std::int32_t>> filled;
      for (const ExpertTransfer& one : plan_weight_transfers(slots, per_node)) {
        EXPECT_EQ(slots.experts[one.source * slots.slots_per_rank() + one.source_slot], one.expert);
        EXPECT_EQ(slots.experts[one.target * slots.slots_per_rank() + one.target_slot], one.expert);
        EXPECT_TRUE(filled.emplace(one.target, one.target_slot).second);
        std::copy_n(memory[one.source].begin() + one.source_slot * row_bytes, row_bytes,
                    memory[one.target].begin() + one.target_slot * row_bytes);
      }
      EXPECT_EQ(memory, wanted);
      EXPECT_EQ(std::ssize(filled), drawn.num_copies());
      // The simulation by its definition.
      for (std::int32_t r = 0; r < ranks; ++r) {
        for (std::int32_t s = 0; s < slots.slots_per_rank(); ++s) {
          const std::int32_t expert = slots.experts[r * slots.slots_per_rank() + s];
          for (std::int64_t i = 0; i < row_bytes; ++i) {
            const std::byte byte = expert < 0
                                       ? std::byte{0}
                                       : home[expert / per_rank][expert % per_rank * row_bytes + i];
            ASSERT_EQ(wanted[r][s * row_bytes + i], byte);
          }
        }
      }
    }
  }
}

TEST(ExpertCopyGradients, AreAddedHomeFirstThenByRankAndRoundedOnce) {
  // In float32, 1 + 2^-24 + 2^-24 is 1 in this order, and 1 + 2^-23 in another.
  const std::vector<std::int32_t> experts{0, -1, 1, 0, 2, 0};
  const ExpertSlotTable slots = slots_of(3, 3, experts);
  const float small = std::ldexp(1.0F, -24);
  const auto sum = [&](float home, float first, float second, DType dtype) {
    std::vector<HostTensor> of_home;
    std::vector<HostTensor> of_copies;
    for (std::int32_t r = 0; r < 3; ++r) {
      of_home.emplace_back(dtype, Shape{1, 1});
      of_copies.emplace_back(DType::float32, Shape{1, 1});
    }
    set_float(of_home[0], 0, home);
    of_copies[1].as<float>()[0] = first;
    of_copies[2].as<float>()[0] = second;
    return number_at(
        simulate_expert_copy_gradients(slots, views_of(of_home), views_of(of_copies))[0], 0);
  };
  EXPECT_EQ(sum(1, small, small, DType::float32), 1.0F);
  EXPECT_EQ(sum(small, small, 1, DType::float32), 1.0F + 2 * small);
  // bfloat16 has 8 bits: 256 + 1 rounds to 256, 256 + 1 + 1 to 258 where it is rounded once.
  EXPECT_EQ(sum(256, 1, 1, DType::bfloat16), 258.0F);
  EXPECT_EQ(sum(2048, 1, 1, DType::float16), 2050.0F);
}

TEST(ExpertCopyGradients, LeaveExpertsWithoutCopiesAsTheyAre) {
  const std::vector<std::int32_t> experts{0, -1, 1, -1};
  std::vector<HostTensor> home(2, HostTensor(DType::bfloat16, {1, 2}));
  home[0].as<std::uint16_t>()[0] = 0x7F81;  // a signalling NaN: rounding would make it quiet
  home[0].as<std::uint16_t>()[1] = 0x8000;  // -0
  std::vector<HostTensor> copies(2, HostTensor(DType::float32, {1, 2}));
  copies[1].as<float>()[0] = std::numeric_limits<float>::quiet_NaN();  // empty: not read
  const auto sums =
      simulate_expert_copy_gradients(slots_of(2, 2, experts), views_of(home), views_of(copies));
  EXPECT_EQ(sums[0].as<std::uint16_t>()[0], 0x7F81);
  EXPECT_EQ(sums[0].as<std::uint16_t>()[1], 0x8000);
}

TEST(ExpertCopyGradients, EqualASumByDefinition) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16, DType::float64}) {
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      const CopiedExperts drawn(4, 2, 2, seed);
      const ExpertSlotTable slots = drawn.slots();
      const auto [home, copies] = drawn.gradients(3, dtype);
      const auto sums = simulate_expert_copy_gradients(slots, views_of(home), views_of(copies));
      for (std::int32_t expert = 0; expert < 8; ++expert) {
        for (std::int64_t i = 0; i < 3; ++i) {
          const std::int64_t at = expert % 2 * 3 + i;
          double exact = number_at(home[expert / 2], at);
          float rounded = static_cast<float>(exact);
          for (std::int32_t r = 0; r < 4; ++r) {
            for (std::int64_t s = 0; s < 2; ++s) {
              if (slots.experts[r * 4 + 2 + s] != expert) continue;
              const double value = number_at(copies[r], s * 3 + i);
              exact += value;
              rounded += static_cast<float>(value);
            }
          }
          HostTensor wanted(dtype, {1});
          set_float(wanted, 0, rounded);
          if (dtype == DType::float64) wanted.as<double>()[0] = exact;
          EXPECT_EQ(number_at(sums[expert / 2], at), number_at(wanted, 0));
        }
      }
    }
  }
}

TEST(ExpertTransferErrors, NameWhatIsWrong) {
  const auto refuses = [](std::int32_t ranks, std::int32_t num_experts,
                          const std::vector<std::int32_t>& experts,
                          std::initializer_list<std::string_view> parts) {
    EXPECT_TRUE(rejects(
        [&] { (void)plan_weight_transfers(slots_of(ranks, num_experts, experts), 1); }, parts));
    EXPECT_TRUE(rejects(
        [&] { (void)plan_gradient_transfers(slots_of(ranks, num_experts, experts)); }, parts));
  };
  refuses(2, 3, {0, 1, 2, 3}, {"num_experts = 3", "a multiple of 2 ranks"});
  refuses(0, 2, {0, 1}, {"a multiple of 0 ranks"});
  refuses(2, 4, {0, 1, 2}, {"slots are 3", "for each of 2 ranks"});
  refuses(2, 4, {0, 1}, {"slots are 2", "at least 4"});
  refuses(2, 4, {0, 2, -1, 2, 3, -1}, {"slots[0][1] = 2", "expected 1", "home expert"});
  refuses(2, 4, {0, 1, 4, 2, 3, -1}, {"slots[0][2] = 4", "-1 or 0..3"});
  refuses(2, 4, {0, 1, -2, 2, 3, -1}, {"slots[0][2] = -2"});
  refuses(2, 4, {0, 1, 1, 2, 3, -1}, {"slots[0][2] = 1", "rank 0 has not yet"});
  refuses(2, 4, {0, 1, 2, 2, 2, 3, -1, -1}, {"slots[0][3] = 2", "rank 0 has not yet"});
  const std::vector<std::int32_t> good{0, 1, -1, 2, 3, 1};
  EXPECT_TRUE(rejects([&] { (void)plan_weight_transfers(slots_of(2, 4, good), 3); },
                      {"ranks_per_node = 3", "a divisor of 2"}));
  const std::vector<std::span<const std::byte>> none(2);
  EXPECT_TRUE(rejects([&] { (void)simulate_expert_copies(slots_of(2, 4, good), none, 3); },
                      {"home[0] has 0 bytes", "2 experts of 3"}));
  EXPECT_TRUE(rejects([&] { (void)simulate_expert_copies(slots_of(2, 4, good), {}, 3); },
                      {"home has 0 entries"}));
  EXPECT_TRUE(rejects([&] { (void)simulate_expert_copies(slots_of(2, 4, good), none, -3); },
                      {"row_bytes = -3"}));
  std::vector<HostTensor> home(2, HostTensor(DType::bfloat16, {2, 3}));
  std::vector<HostTensor> copies(2, HostTensor(DType::float32, {1, 3}));
  const auto refuses_gradients = [&](std::initializer_list<std::string_view> parts) {
    EXPECT_TRUE(rejects(
        [&] {
          (void)simulate_expert_copy_gradients(slots_of(2, 4, good), views_of(home),
                                               views_of(copies));
        },
        parts));
  };
  copies[1] = HostTensor(DType::bfloat16, {1, 3});
  refuses_gradients({"copies[1] is bfloat16 of shape [1, 3]", "contiguous float32"});
  copies.pop_back();
  refuses_gradients({"home and copies have 2 and 1 entries"});
  copies.emplace_back(DType::float32, Shape{1, 3});
  home[0] = HostTensor(DType::int32, {2, 3});
  refuses_gradients({"home is int32"});
}

}  // namespace
}  // namespace waybill::test
