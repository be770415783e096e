// Gradient rows with one copy that stay on their rank go a short way, beside the sums.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "core/to_size.h"
#include "cuda/captured.h"
#include "cuda/device_arena.h"
#include "cuda/ways.h"
#include "schedule/sequence_plan.h"
#include "support/expect_error.h"
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
using Views = std::vector<ConstTensorView>;

/// Each rank keeps two documents together and one apart, sends one, and shares one.
SequenceCase long_documents(std::int32_t world_size, DType dtype, std::int64_t hidden,
                            std::int64_t scale) {
  std::vector<std::vector<std::int64_t>> shards;
  std::vector<std::int32_t> to;
  for (std::int32_t r = 0; r < world_size; ++r) {
    shards.push_back({7 * scale, 5 * scale, 40, 3, 9 * scale, 30, 20});
    to.insert(to.end(), {r, r, (r + 1) % world_size, r, r, r, (r + 1) % world_size});
  }
  QkvPlan plan = test::plain_plan(world_size, shards, to, KvLayout::per_rank);
  plan.doc_shard_offsets = {0};
  for (std::int32_t r = 0; r < world_size; ++r) {
    for (const std::int32_t size : {1, 1, 1, 1, 1, 2}) {  // the last one's K goes to two ranks
      plan.doc_shard_offsets.push_back(plan.doc_shard_offsets.back() + size);
    }
  }
  SequenceCase sample{concat(dtype, ", hidden ", hidden), compute_qkv_routing(plan)};
  sample.k = {dtype, hidden};
  sample.v = {dtype, hidden};
  sample.q = {DType::uint8, 16};
  return sample;
}

/// Sums whose rows have 8 elements between them, which stay as they are.
void check_sums_with_pitch(DeviceArena& arena, SequenceDispatcher& dispatcher,
                           const PlanHandle& plan, const Views& from,
                           const std::vector<const HostTensor*>& expected) {
  std::vector<TensorView> wide;
  std::vector<TensorView> sums;
  std::vector<HostTensor> marks;
  for (const HostTensor* sum : expected) {
    const std::int64_t rows = sum->shape()[0];
    HostTensor marked(sum->dtype(), {rows, sum->shape()[1] + 8});
    for (std::byte& byte : marked.bytes()) byte = std::byte{0x55};
    wide.push_back(arena.upload(marked));
    sums.push_back(wide.back());
    sums.back().shape[1] = sum->shape()[1];
    const std::int64_t row_bytes = sum->size_bytes() / std::max<std::int64_t>(rows, 1);
    const std::int64_t pitch_bytes = marked.size_bytes() / std::max<std::int64_t>(rows, 1);
    for (std::int64_t row = 0; row < rows; ++row) {
      std::memcpy(marked.bytes().data() + row * pitch_bytes, sum->bytes().data() + row * row_bytes,
                  to_size(row_bytes));
    }
    marks.push_back(std::move(marked));
  }
  dispatcher.kv_gradient(plan, from, sums, {arena.stream()});
  for (std::size_t t = 0; t < sums.size(); ++t) {
    ASSERT_TRUE(same_bytes(arena.download(wide[t]), marks[t])) << "tensor " << t;
  }
}

void check_sums(DeviceArena& arena, SequenceDispatcher& dispatcher, const SequenceCase& sample,
                const Expected& expected, std::size_t r, DType to) {
  const Stream stream{arena.stream()};
  const auto dk = test::simulated_gradient(sample.routing, expected.k_out, to);
  const auto dv = test::simulated_gradient(sample.routing, expected.v_out, to);
  arena.reset();
  const auto plan = dispatcher.plan_kv_gradient(test::kv_parts(sample), stream);
  ASSERT_EQ(detail::compiled_plan(plan).local_segments.size(), 4U);
  const auto places = dispatcher.gradient_inputs(plan, stream);
  arena.copy(places[0].data, expected.k_out[r].bytes().data(), expected.k_out[r].size_bytes());
  const std::int64_t pitch = sample.k.hidden + 8;
  const TensorView wide = arena.take(sample.k.dtype, {expected.v_out[r].shape()[0], pitch});
  const std::int64_t row_bytes = sample.v.row_bytes();
  for (std::int64_t row = 0; row < wide.shape[0]; ++row) {
    arena.copy(wide.data + row * pitch * dtype_bytes(wide.dtype),
               expected.v_out[r].bytes().data() + row * row_bytes, row_bytes);
  }
  ConstTensorView strided = wide;
  strided.shape[1] = sample.k.hidden;
  const Views plain{arena.upload(expected.k_out[r]), arena.upload(expected.v_out[r])};
  for (const Views& from : {Views{places[0], plain[1]}, Views{plain[0], strided}, plain}) {
    const std::vector<TensorView> sums{arena.take(to, expected.k[r].shape()),
                                       arena.take(to, expected.v[r].shape())};
    dispatcher.kv_gradient(plan, from, sums, stream);
    ASSERT_TRUE(same_bytes(arena.download(sums[0]), dk[r])) << sample.name << " to " << to;
    ASSERT_TRUE(same_bytes(arena.download(sums[1]), dv[r])) << sample.name << " to " << to;
    for (const TensorView& sum : sums) ASSERT_TRUE(arena.guards_hold(sum));
  }
  check_sums_with_pitch(arena, dispatcher, plan, plain, {&dk[r], &dv[r]});
}

/// Every dtype keeps its bits, or is widened.
void check_dtypes(std::int32_t world_size) {
  using enum DType;
  struct Case {
    SequenceCase sample;
    DType to;
    Expected expected;
  };
  std::vector<Case> cases;
  for (const auto& [from, hidden, to] : {std::tuple{bfloat16, 512, bfloat16},
                                         {bfloat16, 512, float32},
                                         {float16, 333, float32},
                                         {float32, 256, float32},
                                         {float64, 129, float64}}) {
    const SequenceCase sample = long_documents(world_size, from, hidden, 300);
    cases.push_back({sample, to, Expected(sample)});
  }
  run_gpu_thread_world(
      world_size,
      [&](World& world) {
        DeviceArena arena(world);
        for (const int num_sms : {8, 0}) {
          SequenceDispatcher dispatcher(world, {.num_sms = num_sms});
          dispatcher.reserve(std::int64_t{32} << 20, {arena.stream()});
          for (const Case& sample : cases) {
            check_sums(arena, dispatcher, sample.sample, sample.expected,
                       to_size(to_int(world.rank())), sample.to);
          }
          world.barrier();
          dispatcher.close();
        }
      },
      test::world_options());
}

TEST(GpuLocalGradient, two_ranks_equal_the_simulation) { check_dtypes(2); }
TEST(GpuLocalGradient, four_ranks_equal_the_simulation) { check_dtypes(4); }

TEST(GpuLocalGradient, a_graph_replays_it_and_keeps_its_plan) {
  constexpr std::int32_t world_size = 2;
  const SequenceCase sample = long_documents(world_size, DType::bfloat16, 512, 300);
  const SequenceCase small = long_documents(world_size, DType::bfloat16, 512, 1);
  const Expected first(sample, 1);
  const Expected second(sample, 20);
  run_gpu_thread_world(
      world_size,
      [&](World& world) {
        DeviceArena arena(world);
        const Stream stream{arena.stream()};
        const std::size_t r = to_int(world.rank());
        for (const bool apart : {true, false}) {
          SequenceDispatcher dispatcher(world, {.num_sms = 8, .local_by_copy_engine = apart});
          dispatcher.reserve(std::int64_t{32} << 20, stream);
          arena.reset();
          PlanHandle plan = dispatcher.plan_kv_gradient(test::kv_parts(sample), stream);
          ASSERT_EQ(detail::compiled_plan(plan).local_segments.empty(), !apart);
          const Views from{arena.upload(first.k_out[r]), arena.upload(first.v_out[r])};
          const std::vector<TensorView> sums{arena.take(DType::bfloat16, first.k[r].shape()),
                                             arena.take(DType::bfloat16, first.v[r].shape())};
          const test::Captured graph(arena.stream(), [&] {
            for (int call = 0; call < 2; ++call) dispatcher.kv_gradient(plan, from, sums, stream);
          });
          for (const Expected* expected : {&first, &second}) {
            world.barrier();
            arena.copy(const_cast<std::byte*>(from[0].data), expected->k_out[r].bytes().data(),
                       expected->k_out[r].size_bytes());
            arena.copy(const_cast<std::byte*>(from[1].data), expected->v_out[r].bytes().data(),
                       expected->v_out[r].size_bytes());
            graph.launch(world);
            ASSERT_TRUE(same_bytes(arena.download(sums[0]), expected->k_gradient[r]));
            ASSERT_TRUE(same_bytes(arena.download(sums[1]), expected->v_gradient[r]));
          }
          const std::string why = apart ? "a graph holds copies" : "a graph holds a gradient";
          EXPECT_TRUE(test::rejects(
              [&] { dispatcher.replace_plan(plan, test::kv_parts(small), stream); }, {why}));
          if (!apart) dispatcher.replace_plan(plan, test::kv_parts(sample), stream);
          dispatcher.synchronize(stream);
          world.barrier();
          dispatcher.close();
        }
      },
      test::world_options());
}

}  // namespace
}  // namespace waybill
