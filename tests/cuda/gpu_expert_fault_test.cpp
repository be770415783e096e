// What the others say of a rank that does not call.

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "cuda/gpu_expert_rounds.h"
#include "support/run_ranks.h"

namespace waybill {
namespace {

using test::DeviceArena;
using test::DeviceInput;
using test::ExpertCase;
using test::ExpertRig;
using test::to_size;

constexpr std::int64_t arena_bytes = std::int64_t{64} << 20;

/// Loses the device for the process, as the next one does: run them one by one.
void a_rank_never_calls(bool in_combine, std::int32_t ranks_per_node,
                        std::int64_t max_tokens = 60) {
  constexpr std::int32_t world_size = 4;
  EPConfig config = test::small_config(world_size, ranks_per_node);
  config.max_tokens = max_tokens;
  Random random(36);
  const ExpertCase sample = test::random_case(config, random, {.edges = false});
  const ExpertDispatch dispatched = sample.dispatch();
  auto bootstraps = make_thread_bootstraps(world_size, 2.0);
  const auto results = test::run_ranks(world_size, [&](std::int32_t rank) {
    World world =
        make_gpu_thread_world(std::move(bootstraps[rank]), rank % num_gpus(), ranks_per_node);
    DeviceArena arena(world, arena_bytes);
    const Stream stream{arena.stream()};
    ExpertRig rig(world, config, {}, most_recv_rows(config, {}), 4);
    const DeviceInput device(arena, sample, rank);
    const auto& rows = dispatched.recv_tokens[rank];
    const TensorView copy = arena.take(rows.dtype(), rows.shape());
    const TensorView sum = arena.take(config.token_dtype, sample.tokens[rank].shape());
    for (int call = 1; call <= 2; ++call) {
      if (call == 2 && !in_combine && rank == 1) {
        std::this_thread::sleep_for(std::chrono::seconds(4));
        return;
      }
      const auto tables = rig.dispatch(device.input, stream);
      if (call == 2 && in_combine && rank == 1) {
        std::this_thread::sleep_for(std::chrono::seconds(4));
        return;
      }
      arena.copy(copy.data, rig.window(), rows.size_bytes());
      rig.combine({copy, {}, {}, sum}, *tables, stream);
    }
    arena.synchronize();
  });
  const std::string wanted = in_combine ? "combine: rank " : "dispatch: rank ";
  const std::string signal =
      in_combine ? "for signal >= 4 from rank 1" : "for signal >= 3 from rank 1";
  int named = 0;
  for (const std::int32_t r : {0, 2, 3}) {
    const std::string& text = results[r].text;
    EXPECT_NE(text.find(signal), std::string::npos) << "rank " << r << ": " << text;
    if (text.find(wanted + std::to_string(r) + " waited 2") != std::string::npos) ++named;
  }
  EXPECT_EQ(named, 3) << results[0].text;
}

TEST(GpuExpertFault, a_rank_that_never_dispatches_is_named_by_all_others) {
  a_rank_never_calls(false, 4);
}
TEST(GpuExpertFault, a_rank_that_never_combines_is_named_by_all_others) {
  a_rank_never_calls(true, 4);
}
TEST(GpuExpertFault, on_nodes_a_rank_that_never_dispatches_is_named_by_all_others) {
  a_rank_never_calls(false, 2);
}
TEST(GpuExpertFault, on_nodes_a_rank_that_never_combines_is_named_by_all_others) {
  a_rank_never_calls(true, 2);
}

/// Their tokens are forwarded.
TEST(GpuExpertFault, on_nodes_a_rank_that_never_dispatches_many_is_named_by_all_others) {
  a_rank_never_calls(false, 2, 200);
}
TEST(GpuExpertFault, on_nodes_a_rank_that_never_combines_many_is_named_by_all_others) {
  a_rank_never_calls(true, 2, 200);
}

}  // namespace
}  // namespace waybill
