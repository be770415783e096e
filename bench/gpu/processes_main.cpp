// Times SequenceDispatcher where ranks are processes, against what the links give: to be started by
// a launcher, one process a GPU (scripts/start_ranks.sh where there is none).

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string_view>

#include "cuda/self_test/self_test.h"
#include "measure.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/transport/bootstrap.h"
#include "workload.h"

namespace waybill::bench {
namespace {

constexpr std::int64_t mib = std::int64_t{1} << 20;

/// One rank of the job; rank 0 prints.
class Job {
 public:
  Job(const LaunchEnvironment& environment, bool nvshmem, std::int32_t ranks_per_node)
      : bootstrap_(make_environment_bootstrap(environment)) {
    const int gpus = num_gpus();
    if (gpus < environment.world_size) {
      throw Unsupported(concat("bench: ", environment.world_size, " ranks, expected at most ", gpus,
                               ", the GPUs that each process sees"));
    }
    const int device = environment.local_rank;
    prints_ = environment.rank == 0;
    // Rank 0 asks the links alone, before anybody else works on them.
    if (prints_) link_gb_s_ = link_gb_s(environment.world_size, LinkWay::push_bulk, 16, 64 * mib);
    bootstrap_->barrier("link probe");
    if (cudaSetDevice(device) != cudaSuccess) throw CudaError(concat("no device ", device));
    world_ = std::make_unique<World>(
        nvshmem ? make_nvshmem_world(bootstrap_, device, ranks_per_node)
                : make_gpu_process_world(bootstrap_, device, ranks_per_node));
    if (!prints_) return;
    std::printf("%d processes on as many GPUs, nodes of %d, over %s; link %.0f GB/s at 16 SMs\n",
                environment.world_size, world_->topology().ranks_per_node,
                nvshmem ? "NVSHMEM" : "CUDA IPC", link_gb_s_);
    std::printf("%-34s %4s %9s %9s %9s %9s %7s\n", "workload", "SMs", "wire MiB", "us", "graph us",
                "GB/s", "of link");
  }

  [[nodiscard]] bool has_nodes() const { return world_->topology().num_nodes() > 1; }

  void row(const Workload& workload, int num_sms, bool graph) {
    MeasureOptions options;
    options.dispatcher.num_sms = num_sms;
    options.graph = graph;
    const CallTimes mine = measure_rank(*world_, workload, options);
    const CallTimes times = slowest(all_gather_value(*bootstrap_, mine, "times"));
    if (!prints_) return;
    const auto bytes = static_cast<double>(wire_bytes(workload).most());
    const double rate = bytes / times.median_us / 1e3;
    std::printf("%-34s %4d %9.1f %9.1f %9.1f %9.1f %6.1f%%\n", workload.name.c_str(), num_sms,
                bytes / mib, times.median_us, times.graph_us, rate,
                link_gb_s_ > 0 ? 100 * rate / link_gb_s_ : 0);
    std::fflush(stdout);
  }

 private:
  std::shared_ptr<Bootstrap> bootstrap_;
  std::unique_ptr<World> world_;
  bool prints_ = false;
  double link_gb_s_ = 0;
};

void run(bool nvshmem, std::int32_t ranks_per_node) {
  const LaunchEnvironment environment = read_launch_environment();
  Job job(environment, nvshmem, ranks_per_node);
  const std::int32_t ranks = environment.world_size;
  constexpr std::int64_t row = 8192;
  Workload empty = uniform(ranks, 0, row);
  empty.name = "empty plan";
  job.row(empty, 16, true);
  job.row(uniform(ranks, mib, row), 16, true);
  for (const int sms : {8, 16, job.has_nodes() ? 32 : 0})  // copy engines serve one node
    job.row(uniform(ranks, 64 * mib, row), sms, false);
  job.row(documents(ranks, "wlbllm", SequenceOperation::dispatch), 16, false);
  job.row(documents(ranks, "wlbllm", SequenceOperation::kv_gradient), 24, false);
}

}  // namespace
}  // namespace waybill::bench

/// waybill_bench_gpu_processes [--nvshmem] [RANKS_PER_NODE]: logical nodes; one unless told.
int main(int argc, char** argv) {
  const bool nvshmem = argc > 1 && std::string_view(argv[1]) == "--nvshmem";
  const int rest = nvshmem ? 2 : 1;
  char* end = nullptr;
  const long ranks_per_node = argc > rest ? std::strtol(argv[rest], &end, 10) : 0;
  if (argc > rest + 1 || (end != nullptr && *end != '\0') || ranks_per_node < 0) {
    std::fprintf(stderr, "usage: waybill_bench_gpu_processes [--nvshmem] [RANKS_PER_NODE]\n");
    return 2;
  }
  try {
    waybill::bench::run(nvshmem, static_cast<std::int32_t>(ranks_per_node));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
