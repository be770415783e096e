#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/device_arena.h"
#include "cuda/ways.h"
#include "support/sequence_expected.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill::test {

/// Forward, back and gradient of one case on one rank, against what is expected.
inline void check_gpu_step(World& world, SequenceDispatcher& dispatcher, DeviceArena& arena,
                           const StepParts& step, const Expected& expected,
                           const std::string& name) {
  using Views = std::vector<ConstTensorView>;
  const std::size_t r = to_int(world.rank());
  const Stream stream{arena.stream()};
  arena.reset();
  const auto forward = dispatcher.plan_dispatch(step.forward, stream);
  const auto reverse = dispatcher.plan_dispatch(step.reverse, stream);
  const auto gradient = dispatcher.plan_kv_gradient(step.kv, stream);
  const Views inputs{arena.upload(expected.q[r]), arena.upload(expected.k[r]),
                     arena.upload(expected.v[r])};
  const auto outputs = dispatcher.dispatch(forward, inputs, stream);
  ASSERT_TRUE(same_bytes(arena.download(outputs[0]), expected.q_out[r])) << name << ": Q";
  ASSERT_TRUE(same_bytes(arena.download(outputs[1]), expected.k_out[r])) << name << ": K";
  ASSERT_TRUE(same_bytes(arena.download(outputs[2]), expected.v_out[r])) << name << ": V";
  const auto home = dispatcher.dispatch(reverse, Views{outputs[0]}, stream);
  ASSERT_TRUE(same_bytes(arena.download(home[0]), expected.q[r])) << name << ": Q back";
  const std::vector<TensorView> sums{arena.take(inputs[1].dtype, expected.k[r].shape()),
                                     arena.take(inputs[2].dtype, expected.v[r].shape())};
  const Views gradients{arena.upload(expected.k_out[r]), arena.upload(expected.v_out[r])};
  dispatcher.kv_gradient(gradient, gradients, sums, stream);
  ASSERT_TRUE(same_bytes(arena.download(sums[0]), expected.k_gradient[r])) << name << ": dK";
  ASSERT_TRUE(same_bytes(arena.download(sums[1]), expected.v_gradient[r])) << name << ": dV";
  for (const TensorView& sum : sums) ASSERT_TRUE(arena.guards_hold(sum)) << name;
  dispatcher.synchronize(stream);
}

/// Cases of one world with what must come out; made once, checked on every rank.
class CasesOnGpu {
 public:
  CasesOnGpu(std::int32_t world_size, int num_random, std::int64_t scale)
      : cases_(sequence_cases(world_size, num_random_cases(num_random), scale)) {
    for (const SequenceCase& sample : cases_) expected_.emplace_back(sample);
  }

  void check(World& world) const {
    DeviceArena arena(world);
    for (const Way& way : ways(world.world_size())) {
      SequenceDispatcher dispatcher(world, way.options);
      dispatcher.reserve(std::int64_t{64} << 20, {arena.stream()});
      for (std::size_t i = 0; i < cases_.size(); ++i) {
        const std::string name = concat(way.name, ", ", cases_[i].name, ", rank ", world.rank(),
                                        " of ", world.world_size());
        check_gpu_step(world, dispatcher, arena, step_parts(cases_[i]), expected_[i], name);
      }
      world.barrier();
      dispatcher.close();
    }
    world.barrier();
  }

 private:
  std::vector<SequenceCase> cases_;
  std::vector<Expected> expected_;
};

}  // namespace waybill::test
