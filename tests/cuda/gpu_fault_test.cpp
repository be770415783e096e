// Each of these loses the device for the process: run them one by one (ctest and
// scripts/test_gpu.sh do).

#include <gtest/gtest.h>

#include "cuda/captured.h"
#include "cuda/stalled_rank.h"
#include "support/run_ranks.h"
#include "support/sequence_expected.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill {
namespace {

using test::DeviceArena;
using test::Expected;
using test::to_size;
using Views = std::vector<ConstTensorView>;

void a_rank_never_calls(int num_sms) {
  const auto sample = test::sequence_cases(4, 1).back();
  const auto results = test::stall_at_the_third_call(sample, num_sms, 0);
  int named = 0;
  for (const std::int32_t r : {0, 2, 3}) {
    const std::string& text = results[r].text;
    // A rank that shares its device may lose it to another one's report, and then says whose.
    EXPECT_NE(text.find("for signal >= 3 from rank 1"), std::string::npos)
        << "rank " << r << ": " << text;
    EXPECT_NE(text.find("last seen 2"), std::string::npos) << text;
    if (text.find("dispatch: rank " + std::to_string(r) + " waited 2") != std::string::npos) {
      ++named;
    }
  }
  EXPECT_EQ(named, 3);
}

TEST(GpuFault, a_rank_that_never_calls_is_named_by_all_others) { a_rank_never_calls(4); }
TEST(GpuFault, the_same_with_copy_engines) { a_rank_never_calls(0); }

TEST(GpuFault, an_odd_number_of_captured_calls_over_nodes_is_found) {
  const auto sample = test::sequence_cases(2, 1).back();
  const Expected expected(sample);
  auto bootstraps = make_thread_bootstraps(2, 5.0);
  const auto results = test::run_ranks(2, [&](std::int32_t rank) {
    const std::size_t r = rank;
    World world = make_gpu_thread_world(std::move(bootstraps[r]), rank % num_gpus(), 1);
    DeviceArena arena(world, std::int64_t{16} << 20);
    const Stream stream{arena.stream()};
    SequenceDispatcher dispatcher(world, {.num_sms = 4});
    dispatcher.reserve(std::int64_t{1} << 20, stream);
    const auto plan = dispatcher.plan_dispatch(test::forward_parts(sample), stream);
    const Views inputs{arena.upload(expected.q[r]), arena.upload(expected.k[r]),
                       arena.upload(expected.v[r])};
    const test::Captured graph(arena.stream(),
                               [&] { (void)dispatcher.dispatch(plan, inputs, stream); });
    graph.launch(world);
    graph.launch(world);
    dispatcher.synchronize(stream);
  });
  EXPECT_NE(results[0].text.find("even number of calls"), std::string::npos) << results[0].text;
}

}  // namespace
}  // namespace waybill
