#pragma once

#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/device_arena.h"
#include "support/run_ranks.h"
#include "support/sequence_expected.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill::test {

inline constexpr double stall_timeout_s = 2.0;

/// What four ranks report when rank 1 does not make the third call of a dispatch.
inline std::vector<RankResult> stall_at_the_third_call(const SequenceCase& sample, int num_sms,
                                                       std::int32_t ranks_per_node) {
  constexpr std::int32_t world_size = 4;
  const Expected expected(sample);
  auto bootstraps = make_thread_bootstraps(world_size, stall_timeout_s);
  return run_ranks(world_size, [&](std::int32_t rank) {
    const std::size_t r = rank;
    World world =
        make_gpu_thread_world(std::move(bootstraps[r]), rank % num_gpus(), ranks_per_node);
    DeviceArena arena(world, std::int64_t{16} << 20);
    const Stream stream{arena.stream()};
    SequenceDispatcher dispatcher(world, {.num_sms = num_sms});
    dispatcher.reserve(std::int64_t{1} << 20, stream);
    const auto plan = dispatcher.plan_dispatch(forward_parts(sample), stream);
    const std::vector<ConstTensorView> inputs{
        arena.upload(expected.q[r]), arena.upload(expected.k[r]), arena.upload(expected.v[r])};
    for (int call = 1; call <= 3; ++call) {
      if (call == 3 && rank == 1) {
        std::this_thread::sleep_for(std::chrono::seconds(4));
        return;
      }
      (void)dispatcher.dispatch(plan, inputs, stream);
    }
    dispatcher.synchronize(stream);
  });
}

}  // namespace waybill::test
