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
#include "cuda/copy_store_rank.h"
#include "cuda/gpu_processes.h"
#include "moe/copied_experts.h"
#include "moe/gradient_sum.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/experts/copy_store.h"

namespace waybill::test {
namespace {

void run_cases(std::int32_t ranks, const std::vector<StoreCase>& cases,
               const ThreadWorldOptions& options = world_options()) {
  run_gpu_thread_world(
      ranks, [&](World& world) { run_copies(world, cases); }, options);
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
