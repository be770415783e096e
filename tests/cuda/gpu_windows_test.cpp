// What windows hold, and how they grow.

#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/device_arena.h"
#include "cuda/ways.h"
#include "schedule/sequence_plan.h"
#include "support/sequence_expected.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill {
namespace {

using test::DeviceArena;
using test::Expected;
using test::same_bytes;
using test::SequenceCase;
using test::to_size;
using test::Way;
using test::ways;
using Views = std::vector<ConstTensorView>;

TEST(GpuWindows, nothing_but_the_tensors_is_written) {
  const auto cases = test::sequence_cases(3, 12, 2);
  run_gpu_thread_world(
      3,
      [&](World& world) {
        DeviceArena arena(world);
        const Stream stream{arena.stream()};
        const std::size_t r = to_int(world.rank());
        for (const Way& way : ways(world.world_size())) {
          SequenceDispatcher dispatcher(world, way.options);
          dispatcher.reserve(std::int64_t{4} << 20, stream);
          for (const SequenceCase& sample : cases) {
            arena.reset();
            const Expected expected(sample);
            const auto plan = dispatcher.plan_dispatch(test::forward_parts(sample), stream);
            const Views inputs{arena.upload(expected.q[r]), arena.upload(expected.k[r]),
                               arena.upload(expected.v[r])};
            std::byte* const window = dispatcher.dispatch(plan, inputs, stream)[0].data;
            (void)dispatcher.dispatch(plan, inputs, stream);  // the other window
            dispatcher.synchronize(stream);
            world.barrier();
            HostTensor bytes(DType::uint8, {dispatcher.window_bytes()});
            std::ranges::fill(bytes.bytes(), std::byte{0xA5});
            arena.copy(window, bytes.bytes().data(), bytes.size_bytes());
            dispatcher.synchronize(stream);
            world.barrier();
            ASSERT_EQ(dispatcher.dispatch(plan, inputs, stream)[0].data, window);
            arena.read(bytes.bytes().data(), window, bytes.size_bytes());
            for (std::size_t t = 0; t < 3; ++t) {
              std::fill_n(bytes.bytes().begin() + plan.window_offsets()[t],
                          plan.window_rows()[t] * plan.tensors()[t].row_bytes(), std::byte{0xA5});
            }
            ASSERT_EQ(std::ranges::count(bytes.bytes(), std::byte{0xA5}), bytes.size_bytes())
                << way.name << ", " << sample.name;
            world.barrier();
          }
          dispatcher.close();
        }
      },
      test::world_options());
}

/// Rows that stay on their rank, and are many, go by copy engine beside the kernel; strided ones
/// too.
TEST(GpuWindows, long_local_rows_arrive_with_the_others) {
  constexpr std::int32_t world_size = 4;
  const std::vector<std::vector<std::int64_t>> shards(world_size, {700, 300, 900});
  std::vector<std::int32_t> dst;
  for (std::int32_t w = 0; w < world_size; ++w) dst.insert(dst.end(), {w, (w + 1) % 4, w});
  SequenceCase sample{"long local rows", compute_qkv_routing(test::plain_plan(
                                             world_size, shards, dst, KvLayout::per_rank))};
  sample.q = {DType::bfloat16, 4096};
  sample.k = {DType::bfloat16, 512};
  sample.v = {DType::bfloat16, 512};
  const Expected expected(sample);
  run_gpu_thread_world(
      world_size,
      [&](World& world) {
        DeviceArena arena(world);
        const std::size_t r = to_int(world.rank());
        const Stream stream{arena.stream()};
        for (const Way& way : ways(world.world_size())) {
          if (way.options.plan.chunk_bytes < 8192) continue;
          SequenceDispatcher dispatcher(world, way.options);
          dispatcher.reserve(std::int64_t{64} << 20, stream);
          arena.reset();
          const auto plan = dispatcher.plan_dispatch(test::forward_parts(sample), stream);
          ASSERT_FALSE(detail::compiled_plan(plan).local_segments.empty());
          const TensorView wide = arena.take(DType::bfloat16, {1900, 4096 + 8});
          ConstTensorView strided = wide;
          strided.shape = {1900, 4096};
          for (std::int64_t row = 0; row < 1900; ++row) {
            arena.copy(wide.data + row * (4096 + 8) * 2,
                       expected.q[r].bytes().data() + row * 4096 * 2, 4096 * 2);
          }
          const Views inputs{arena.upload(expected.q[r]), arena.upload(expected.k[r]),
                             arena.upload(expected.v[r])};
          for (const Views& from : {inputs, Views{strided, inputs[1], inputs[2]}, inputs}) {
            const auto outputs = dispatcher.dispatch(plan, from, stream);
            ASSERT_TRUE(same_bytes(arena.download(outputs[0]), expected.q_out[r])) << way.name;
            ASSERT_TRUE(same_bytes(arena.download(outputs[1]), expected.k_out[r])) << way.name;
            ASSERT_TRUE(same_bytes(arena.download(outputs[2]), expected.v_out[r])) << way.name;
          }
          const auto home = dispatcher.plan_dispatch(test::reverse_parts(sample), stream);
          const auto back =
              dispatcher.dispatch(home, Views{arena.upload(expected.q_out[r])}, stream);
          ASSERT_TRUE(same_bytes(arena.download(back[0]), expected.q[r])) << way.name << ": back";
          dispatcher.close();
        }
      },
      test::world_options());
}

/// Device memory may be freed only where all ranks wait: the windows grow twice while calls follow
/// each other without a host wait.
TEST(GpuWindows, windows_grow_between_calls) {
  auto small = test::sequence_cases(4, 1, 5).back();
  auto large = small;
  large.name = "large";
  large.q.hidden *= 1024;
  auto larger = small;
  larger.q.hidden *= 4096;
  const std::vector<SequenceCase> cases{small, large, larger};
  std::vector<Expected> expected;
  for (const SequenceCase& sample : cases) expected.emplace_back(sample);
  run_gpu_thread_world(
      4,
      [&](World& world) {
        DeviceArena arena(world);
        const std::size_t r = to_int(world.rank());
        const Stream stream{arena.stream()};
        SequenceDispatcher dispatcher(world, {.num_sms = 4});
        for (std::size_t i = 0; i < cases.size(); ++i) {
          const auto plan = dispatcher.plan_dispatch(test::forward_parts(cases[i]), stream);
          const Views inputs{arena.upload(expected[i].q[r]), arena.upload(expected[i].k[r]),
                             arena.upload(expected[i].v[r])};
          std::vector<TensorView> outputs;
          for (int call = 0; call < 20; ++call) {
            outputs = dispatcher.dispatch(plan, inputs, stream);
          }
          ASSERT_TRUE(same_bytes(arena.download(outputs[0]), expected[i].q_out[r])) << i;
        }
        dispatcher.close();
      },
      test::world_options());
}

}  // namespace
}  // namespace waybill
