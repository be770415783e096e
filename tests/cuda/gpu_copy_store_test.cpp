// Weights and gradients of copies of experts between GPU ranks, against the simulation.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/captured.h"
#include "cuda/device_arena.h"
#include "cuda/gpu_processes.h"
#include "moe/copied_experts.h"
#include "moe/gradient_sum.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/experts/copy_store.h"

namespace waybill::test {
namespace {

/// What the ranks of a world move, and what the simulation makes of it. One part per expert.
struct StoreCase {
  StoreCase(std::int32_t ranks, std::int32_t per_rank, std::int32_t spare, std::uint64_t seed,
            std::int64_t elements, DType dtype)
      : drawn(ranks, per_rank, spare, seed), part{elements, dtype} {
    row_bytes = elements * dtype_bytes(dtype);
    wide = detail::gradient_sum_dtype(dtype);
    home = drawn.home_bytes(row_bytes);
    const std::vector<std::span<const std::byte>> views(home.begin(), home.end());
    weights = simulate_expert_copies(drawn.slots(), views, row_bytes);
    gradients = drawn.gradients(elements, dtype);
    sums = simulate_expert_copy_gradients(drawn.slots(), views_of(gradients.first),
                                          views_of(gradients.second));
  }

  [[nodiscard]] std::int32_t spare() const { return drawn.slots().num_spare(); }
  [[nodiscard]] std::int32_t homes() const { return drawn.slots().experts_per_rank(); }
  [[nodiscard]] std::int64_t copy_bytes() const { return part.elements * dtype_bytes(wide); }

  CopiedExperts drawn;
  ExpertPart part;
  std::int64_t row_bytes = 0;
  DType wide = DType::float32;
  std::vector<std::vector<std::byte>> home;
  std::vector<std::vector<std::byte>> weights;
  std::pair<std::vector<HostTensor>, std::vector<HostTensor>> gradients;
  std::vector<HostTensor> sums;
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

void run_cases(std::int32_t ranks, const std::vector<StoreCase>& cases,
               const ThreadWorldOptions& options = world_options()) {
  run_gpu_thread_world(
      ranks,
      [&](World& world) {
        StoreRank rank(world, 3);
        for (const StoreCase& one : cases) {
          rank.begin(one);
          rank.forget(0x5A);
          rank.fetch(true, 0);
          rank.add();
          rank.expect_weights(0x5A);
          rank.expect_sums();
        }
        rank.store().finalize();
      },
      options);
}

TEST(GpuCopyStore, DeliversWhatTheSimulationDelivers) {
  for (const std::int32_t ranks : {2, 8}) {  // a pair; copies that are forwarded
    std::vector<StoreCase> cases;
    for (std::uint64_t seed = 0; seed < 2; ++seed) {
      cases.emplace_back(ranks, 2, 2, seed, 40, DType::float32);
      cases.emplace_back(ranks, 3, 1, seed, 37, DType::bfloat16);  // words of two bytes
      cases.emplace_back(ranks, 1, 3, seed, 64, DType::float16);
    }
    run_cases(ranks, cases);
  }
}

TEST(GpuCopyStore, ForwardsOnNodesWhoseMemoryIsMapped) {
  ThreadWorldOptions options = world_options();
  options.ranks_per_node = 4;
  std::vector<StoreCase> cases;
  cases.emplace_back(8, 2, 2, 1, 40, DType::float32);
  cases.emplace_back(8, 1, 3, 3, 70'000, DType::bfloat16);  // two chunks
  run_cases(8, cases, options);
}

TEST(GpuCopyStore, MovesExpertsOfManyChunks) {
  std::vector<StoreCase> cases;
  cases.emplace_back(3, 1, 2, 1, 160'000, DType::float32);  // five chunks
  cases.emplace_back(3, 2, 2, 4, 65'536, DType::bfloat16);  // one
  cases.emplace_back(3, 2, 1, 3, 300'001, DType::float16);
  cases.emplace_back(3, 1, 2, 5, 60'000, DType::float64);
  run_cases(3, cases);
}

TEST(GpuCopyStore, WorksAloneWithoutCopiesAndWithoutElements) {
  run_cases(1, {StoreCase(1, 3, 2, 0, 7, DType::float32)});
  run_cases(2,
            {StoreCase(2, 3, 0, 1, 7, DType::float32), StoreCase(2, 3, 2, 1, 0, DType::float32)});
}

/// A copy comes again only if its home's stamp has changed, or all are to come.
TEST(GpuCopyStore, CopiesThatLieThereDoNotComeAgain) {
  const StoreCase one(3, 2, 2, 3, 100, DType::float32);
  run_gpu_thread_world(
      3,
      [&](World& world) {
        StoreRank rank(world, 3);
        rank.begin(one);
        const auto fetched = [&](bool fresh, std::int64_t stamp, bool moved) {
          rank.forget(0x11);
          rank.settle();
          rank.fetch(fresh, stamp);
          rank.expect_weights(0x11, moved);
        };
        fetched(false, 7, true);
        fetched(false, 7, false);
        fetched(true, 7, true);
        fetched(false, 8, true);
        fetched(false, 8, false);
      },
      world_options());
}

TEST(GpuCopyStore, CopiesWithoutRowsDoNotMove) {
  const StoreCase one(2, 2, 2, 1, 100, DType::float32);
  run_gpu_thread_world(
      2,
      [&](World& world) {
        StoreRank rank(world, 2);
        rank.begin(one);
        HostTensor none(DType::int32, {2 * 4});
        const TensorView quotas = rank.arena().upload(none);
        rank.forget(0x22);
        rank.settle();
        rank.fetch(true, 0, reinterpret_cast<const std::int32_t*>(quotas.data));
        rank.expect_weights(0x22, false);
      },
      world_options());
}

TEST(GpuCopyStore, GraphsHoldCalls) {
  const StoreCase one(2, 2, 2, 1, 5'000, DType::bfloat16);
  run_gpu_thread_world(
      2,
      [&](World& world) {
        StoreRank rank(world, 2);
        rank.begin(one);
        const Captured graph(rank.arena().stream(), [&] {
          rank.fetch(true, -1);
          rank.add();
        });
        for (int replay = 0; replay < 3; ++replay) {
          rank.begin(one);  // the same memory
          rank.forget(0x33);
          rank.settle();
          graph.launch(world);
          rank.expect_weights(0x33);
          rank.expect_sums();
          world.barrier();
        }
      },
      world_options());
}

// What loses the device runs in processes of its own.

/// What two ranks say that make these calls.
std::vector<std::string> texts_of(const std::function<void(StoreRank&, std::int32_t rank)>& calls) {
  const StoreCase one(2, 2, 2, 1, 50, DType::float32);
  const auto make = [](std::shared_ptr<Bootstrap> bootstrap, int device) {
    return make_gpu_process_world(std::move(bootstrap), device);
  };
  const auto calls_of = [&](World& world) {
    StoreRank rank(world, 2);
    rank.begin(one);
    calls(rank, to_int(world.rank()));
    rank.arena().synchronize();
  };
  const auto ends = run_gpu_processes(2, make, calls_of, 1);
  std::vector<std::string> texts;
  for (const ProcessEnd& end : ends) texts.push_back(end.text);
  return texts;
}

TEST(GpuProcess, ranks_that_move_other_copies_are_told) {
  for (const std::string& text : texts_of([](StoreRank&store, std::int32_t rank) {
         rank == 0 ? store.fetch(true, 0) : store.add();
       })) {
    EXPECT_NE(text.find("ranks disagree in call 1"), std::string::npos) << text;
    EXPECT_NE(text.find("add_gradients"), std::string::npos) << text;
  }
}

TEST(GpuProcess, a_rank_that_moves_no_copies_is_named) {
  const auto texts = texts_of([](StoreRank& store, std::int32_t rank) {
    if (rank == 0) return store.fetch(true, 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  });
  EXPECT_NE(texts[0].find("fetch_weights"), std::string::npos) << texts[0];
  EXPECT_NE(texts[0].find("rank 1"), std::string::npos) << texts[0];
}

}  // namespace
}  // namespace waybill::test
