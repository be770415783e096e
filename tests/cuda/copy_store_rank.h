#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "cuda/device_arena.h"
#include "experts/simulated_copies.h"
#include "moe/gradient_sum.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/experts/copy_store.h"

namespace waybill::test {

struct StoreCase : SimulatedCopies {
  using SimulatedCopies::SimulatedCopies;

  [[nodiscard]] std::int32_t spare() const { return drawn.slots().num_spare(); }
  [[nodiscard]] std::int32_t homes() const { return drawn.slots().experts_per_rank(); }
  [[nodiscard]] std::int64_t copy_bytes() const { return part.elements * dtype_bytes(wide); }

  DType wide = detail::gradient_sum_dtype(part.dtype);
};

/// One rank's calls. Gradients lie behind weights in the store.
class StoreRank {
 public:
  static constexpr std::int64_t gradients_at = std::int64_t{4} << 20;
  static constexpr std::int64_t size_bytes = 2 * gradients_at;

  StoreRank(World& world, std::int32_t spare)
      : world_(world), arena_(world, size_bytes), store_(world, size_bytes, spare) {}

  [[nodiscard]] CopyStore& store() { return store_; }
  [[nodiscard]] DeviceArena& arena() { return arena_; }
  [[nodiscard]] Stream stream() const { return {arena_.stream()}; }

  /// Puts a case's inputs onto the device, and its gradients into the store.
  void begin(const StoreCase& one) {
    arena_.reset();
    one_ = &one;
    const auto rank = to_int(world_.rank());
    const ExpertSlotTable slots = one.drawn.slots();
    HostTensor table(DType::int32, {std::ssize(slots.experts)});
    std::ranges::copy(std::as_bytes(slots.experts), table.bytes().begin());
    slots_ = arena_.upload(table);
    HostTensor own(DType::uint8, {std::ssize(one.home[rank])});
    std::ranges::copy(one.home[rank], own.bytes().begin());
    own_ = arena_.upload(own);
    own_gradients_ = arena_.upload(one.gradients.first[rank]);
    put(one.gradients.second[rank].bytes(), gradients_at);
  }

  void fetch(bool fresh, std::int64_t stamp, const std::int32_t* quotas = nullptr) {
    store_.fetch_weights(call(own_.data, one_->row_bytes, 0, fresh, stamp, quotas), stream());
  }
  void add() {
    store_.add_gradients(call(own_gradients_.data, one_->row_bytes, gradients_at, true, 0, nullptr),
                         stream());
  }

  /// Fills the weights' part of the store.
  void forget(int byte) {
    const std::int64_t bytes = one_->spare() * one_->row_bytes;
    if (bytes > 0) cuda_ok(cudaMemsetAsync(store_.data(), byte, bytes, arena_.stream()), world_);
  }
  /// All ranks have filled theirs.
  void settle() {
    arena_.synchronize();
    world_.barrier();
  }

  /// @param moved copies have come; else the store is as it was filled
  void expect_weights(int filled, bool moved = true) {
    const std::int32_t rank = to_int(world_.rank());
    const ExpertSlotTable slots = one_->drawn.slots();
    std::vector<std::byte> got(one_->spare() * one_->row_bytes);
    arena_.read(got.data(), store_.data(), std::ssize(got));
    std::vector<std::byte> wanted(got.size(), static_cast<std::byte>(filled));
    for (std::int32_t s = 0; s < one_->spare(); ++s) {
      const std::int32_t slot = one_->homes() + s;
      if (!moved || slots.experts[rank * slots.slots_per_rank() + slot] < 0) continue;
      std::copy_n(one_->weights[rank].begin() + slot * one_->row_bytes, one_->row_bytes,
                  wanted.begin() + s * one_->row_bytes);
    }
    const auto place = std::ranges::mismatch(got, wanted).in1 - got.begin();
    ASSERT_EQ(place, std::ssize(got))
        << "the first byte that differs; slots of " << one_->row_bytes;
    EXPECT_TRUE(arena_.guards_hold(own_));
  }
  void expect_sums() {
    const HostTensor got = arena_.download(own_gradients_);
    EXPECT_TRUE(std::ranges::equal(got.bytes(), one_->sums[to_int(world_.rank())].bytes()));
    EXPECT_TRUE(arena_.guards_hold(own_gradients_));
  }
  /// Weights come and gradients go home, both as simulated.
  void expect_moves() {
    forget(0x5A);
    fetch(true, 0);
    add();
    expect_weights(0x5A);
    expect_sums();
  }

 private:
  void put(std::span<const std::byte> bytes, std::int64_t at) {
    if (bytes.empty()) return;
    arena_.copy(store_.data() + at, bytes.data(), std::ssize(bytes));
    arena_.synchronize();
  }

  CopyStoreCall call(std::byte* own, std::int64_t row_bytes, std::int64_t at, bool fresh,
                     std::int64_t stamp, const std::int32_t* quotas) {
    home_.clear();
    for (std::int32_t e = 0; e < one_->homes(); ++e) home_.push_back(own + e * row_bytes);
    copies_ = store_.data() + at;
    return {.num_experts = one_->drawn.num_experts(),
            .spare_experts = one_->spare(),
            .slots = reinterpret_cast<const std::int32_t*>(slots_.data),
            .quotas = quotas,
            .parts = {&one_->part, 1},
            .home = home_,
            .copies = {&copies_, 1},
            .owner = 1,
            .stamp = stamp,
            .fresh = fresh};
  }

  World& world_;
  DeviceArena arena_;
  CopyStore store_;
  const StoreCase* one_ = nullptr;
  TensorView slots_;
  TensorView own_;
  TensorView own_gradients_;
  std::vector<std::byte*> home_;
  std::byte* copies_ = nullptr;
};

/// Cases one after another on a store of one rank.
inline void run_copies(World& world, std::span<const StoreCase> cases) {
  StoreRank rank(world, 3);
  for (const StoreCase& one : cases) {
    rank.begin(one);
    rank.expect_moves();
  }
  rank.store().finalize();
}

/// Cases for nodes that a network joins: of few elements, and of rounds where the stage is small.
inline std::vector<StoreCase> network_copies(std::int32_t ranks) {
  std::vector<StoreCase> cases;
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    cases.emplace_back(ranks, 2, 2, seed, 40, DType::float32);
    cases.emplace_back(ranks, 3, 1, seed, 37, DType::bfloat16);  // words of two bytes
    cases.emplace_back(ranks, 1, 3, seed, 70'000, DType::bfloat16);
    cases.emplace_back(ranks, 2, 2, seed, 30'001, DType::float16);
  }
  cases.emplace_back(ranks, 1, 2, 5, 60'000, DType::float64);
  cases.emplace_back(ranks, 3, 0, 1, 7, DType::float32);  // without copies
  cases.emplace_back(ranks, 3, 2, 1, 0, DType::float32);  // without elements
  return cases;
}

}  // namespace waybill::test
