#pragma once

#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "cuda/device_arena.h"
#include "support/run_processes.h"
#include "support/sequence_expected.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/runtime/sequence_dispatcher.h"
#include "waybill/transport/bootstrap.h"

namespace waybill::test {

using MakeGpuWorld = std::function<World(std::shared_ptr<Bootstrap>, int device)>;

/// Runs body(world) in one child process a rank, rank r on GPU r modulo their number. The calling
/// process must not have used CUDA: its children could not. Deadlines begin when all have a device,
/// which takes seconds where many start at once.
inline std::vector<ProcessEnd> run_gpu_processes(std::int32_t world_size, const MakeGpuWorld& make,
                                                 const std::function<void(World&)>& body,
                                                 double timeout_s = world_options().timeout_s) {
  const MeetingFolder ready;
  const MeetingFolder folder;
  return run_processes(world_size, [&](std::int32_t rank) {
    const int gpus = num_gpus();
    if (gpus == 0) throw Unsupported("there is no GPU");
    cuda_ok(cudaSetDevice(rank % gpus));
    cuda_ok(cudaFree(nullptr));
    make_file_bootstrap(rank, world_size, ready.path(), 60)->barrier("having a device");
    World world =
        make(make_file_bootstrap(rank, world_size, folder.path(), timeout_s), rank % gpus);
    body(world);
  });
}

/// The calling process stays without CUDA.
inline int num_gpus_seen_by_a_child() {
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) _exit(num_gpus());
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WEXITSTATUS(status);
}

enum class Death { before_the_third_call, during_some_call };

/// Calls without end, until rank 1 is killed. Ends with Timeout on the others.
inline std::vector<ProcessEnd> run_until_rank_1_dies(std::int32_t world_size,
                                                     const MakeGpuWorld& make, Death death,
                                                     double timeout_s = 2) {
  const SequenceCase sample = sequence_cases(world_size, 0).at(3);  // all ranks send to all
  const Expected expected(sample);
  const auto body = [&](World& world) {
    const std::size_t r = to_int(world.rank());
    DeviceArena arena(world, std::int64_t{16} << 20);
    const Stream stream{arena.stream()};
    SequenceDispatcher dispatcher(world, {.num_sms = 4});
    dispatcher.reserve(std::int64_t{1} << 20, stream);
    const auto plan = dispatcher.plan_dispatch(forward_parts(sample), stream);
    const std::vector<ConstTensorView> inputs{
        arena.upload(expected.q[r]), arena.upload(expected.k[r]), arena.upload(expected.v[r])};
    const bool victim = world.rank() == Rank{1};
    std::jthread killer;
    for (int call = 1;; ++call) {
      if (victim && call == 3 && death == Death::before_the_third_call) (void)std::raise(SIGKILL);
      if (victim && call == 3) {
        killer = std::jthread([] {
          std::this_thread::sleep_for(std::chrono::milliseconds(30));
          (void)::kill(getpid(), SIGKILL);
        });
      }
      (void)dispatcher.dispatch(plan, inputs, stream);
      dispatcher.synchronize(stream);
    }
  };
  return run_gpu_processes(world_size, make, body, timeout_s);
}

}  // namespace waybill::test
