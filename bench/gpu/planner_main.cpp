// Time of the kernel that plans copies of experts, on one GPU.
//
//   waybill_bench_gpu_planner [--launches 1000]
//
// A line per case: microseconds between two events around a launch (least and median), of a launch
// when many are queued, and clocks of the kernel's parts. Each plan is compared with the CPU's; the
// exit code is 1 where one differs.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/planner/even_experts.h"
#include "cuda/rank/gpu_rank.h"
#include "support/even_experts_cases.h"

namespace waybill {
namespace {

using cuda::cuda_check;
using cuda::GpuEvenExperts;

struct Times {
  double least_us = 0, median_us = 0, queued_us = 0;
};

template <class Launch>
Times time_launches(int launches, cudaStream_t stream, const Launch& launch) {
  std::vector<cudaEvent_t> events(2 * launches);
  for (cudaEvent_t& event : events) cuda_check(cudaEventCreate(&event), "making events");
  for (int i = 0; i < 20; ++i) launch();
  for (int i = 0; i < launches; ++i) {
    cuda_check(cudaEventRecord(events[2 * i], stream), "recording");
    launch();
    cuda_check(cudaEventRecord(events[2 * i + 1], stream), "recording");
  }
  cuda_check(cudaStreamSynchronize(stream), "measuring");
  std::vector<float> ms(launches);
  for (int i = 0; i < launches; ++i)
    cuda_check(cudaEventElapsedTime(&ms[i], events[2 * i], events[2 * i + 1]), "measuring");
  std::ranges::sort(ms);
  cuda_check(cudaEventRecord(events[0], stream), "recording");
  for (int i = 0; i < launches; ++i) launch();
  cuda_check(cudaEventRecord(events[1], stream), "recording");
  cuda_check(cudaStreamSynchronize(stream), "measuring");
  float all = 0;
  cuda_check(cudaEventElapsedTime(&all, events[0], events[1]), "measuring");
  for (const cudaEvent_t event : events) (void)cudaEventDestroy(event);
  return {1e3 * ms.front(), 1e3 * ms[launches / 2], 1e3 * all / launches};
}

bool is_same(const EvenExperts& a, const EvenExperts& b) {
  return a.slots == b.slots && a.quotas == b.quotas && a.local_rows == b.local_rows &&
         a.first_row == b.first_row && a.weights_out == b.weights_out &&
         a.weights_in == b.weights_in && a.max_rows == b.max_rows && a.bound == b.bound;
}

/// @return whether the plan is the CPU's
bool measure(const test::EvenExpertsCase& one, int pass_warps, int launches, cudaStream_t stream) {
  GpuEvenExperts planner(one.num_ranks, one.num_experts, one.with_present(), stream);
  planner.set_pass_warps(pass_warps);
  const std::vector<std::int32_t> rows(one.rows.begin(), one.rows.end());
  const auto memory = cuda::device_memory(std::ssize(rows) * 4, stream);
  cuda_check(cudaMemcpy(memory.get(), rows.data(), rows.size() * 4, cudaMemcpyHostToDevice),
             "writing rows");
  const auto launch = [&] { planner.plan(static_cast<const std::int32_t*>(memory.get()), stream); };
  const Times times = time_launches(launches, stream, launch);
  std::vector<std::int32_t> figures(cuda::num_even_figures);
  cuda_check(cudaMemcpy(figures.data(), planner.tables().figures, figures.size() * 4,
                        cudaMemcpyDeviceToHost),
             "reading figures");
  const EvenExperts plan = planner.read(stream);
  std::int64_t copies = 0;
  for (const std::int32_t sent : plan.weights_out) copies += sent;
  const bool good =
      is_same(plan, even_experts(one.rows, one.num_ranks, one.num_experts, one.with_present()));
  std::printf("%-42s %5d %8.2f %8.2f %8.2f %7d %7d %7d %5d %5d %6lld  %s\n", one.name.c_str(),
              planner.tables().pass_warps, times.least_us, times.median_us, times.queued_us,
              figures[cuda::figure_count_cycles], figures[cuda::figure_try_cycles],
              figures[cuda::figure_write_cycles],
              figures[cuda::figure_try] / planner.tables().tries(),
              figures[cuda::figure_try] % planner.tables().tries(), static_cast<long long>(copies),
              good ? "as CPU" : "DIFFERS");
  return good;
}

std::vector<test::EvenExpertsCase> cases() {
  std::vector<test::EvenExpertsCase> all;
  all.push_back({"floor: 1 expert, 1 rank", 1, 1, {5}, {}, {}});
  const std::pair<std::int32_t, std::int32_t> shapes[] = {
      {8, 256}, {32, 256}, {64, 256}, {128, 512}};
  for (const auto& [ranks, experts] : shapes) {
    for (const char* family : {"lognormal", "skewed", "zipf", "hot rank", "few"}) {
      Random random(7);
      const std::int32_t homes = experts / ranks;
      test::EvenExpertsCase one{
          concat(experts, " x ", ranks, ", ", family),
          ranks,
          experts,
          test::rows_of(test::weights_of(family, experts, homes, random), ranks, 8192, random),
          {},
          {.spare_experts = 2}};
      all.push_back(one);
      if (ranks != 64) continue;
      one.name += ", limit 1.02";
      one.options.limit = 1.02;
      all.push_back(one);
      one.options.limit = 1;
      one.options.num_nodes = 8;
      one.name = concat(experts, " x ", ranks, ", ", family, ", 8 nodes");
      all.push_back(one);
      one.options.num_nodes = 1;
      const EvenExperts before = even_experts(one.rows, ranks, experts, one.options);
      for (std::int64_t& n : one.rows) n += random.below(n / 5 + 2);
      for (std::int32_t r = 0; r < ranks; ++r) {
        for (std::int32_t s = homes; s < homes + 2; ++s)
          one.present.push_back(before.slots[r * before.slots_per_rank + s]);
      }
      one.name = concat(experts, " x ", ranks, ", ", family, ", present");
      all.push_back(one);
    }
  }
  return all;
}

int run(int argc, char** argv) {
  int launches = 1000;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool is_count = word == "--launches" && i + 1 < argc;
    if (is_count) {
      const char* const text = argv[++i];
      const auto [end, error] = std::from_chars(text, text + std::strlen(text), launches);
      if (error == std::errc() && *end == 0 && launches >= 1) continue;
    }
    std::fprintf(stderr, "usage: waybill_bench_gpu_planner [--launches N]\n");
    return 2;
  }
  cudaStream_t stream = nullptr;
  cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  cudaDeviceProp device{};
  cuda_check(cudaGetDeviceProperties(&device, 0), "asking for the device");
  std::printf(
      "%s, %d launches; us between events: least, median; us queued; clocks of counting, "
      "tries, writing\n",
      device.name, launches);
  std::printf("%-42s %5s %8s %8s %8s %7s %7s %7s %5s %5s %6s\n", "case", "warps", "least", "median",
              "queued", "count", "tries", "write", "rung", "try", "copies");
  bool good = true;
  for (const test::EvenExpertsCase& one : cases()) {
    const bool is_main = one.num_ranks == 64 && one.present.empty() && one.options.limit == 1 &&
                         one.options.num_nodes == 1;
    for (const int warps : {1, 4, 8, 15}) {
      if (warps == 4 || is_main) good = measure(one, warps, launches, stream) && good;
    }
  }
  cuda_check(cudaStreamDestroy(stream), "ending");
  return good ? 0 : 1;
}

}  // namespace
}  // namespace waybill

int main(int argc, char** argv) {
  try {
    return waybill::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
