// The kernel that plans copies of experts, against the planner of the CPU, bit for bit.

#include <gtest/gtest.h>

#include <climits>
#include <memory>
#include <vector>

#include "cuda/device_arena.h"
#include "cuda/planner/even_experts.h"
#include "support/even_experts_cases.h"
#include "support/expect_error.h"

namespace waybill {
namespace {

using cuda::GpuEvenExperts;
using test::cuda_ok;
using test::EvenExpertsCase;

class GpuEvenExpertsTest : public ::testing::Test {
 protected:
  void SetUp() override { cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  void TearDown() override { cuda_ok(cudaStreamDestroy(stream_)); }

  /// int32 on the device.
  template <class Number>
  [[nodiscard]] std::shared_ptr<std::int32_t> upload(const std::vector<Number>& numbers) const {
    const std::vector<std::int32_t> values(numbers.begin(), numbers.end());
    void* memory = nullptr;
    cuda_ok(cudaMalloc(&memory, std::max<std::size_t>(values.size(), 1) * 4));
    std::shared_ptr<std::int32_t> owner(static_cast<std::int32_t*>(memory),
                                        [](std::int32_t* at) { (void)cudaFree(at); });
    cuda_ok(
        cudaMemcpyAsync(memory, values.data(), values.size() * 4, cudaMemcpyHostToDevice, stream_));
    cuda_ok(cudaStreamSynchronize(stream_));
    return owner;
  }

  static void expect_equal(const EvenExperts& got, const EvenExperts& expected) {
    EXPECT_EQ(got.num_ranks, expected.num_ranks);
    EXPECT_EQ(got.slots_per_rank, expected.slots_per_rank);
    EXPECT_EQ(got.slots, expected.slots);
    EXPECT_EQ(got.quotas, expected.quotas);
    EXPECT_EQ(got.local_rows, expected.local_rows);
    EXPECT_EQ(got.first_row, expected.first_row);
    EXPECT_EQ(got.weights_out, expected.weights_out);
    EXPECT_EQ(got.weights_in, expected.weights_in);
    EXPECT_EQ(got.max_rows, expected.max_rows);
    EXPECT_EQ(got.mean_rows, expected.mean_rows);
    EXPECT_EQ(got.bound, expected.bound);
  }

  void expect_as_planner(const EvenExpertsCase& one, std::int32_t pass_warps) const {
    SCOPED_TRACE(one.name);
    GpuEvenExperts planner(one.num_ranks, one.num_experts, one.with_present(), stream_);
    planner.set_pass_warps(pass_warps);
    const auto rows = upload(one.rows);
    planner.plan(rows.get(), stream_);
    expect_equal(planner.read(stream_),
                 even_experts(one.rows, one.num_ranks, one.num_experts, one.with_present()));
  }

  cudaStream_t stream_ = nullptr;
};

// Each case takes memory of a device and gives it back, which takes long: there are few.
TEST_F(GpuEvenExpertsTest, PlansAsThePlanner) {
  const auto cases = test::some_even_experts_cases(test::num_random_cases(9), 22);
  for (const EvenExpertsCase& one : cases) {
    expect_as_planner(one, 4);
    if (HasFailure()) return;
  }
}

TEST_F(GpuEvenExpertsTest, PlansAsThePlannerOnNodes) {
  for (EvenExpertsCase& one : test::some_even_experts_cases(3, 29)) {
    one.options.num_nodes = one.num_ranks % 8 == 0 ? 8 : one.num_ranks % 3 == 0 ? 3 : 1;
    expect_as_planner(one, 4);
    if (HasFailure()) return;
  }
  EXPECT_THROW(GpuEvenExperts(64, 64, {.num_nodes = 64}, stream_), Unsupported);
}

TEST_F(GpuEvenExpertsTest, TheLowestTryWinsWithAnyNumberOfWarps) {
  for (const EvenExpertsCase& one : test::some_even_experts_cases(3, 41)) {
    for (const std::int32_t warps : {1, 3, 16}) expect_as_planner(one, warps);
    if (HasFailure()) return;
  }
}

TEST_F(GpuEvenExpertsTest, APlannerUsedAgainPlansAsANewOne) {
  Random random(11);
  const EvenExpertsOptions options{.spare_experts = 2, .limit = 1.01};
  const GpuEvenExperts planner(64, 256, options, stream_);
  for (int call = 0; call < 20; ++call) {
    const auto rows =
        test::rows_of(test::weights_of("lognormal", 256, 4, random), 64, 100 + 40 * call, random);
    const auto on_device = upload(rows);
    planner.plan(on_device.get(), stream_);
    expect_equal(planner.read(stream_), even_experts(rows, 64, 256, options));
    if (HasFailure()) return;
  }
}

TEST_F(GpuEvenExpertsTest, ThePlanBeforeIsPresent) {
  Random random(13);
  EvenExpertsOptions options{.spare_experts = 2};
  const GpuEvenExperts first(16, 64, options, stream_), second(16, 64, options, stream_);
  const auto weights = test::weights_of("lognormal", 64, 4, random);
  const auto before = test::rows_of(weights, 16, 500, random);
  const auto rows = test::rows_of(weights, 16, 500, random);
  const auto before_on_device = upload(before), on_device = upload(rows);
  first.plan(before_on_device.get(), stream_);
  second.plan(on_device.get(), first.tables().slots + 4, first.slots_per_rank(), stream_);
  const EvenExperts plan = even_experts(before, 16, 64, options);
  std::vector<std::int32_t> present;
  for (std::int32_t r = 0; r < 16; ++r)
    present.insert(present.end(), plan.slots.begin() + r * 6 + 4, plan.slots.begin() + r * 6 + 6);
  options.present = present;
  expect_equal(second.read(stream_), even_experts(rows, 16, 64, options));
}

TEST_F(GpuEvenExpertsTest, ACaptureIsReplayedWithOtherRows) {
  Random random(17);
  const EvenExpertsOptions options{.spare_experts = 2};
  const GpuEvenExperts planner(8, 64, options, stream_);
  const auto weights = test::weights_of("zipf", 64, 8, random);
  const auto first = test::rows_of(weights, 8, 300, random);
  const auto other = test::rows_of(weights, 8, 900, random);
  const auto rows = upload(first), from = upload(other);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  cuda_ok(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  planner.plan(rows.get(), stream_);
  cuda_ok(cudaStreamEndCapture(stream_, &graph));
  cuda_ok(cudaGraphInstantiate(&replay, graph, 0));
  cuda_ok(cudaGraphLaunch(replay, stream_));
  expect_equal(planner.read(stream_), even_experts(first, 8, 64, options));
  cuda_ok(cudaMemcpyAsync(rows.get(), from.get(), 8 * 64 * 4, cudaMemcpyDeviceToDevice, stream_));
  cuda_ok(cudaGraphLaunch(replay, stream_));
  expect_equal(planner.read(stream_), even_experts(other, 8, 64, options));
  cuda_ok(cudaGraphExecDestroy(replay));
  cuda_ok(cudaGraphDestroy(graph));
}

TEST_F(GpuEvenExpertsTest, NamesWhatIsWrong) {
  const GpuEvenExperts planner(2, 4, {.spare_experts = 2}, stream_);
  const auto refused = [&](const std::vector<std::int64_t>& rows,
                           const std::vector<std::int32_t>& present, std::string_view text) {
    const auto on_device = upload(rows), lying = upload(present);
    if (present.empty()) {
      planner.plan(on_device.get(), stream_);
    } else {
      planner.plan(on_device.get(), lying.get(), 2, stream_);
    }
    return test::rejects([&] { (void)planner.read(stream_); }, {"GpuEvenExperts", text});
  };
  EXPECT_TRUE(refused({1, 2, 3, 4, 5, 6, 7, -1}, {}, "rows has a negative number"));
  EXPECT_TRUE(refused({INT_MAX, 0, 0, 0, 0, 0, 0, 0}, {}, "2^31 - 1 or more"));
  EXPECT_TRUE(refused({INT_MAX - 1, 0, 0, 0, 0, 0, 1, 0}, {}, "2^31 - 1 or more"));
  EXPECT_TRUE(refused({1, 2, 3, 4, 5, 6, 7, 8}, {2, 1, -1, -1}, "a home expert of its rank"));
  EXPECT_TRUE(refused({1, 2, 3, 4, 5, 6, 7, 8}, {3, 3, -1, -1}, "one twice"));
  // A refused call leaves the planner usable.
  const auto rows = upload(std::vector<std::int64_t>{9, 0, 0, 0, 1, 0, 0, 0});
  planner.plan(rows.get(), stream_);
  expect_equal(
      planner.read(stream_),
      even_experts(std::vector<std::int64_t>{9, 0, 0, 0, 1, 0, 0, 0}, 2, 4, {.spare_experts = 2}));
  EXPECT_THROW(GpuEvenExperts(3, 4, {}, stream_), InvalidArgument);
  EXPECT_THROW(GpuEvenExperts(256, 256, {}, stream_), Unsupported);
  EXPECT_THROW(GpuEvenExperts(1, 1 << 20, {}, stream_), Unsupported);
}

}  // namespace
}  // namespace waybill
