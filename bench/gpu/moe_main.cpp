// Times dispatch and combine of experts' tokens on the GPUs of this host against what the links
// give.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/self_test/self_test.h"
#include "moe_rank.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill::bench {
namespace {

using Call = std::function<void(MoeRank&)>;

constexpr std::int64_t mib = std::int64_t{1} << 20;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw InternalError(concat("moe: ", cudaGetErrorString(status)));
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values.empty() ? 0 : values[values.size() / 2];
}

/// Median time of a call, from event to event.
double time_calls(MoeRank& rank, const Call& call, int calls) {
  std::vector<cudaEvent_t> events(calls + 1);
  for (cudaEvent_t& event : events) check(cudaEventCreate(&event));
  check(cudaEventRecord(events[0], rank.stream()));
  for (int i = 1; i <= calls; ++i) {
    call(rank);
    check(cudaEventRecord(events[i], rank.stream()));
  }
  rank.synchronize();
  std::vector<double> times;
  for (int i = 1; i <= calls; ++i) {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, events[i - 1], events[i]));
    times.push_back(ms * 1e3);
  }
  for (cudaEvent_t event : events) (void)cudaEventDestroy(event);
  return median(std::move(times));
}

/// Time of one of `calls` (an even number) that are replayed as one graph.
double time_graph(MoeRank& rank, const Call& call, int calls, int replays) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  check(cudaStreamBeginCapture(rank.stream(), cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) call(rank);
  check(cudaStreamEndCapture(rank.stream(), &graph));
  check(cudaGraphInstantiate(&ready, graph, 0));
  cudaEvent_t begun = nullptr;
  cudaEvent_t ended = nullptr;
  check(cudaEventCreate(&begun));
  check(cudaEventCreate(&ended));
  std::vector<double> times;
  for (int i = 0; i < replays + 2; ++i) {
    check(cudaEventRecord(begun, rank.stream()));
    check(cudaGraphLaunch(ready, rank.stream()));
    check(cudaEventRecord(ended, rank.stream()));
    rank.synchronize();
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begun, ended));
    if (i >= 2) times.push_back(ms * 1e3 / calls);
  }
  (void)cudaGraphExecDestroy(ready);
  (void)cudaGraphDestroy(graph);
  return median(std::move(times));
}

/// One line of the table: how often what is called with how many multiprocessors.
struct Line {
  const char* name;
  int num_sms;
  Call call;
  Call check;
  std::int64_t wire_bytes = 0;
  std::int64_t copy_bytes = 0;
  bool graph = false;
};

class Table {
 public:
  Table(std::int32_t world_size, int calls) : world_size_(world_size), calls_(calls) {
    const int gpus = num_gpus();
    if (gpus < 2) std::printf("one GPU: nothing crosses a link\n");
    for (const int sms : {8, 16, 132}) {
      push_[sms] = link_gb_s(gpus, LinkWay::push_bulk, sms, 64 * mib);
    }
    pull_ = link_gb_s(gpus, LinkWay::pull_bulk, 16, 64 * mib);
    std::printf("link: push 8 SMs %.0f, 16 SMs %.0f, 132 SMs %.0f; pull 16 SMs %.0f GB/s\n",
                push_[8], push_[16], push_[132], pull_);
  }

  /// Makes the layer once, then runs all lines.
  void run(const MoeWorkload& workload, const EPDispatchOptions& options,
           const std::vector<Line>& lines) {
    std::vector<std::vector<double>> us(lines.size());
    std::vector<std::vector<double>> graph_us(lines.size());
    for (auto* times : {&us, &graph_us}) {
      for (auto& line : *times) line.resize(world_size_);
    }
    std::mutex mutex;
    std::string wrong;
    const auto check_line = [&](const Line& line, MoeRank& rank) {
      if (!line.check) return;
      try {
        line.check(rank);
      } catch (const InternalError& error) {
        const std::lock_guard lock(mutex);
        wrong += concat("\n", line.name, ", ", line.num_sms, " SMs: ", error.what());
      }
    };
    run_gpu_thread_world(world_size_,
                         [&](World& world) {
                           MoeRank rank(world, workload, options);
                           const std::size_t r = to_int(world.rank());
                           rank.dispatch();
                           for (std::size_t i = 0; i < lines.size(); ++i) {
                             const Line& line = lines[i];
                             rank.use_sms(line.num_sms);
                             for (int k = 0; k < 10; ++k) line.call(rank);
                             rank.synchronize();
                             check_line(line, rank);
                             world.barrier();
                             us[i][r] = time_calls(rank, line.call, calls_);
                             check_line(line, rank);
                             world.barrier();
                             if (line.graph) graph_us[i][r] = time_graph(rank, line.call, 20, 10);
                             world.barrier();
                           }
                         },
                         {.ranks_per_node = workload.config.local_world_size, .timeout_s = 20});
    std::printf("\n%s; %d ranks, %d on a node\n", workload.name.c_str(), world_size_,
                workload.config.local_world_size);
    std::printf("%-46s %4s %9s %9s %9s %9s %9s %8s\n", "call", "SMs", "us", "graph us", "wire MB",
                "copies MB", "wire GB/s", "of link");
    for (std::size_t i = 0; i < lines.size(); ++i) {
      print(lines[i], *std::ranges::max_element(us[i]), *std::ranges::max_element(graph_us[i]));
    }
    std::fflush(stdout);
    if (!wrong.empty()) wrong_ += concat("\n", workload.name, ":", wrong);
  }

  /// What the checks have found. @throws InternalError
  void expect_right() const {
    if (!wrong_.empty()) throw InternalError(wrong_);
  }

 private:
  void print(const Line& line, double us, double graph_us) {
    const double rate = static_cast<double>(line.wire_bytes) / us / 1e3;
    const double link = std::max({push_[8], push_[16], push_[132]});
    std::printf("%-46s %4d %9.1f %9.1f %9.1f %9.1f %9.1f %7.1f%%\n", line.name, line.num_sms, us,
                graph_us, static_cast<double>(line.wire_bytes) / 1e6,
                static_cast<double>(line.copy_bytes) / 1e6, rate, link > 0 ? 100 * rate / link : 0);
  }

  std::int32_t world_size_;
  int calls_;
  std::map<int, double> push_;
  double pull_ = 0;
  std::string wrong_;
};

void dispatch_lines(Table& table, const MoeWorkload& workload, bool graph,
                    const std::vector<int>& all_sms) {
  const MoeRows rows = rows_of(workload);
  const std::int64_t bytes = workload.config.hidden * 2;
  const std::int64_t fp8 = workload.config.hidden + workload.config.hidden / 128 * 4;
  const Call check_rows = [](MoeRank& rank) { rank.check_rows(); };
  const Call check_sums = [](MoeRank& rank) { rank.check_sums(); };
  std::vector<Line> lines;
  lines.push_back(
      {"counting and placing alone", 16, [](MoeRank& rank) { rank.route(); }, {}, 0, 0, graph});
  for (const int sms : all_sms) {
    lines.push_back({"dispatch bf16, grouped, with counting", sms,
                     [](MoeRank& rank) { rank.dispatch(); }, check_rows, rows.wire * bytes,
                     rows.copies * bytes, graph});
  }
  const Call combine_grouped = [](MoeRank& rank) { rank.combine(); };
  lines.push_back(
      {"combine bf16 of grouped rows", all_sms.back(), combine_grouped, check_sums, 0, 0, graph});
  lines.push_back({"the same, rows copied to the window", all_sms.back(),
                   [](MoeRank& rank) { rank.combine({}, false); }, check_sums, 0, 0, graph});
  lines.push_back({"combine bf16, local combine", all_sms.back(),
                   [](MoeRank& rank) { rank.combine({.local_combine = true}, false); },
                   [](MoeRank& rank) { rank.check_sums(true); }, rows.wire * bytes, 0, graph});
  table.run(workload, {}, lines);
  lines.clear();
  EPDispatchOptions options;
  options.rows = EPRows::compact;
  for (const int sms : all_sms) {
    lines.push_back({"dispatch bf16, compact, cached", sms,
                     [](MoeRank& rank) { rank.dispatch_again(); }, check_rows, rows.wire * bytes, 0,
                     graph});
  }
  for (const int sms : all_sms) {
    lines.push_back({"combine bf16, a row per token and rank", sms,
                     [](MoeRank& rank) { rank.combine(); }, check_sums, rows.wire * bytes, 0,
                     graph});
  }
  lines.push_back({"pair: dispatch with counting, combine",
                   all_sms.back(),
                   [](MoeRank& rank) {
                     rank.dispatch();
                     rank.combine();
                   },
                   {},
                   rows.wire * bytes * 2,
                   0,
                   graph});
  table.run(workload, options, lines);
  lines.clear();
  options.payload = EPPayload::scaled;
  for (const int sms : all_sms) {
    lines.push_back({"dispatch fp8 + scales, compact, cached", sms,
                     [](MoeRank& rank) { rank.dispatch_again(); }, check_rows, rows.wire * fp8, 0,
                     graph});
  }
  table.run(workload, options, lines);
  options.payload = EPPayload::quantized;
  table.run(workload, options,
            {{"dispatch fp8, quantised here, compact, cached",
              all_sms.back(),
              [](MoeRank& rank) { rank.dispatch_again(); },
              {},
              rows.wire * fp8,
              0,
              graph}});
}

MoeWorkload on_nodes(MoeWorkload workload, std::int32_t ranks_per_node) {
  workload.config.local_world_size = ranks_per_node;
  return workload;
}

/// Logical nodes: what crosses a link is counted as on one node. Two at least: where there are too
/// few GPUs, ranks share them.
void run_on_nodes(std::int32_t ranks_per_node) {
  const std::int32_t world_size = std::max(2 * ranks_per_node, num_gpus());
  Table table(world_size, 30);
  for (const std::int64_t tokens : {std::int64_t{128}, std::int64_t{4096}}) {
    dispatch_lines(table, on_nodes(uniform_moe(world_size, tokens, 7168, 8, 256), ranks_per_node),
                   tokens == 128, {16, 32});
  }
  table.expect_right();
}

/// What copies of experts add to a dispatch: ranks count twice and plan in between.
void run_spare() {
  const std::int32_t world_size = std::max(2, num_gpus());
  Table table(world_size, 60);
  const Call check_rows = [](MoeRank& rank) { rank.check_rows(); };
  for (const std::int64_t tokens : {std::int64_t{1}, std::int64_t{128}, std::int64_t{4096}}) {
    const MoeWorkload workload = uniform_moe(world_size, tokens, 7168, 8, 256);
    const std::int64_t wire = rows_of(workload).wire * workload.config.hidden * 2;
    for (const std::int32_t spare : {0, 2}) {
      EPDispatchOptions options;
      options.spare_experts = spare;
      std::printf("\n-- spare experts per rank: %d", spare);
      table.run(
          workload, options,
          {{"counting and placing alone", 16, [](MoeRank& rank) { rank.route(); }, {}, 0, 0, true},
           {"dispatch bf16, grouped, with counting", 16, [](MoeRank& rank) { rank.dispatch(); },
            check_rows, wire, 0, true}});
    }
  }
  table.expect_right();
}

/// Rows of each format, given and quantised on the way, by a known routing.
void run_payloads(const std::vector<int>& all_sms, std::vector<std::string> names) {
  if (names.empty()) {
    names = {"plain", "scaled_float8", "float8", "scaled_mxfp8", "mxfp8", "scaled_nvfp4", "nvfp4"};
  }
  const std::int32_t world_size = std::max(2, num_gpus());
  Table table(world_size, 30);
  const Call again = [](MoeRank& rank) { rank.dispatch_again(); };
  for (const std::int64_t tokens : {std::int64_t{1}, std::int64_t{4096}}) {
    const MoeWorkload workload = uniform_moe(world_size, tokens, 7168, 8, 256);
    const EPConfig& config = workload.config;
    for (const std::string& name : names) {
      EPDispatchOptions options;
      options.rows = EPRows::compact;
      options.payload = EPPayload::from_name(name, "payload");
      const Call check = options.payload.is_quantized()
                             ? Call([](MoeRank& rank) { rank.check_quantized_rows(); })
                             : Call([](MoeRank& rank) { rank.check_rows(); });
      const std::int64_t bytes = rows_of(workload).wire * (payload_row_bytes(config, options) +
                                                           scale_row_bytes(config, options));
      std::vector<Line> lines;
      for (const int sms : all_sms) {
        lines.push_back({name.c_str(), sms, again, check, bytes, 0, tokens == 1});
      }
      table.run(workload, options, lines);
    }
  }
  table.expect_right();
}

enum class Extent { all, quick, few };

/// `few`: no more tokens than decoding has.
void run(Extent extent) {
  const bool quick = extent == Extent::quick;
  const std::int32_t world_size = std::max(2, num_gpus());
  const int calls = quick ? 30 : 60;
  std::printf("%d GPUs; slowest rank's median of %d calls, from event to event\n", world_size,
              calls);
  Table table(world_size, calls);
  using Sms = std::vector<int>;
  dispatch_lines(table, uniform_moe(world_size, 1, 7168, 8, 256), true, Sms{16});
  dispatch_lines(table, uniform_moe(world_size, 128, 7168, 8, 256), true,
                 quick ? Sms{16, 64} : Sms{16, 20, 32, 64, 132});
  if (extent == Extent::few) return table.expect_right();
  const Sms sms = quick ? Sms{8, 16} : Sms{8, 10, 12, 16, 20, 24, 32};
  dispatch_lines(table, uniform_moe(world_size, 4096, 7168, 8, 256), false, sms);
  if (world_size == 2) dispatch_lines(table, like_eight_ranks(4096, 7168), false, sms);
  table.expect_right();
}

}  // namespace
}  // namespace waybill::bench

/// waybill_bench_gpu_moe [--quick | --few | --payloads [SMS ...] [NAME ...] | --ranks-per-node N |
/// --spare]: a GPU for each rank; --few: at most 128 tokens; --payloads: formats of rows (or those
/// named), with so many multiprocessors; --ranks-per-node: on logical nodes of N ranks; --spare:
/// dispatches with and without copies of experts.
int main(int argc, char** argv) {
  if (waybill::num_gpus() < 1) {
    std::fprintf(stderr, "error: no GPU\n");
    return 1;
  }
  try {
    const std::string_view way = argc > 1 ? argv[1] : "";
    if (way == "--payloads") {
      std::vector<int> sms;
      std::vector<std::string> names;
      for (int i = 2; i < argc; ++i) {
        if (const int number = std::atoi(argv[i]); number > 0) {
          sms.push_back(number);
        } else {
          names.emplace_back(argv[i]);
        }
      }
      if (sms.empty()) sms = {16, 32};
      waybill::bench::run_payloads(sms, names);
    } else if (way == "--spare") {
      waybill::bench::run_spare();
    } else if (way == "--ranks-per-node" && argc > 2) {
      waybill::bench::run_on_nodes(std::atoi(argv[2]));
    } else {
      using waybill::bench::Extent;
      waybill::bench::run(way == "--quick" ? Extent::quick
                          : way == "--few" ? Extent::few
                                           : Extent::all);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
