// Times SequenceDispatcher on the GPUs of this host against what the links give.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/self_test/self_test.h"
#include "measure.h"
#include "waybill/cuda/gpu_world.h"
#include "workload.h"

namespace waybill::bench {
namespace {

constexpr std::int64_t mib = std::int64_t{1} << 20;

/// The link probe at each number of SMs, asked once.
class Ceilings {
 public:
  explicit Ceilings(int gpus) : gpus_(gpus) {}
  double with_sms(int num_sms) {
    const auto [found, is_new] = known_.try_emplace(num_sms, 0);
    if (is_new) {
      const LinkWay way = num_sms == 0 ? LinkWay::copy_engines : LinkWay::push_bulk;
      found->second = link_gb_s(gpus_, way, std::max(1, num_sms), 64 * mib);
    }
    return found->second;
  }
  double best() { return std::max({with_sms(8), with_sms(16), with_sms(132)}); }

 private:
  int gpus_;
  std::map<int, double> known_;
};

class Table {
 public:
  Table(std::int32_t world_size, int gpus) : world_size_(world_size), ceilings_(gpus) {
    if (gpus < 2) std::printf("one GPU: nothing crosses a link, columns that need one are 0\n");
    std::printf("link: bulk push 8 SMs %.0f, 16 SMs %.0f, 132 SMs %.0f, copy engines %.0f GB/s\n",
                ceilings_.with_sms(8), ceilings_.with_sms(16), ceilings_.with_sms(132),
                ceilings_.with_sms(0));
    std::printf("%-34s %4s %9s %9s %9s %9s %9s %7s %7s\n", "workload", "SMs", "wire MiB", "us",
                "graph us", "limit us", "GB/s", "of link", "of best");
  }

  void row(const Workload& workload, int num_sms, bool graph = false) {
    MeasureOptions options;
    options.dispatcher.num_sms = num_sms;
    if (!workload.relay.empty()) options.dispatcher.plan.relay = RelayUse::always;
    options.graph = graph;
    const WireBytes bytes = wire_bytes(workload);
    const CallTimes times = measure(world_size_, workload, options);
    const double us = times.median_us;
    const double rate = static_cast<double>(bytes.most()) / us / 1e3;
    const auto over = [](double a, double b) { return b > 0 ? a / b : 0; };
    const double limit = over(static_cast<double>(bytes.most()), ceilings_.best()) / 1e3;
    std::printf("%-34s %4d %9.1f %9.1f %9.1f %9.1f %9.1f %6.1f%% %6.1f%%  compile %.0f us\n",
                workload.name.c_str(), num_sms, static_cast<double>(bytes.most()) / mib, us,
                times.graph_us, limit, rate, over(100 * rate, ceilings_.with_sms(num_sms)),
                over(100 * rate, ceilings_.best()), times.compile_us);
    std::fflush(stdout);
  }

 private:
  std::int32_t world_size_;
  Ceilings ceilings_;
};

/// Direct, then with receivers that forward; what the plan's own limits say of both.
void relay_rows(Table& table, std::int32_t world_size, const char* lengths,
                SequenceOperation operation) {
  Workload direct = skewed(world_size, lengths, operation);
  Workload relayed = direct;
  direct.relay = {};
  relayed.name += ", relay";
  const auto parts = relayed.parts();
  const CompileOptions options{.plan = {.relay = RelayUse::always}};
  const PlanLimits limits = operation == SequenceOperation::dispatch
                                ? compile_dispatch(parts, Rank{0}, options).limits
                                : compile_kv_gradient(parts, Rank{0}, options).limits;
  std::printf("%s: limit %.0f us direct, %.0f us with relay at %.0f GB/s: %.2f times\n",
              direct.name.c_str(), 1e6 * limits.direct_seconds, 1e6 * limits.relay_seconds,
              options.plan.nvlink_bytes_per_second / 1e9,
              limits.direct_seconds / limits.relay_seconds);
  for (const int sms : {16, 24, 32, 48}) {
    table.row(direct, sms);
    table.row(relayed, sms);
  }
}

/// Copy engines need a queue for each pair of ranks: not where many ranks share a device.
std::vector<int> usable(std::int32_t world_size, std::vector<int> sms) {
  if (world_size > 4 * num_gpus()) std::erase(sms, 0);
  return sms;
}

void run(std::int32_t world_size, bool quick) {
  const int gpus = num_gpus();
  std::printf("%d ranks on %d GPUs, bfloat16; slowest rank's median of 60 calls\n", world_size,
              gpus);
  Table table(world_size, gpus);
  constexpr std::int64_t row = 8192;
  const auto rows = [&](const Workload& workload, std::vector<int> sms, bool graph = false) {
    for (const int num_sms : usable(world_size, std::move(sms))) {
      table.row(workload, num_sms, graph);
    }
  };
  Workload empty = uniform(world_size, 0, row);
  empty.name = "empty plan";
  table.row(empty, 16, true);
  rows(uniform(world_size, mib, row), {8, 16, 32}, true);
  rows(uniform(world_size, 8 * mib, row), {16}, true);
  rows(uniform(world_size, 64 * mib, row), {8, 16, 0});
  if (quick) return;
  rows(uniform(world_size, 8 * mib, row), {32, 64}, true);
  rows(uniform(world_size, 64 * mib, row), {64, 132});
  rows(uniform(world_size, 256 * mib, row), {8, 16, 24, 64, 0});
  rows(uniform(world_size, 64 * mib, 2048), {16});
  rows(uniform(world_size, 64 * mib, 256), {16});
  for (const char* lengths : {"wlbllm", "prolong"}) {
    rows(documents(world_size, lengths, SequenceOperation::dispatch), {8, 16, 0});
    rows(documents(world_size, lengths, SequenceOperation::kv_gradient), {16, 24, 32});
    if (world_size == 1) continue;  // nobody sends more than others receive
    relay_rows(table, world_size, lengths, SequenceOperation::dispatch);
    relay_rows(table, world_size, lengths, SequenceOperation::kv_gradient);
  }
}

/// The number of ranks, and whether it is to be quick; nothing where the arguments are wrong.
struct Arguments {
  std::int32_t ranks = 0;
  bool quick = false;
};

std::optional<Arguments> parsed(std::span<char* const> given) {
  Arguments arguments{.ranks = std::max(2, num_gpus())};
  for (std::size_t i = 0; i < given.size(); ++i) {
    const std::string_view one = given[i];
    if (one == "--quick") {
      arguments.quick = true;
    } else if (one == "--ranks" && i + 1 < given.size()) {
      char* end = nullptr;
      const long ranks = std::strtol(given[++i], &end, 10);
      if (*end != 0 || ranks < 1 || ranks > 64) return std::nullopt;
      arguments.ranks = static_cast<std::int32_t>(ranks);
    } else {
      return std::nullopt;
    }
  }
  return arguments;
}

}  // namespace
}  // namespace waybill::bench

/// waybill_bench_gpu_sequence [--quick] [--ranks N]: ranks share GPUs where there are fewer; one a
/// GPU unless told, and at least two.
int main(int argc, char** argv) {
  // Of ranks that share a GPU: what one queues, or loads, must not wait for another's kernel.
  (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  const auto arguments = waybill::bench::parsed({argv + 1, static_cast<std::size_t>(argc - 1)});
  if (!arguments) {
    std::fprintf(stderr, "usage: waybill_bench_gpu_sequence [--quick] [--ranks 1..64]\n");
    return 2;
  }
  if (waybill::num_gpus() < 1) {
    std::fprintf(stderr, "error: no GPU\n");
    return 1;
  }
  try {
    waybill::bench::run(arguments->ranks, arguments->quick);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
