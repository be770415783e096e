// Plans many batches and prints, as Markdown, how even they are, what they move, and how long
// planning takes. Times are CPU time of the process, one thread.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <exception>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "baselines.h"
#include "cases.h"
#include "waybill/core/error.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/planner/planner.h"
#include "waybill/planner/static_plans.h"
#include "waybill/report/plan_summary.h"

namespace waybill::bench {
namespace {

constexpr std::int64_t tokens_per_rank = 65536;
constexpr std::int64_t pack_tokens = 524288;
constexpr double mib = 1 << 20;

struct Job {
  std::vector<std::int32_t> worlds{8, 32, 64, 128, 256, 512, 4096};
  std::uint64_t seeds = 20;
  std::vector<DocumentSource> sources;
  std::int32_t most_baseline_ranks = 256;
  std::int32_t ranks_per_node = 0;  ///< 0: one node
  bool check = false;
};

double largest(const std::vector<std::int64_t>& values) {
  return static_cast<double>(*std::max_element(values.begin(), values.end()));
}

double mean(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

/// Microseconds of CPU time of one call, the best of three runs of many calls.
double microseconds(const std::function<void()>& call) {
  double best = 1e18;
  for (int run = 0; run < 3; ++run) {
    const std::clock_t start = std::clock();
    std::clock_t end = start;
    int calls = 0;
    do {
      call();
      ++calls;
      end = std::clock();
    } while (end - start < CLOCKS_PER_SEC / 250);
    best = std::min(best, static_cast<double>(end - start) / calls * 1e6 / CLOCKS_PER_SEC);
  }
  return best;
}

/// Sums over seeds of one source and world size.
struct Sums {
  double imbalance = 0, worst_imbalance = 0;
  double docs = 0, shards = 0;
  double mean_in = 0, max_in = 0, max_out = 0, relay_out = 0;
  double over_bound = 0, worst_relay = 0;
  double direct_ms = 0, relay_ms = 0;
  double plan_us = 0, relay_us = 0;
  std::uint64_t unbalanced = 0;
};

void add_plan(const Job& job, const AttentionPlan& plan, Sums& sums) {
  const auto in = plan.bytes_in();
  const double max_in = largest(in);
  const double relay_out = largest(plan.bytes_out(TransferMode::relay));
  sums.imbalance += plan.imbalance();
  sums.worst_imbalance = std::max(sums.worst_imbalance, plan.imbalance());
  if (!plan.balanced()) ++sums.unbalanced;
  sums.docs += static_cast<double>(plan.plan.num_documents());
  sums.shards += static_cast<double>(plan.plan.num_shards());
  sums.mean_in += mean(in) / mib;
  sums.max_in += max_in / mib;
  sums.max_out += largest(plan.bytes_out()) / mib;
  sums.relay_out += relay_out / mib;
  if (max_in > 0) {
    sums.over_bound =
        std::max(sums.over_bound,
                 max_in / std::max(2.5 * mean(in), static_cast<double>(plan.least_bytes_in)));
    sums.worst_relay = std::max(sums.worst_relay, relay_out / max_in);
  }
  sums.direct_ms += plan.limit_seconds(TransferMode::direct) * 1e3;
  sums.relay_ms += plan.limit_seconds(TransferMode::relay) * 1e3;
  if (!job.check) return;
  const std::vector<Finding> findings = validate(plan);
  if (!findings.empty()) throw InternalError("planner_quality: " + to_string(findings.front()));
}

Sums measure(const Job& job, const DocumentSource& source, std::int32_t world_size) {
  Sums sums;
  Planner planner;
  PlannerOptions options;
  options.world_size = world_size;
  options.tokens_per_rank = tokens_per_rank;
  options.hardware.ranks_per_node = job.ranks_per_node > 0 ? job.ranks_per_node : world_size;
  for (std::uint64_t seed = 0; seed < job.seeds; ++seed) {
    const auto documents = source.draw(world_size * tokens_per_rank, pack_tokens, seed);
    options.relay = false;
    sums.plan_us += microseconds([&] { (void)planner.plan(documents, options); });
    options.relay = true;
    sums.relay_us += microseconds([&] { (void)planner.plan(documents, options); });
    add_plan(job, planner.plan(documents, options), sums);
  }
  return sums;
}

void print_planner(const Job& job) {
  std::printf(
      "| documents | W | docs | shards | work max/mean: mean (worst) | mean in | max in (x mean) | "
      "max in / max(2.5 mean, bound), worst | max out | with relay (x max in; worst) | limit ms "
      "direct, relay | in / reference | plan us | with relay us |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (const DocumentSource& source : job.sources) {
    for (const std::int32_t world_size : job.worlds) {
      const Sums s = measure(job, source, world_size);
      const auto n = static_cast<double>(job.seeds);
      const auto reference = reference_figures(source.name, world_size);
      std::printf(
          "| %s | %d | %.0f | %.0f | %.4f (%.4f)%s | %.0f | %.0f (%.2f) | %.2f | %.0f | %.0f "
          "(%.2f; %.2f) | %.2f, %.2f | %s | %.0f | %.0f |\n",
          source.name.c_str(), world_size, s.docs / n, s.shards / n, s.imbalance / n,
          s.worst_imbalance, s.unbalanced > 0 ? concat(", ", s.unbalanced, " over").c_str() : "",
          s.mean_in / n, s.max_in / n, s.max_in / s.mean_in, s.over_bound, s.max_out / n,
          s.relay_out / n, s.relay_out / s.max_in, s.worst_relay, s.direct_ms / n, s.relay_ms / n,
          reference ? std::to_string(s.mean_in / n / reference->mean_in).substr(0, 4).c_str() : "",
          s.plan_us / n, s.relay_us / n);
      (void)std::fflush(stdout);
    }
  }
}

struct Contender {
  const char* name;
  std::function<QkvPlan(const std::vector<std::int64_t>&, const BaselineOptions&)> plan;
};

std::vector<Contender> contenders() {
  return {
      {"Waybill",
       [](const auto& documents, const BaselineOptions& options) {
         PlannerOptions planner{.world_size = options.world_size,
                                .tokens_per_rank = options.tokens_per_rank};
         planner.relay = false;
         planner.hardware.ranks_per_node = options.world_size;
         return plan_attention(documents, planner).plan;
       }},
      {"greedy, tolerance 0.1",
       [](const auto& documents, const auto& options) { return greedy_plan(documents, options); }},
      {"greedy, tolerance 0.02",
       [](const auto& documents, const auto& options) {
         return greedy_plan(documents, options, 0.02);
       }},
      {"by document, 8 ranks",
       [](const auto& documents, const auto& options) {
         return per_document_plan(documents, {.world_size = options.world_size,
                                              .tokens_per_rank = options.tokens_per_rank});
       }},
      {"zigzag, 8 ranks",
       [](const auto& documents, const auto& options) {
         return zigzag_plan(documents, {.world_size = options.world_size,
                                        .tokens_per_rank = options.tokens_per_rank});
       }},
      {"longest first, whole documents",
       [](const auto& documents, const auto& options) {
         return longest_first_plan(documents, options);
       }},
  };
}

void print_baselines(const Job& job) {
  std::printf(
      "\n| documents | W | planner | work max/mean: mean (worst) | mean in | max in | max out | "
      "shards |\n|---|---|---|---|---|---|---|---|\n");
  const RowBytes row_bytes{.q = 8192, .kv = 4096};
  for (const DocumentSource& source : job.sources) {
    for (const std::int32_t world_size : job.worlds) {
      if (world_size > job.most_baseline_ranks) continue;
      for (const Contender& contender : contenders()) {
        double imbalance = 0, worst = 0, in = 0, max_in = 0, max_out = 0, shards = 0;
        for (std::uint64_t seed = 0; seed < job.seeds; ++seed) {
          const auto documents = source.draw(world_size * tokens_per_rank, pack_tokens, seed);
          const QkvPlan plan = contender.plan(
              documents, {.world_size = world_size, .tokens_per_rank = tokens_per_rank});
          const PlanSummary s = summarize(plan, compute_qkv_routing(plan), row_bytes);
          imbalance += s.rank_work.imbalance();
          worst = std::max(worst, s.rank_work.imbalance());
          in += s.rank_bytes_in.mean / mib;
          max_in += static_cast<double>(s.rank_bytes_in.max) / mib;
          max_out += static_cast<double>(s.rank_bytes_out.max) / mib;
          shards += static_cast<double>(s.num_shards);
        }
        const auto n = static_cast<double>(job.seeds);
        std::printf("| %s | %d | %s | %.3f (%.3f) | %.0f | %.0f | %.0f | %.0f |\n",
                    source.name.c_str(), world_size, contender.name, imbalance / n, worst, in / n,
                    max_in / n, max_out / n, shards / n);
        (void)std::fflush(stdout);
      }
    }
  }
}

constexpr const char* usage =
    "planner_quality [--worlds 8,64] [--seeds 20] [--baselines MOST_RANKS, 0: none] "
    "[--nodes RANKS_PER_NODE] [--check] [LENGTHS.json ...]\n"
    "Documents: the lists, then the histograms that the library carries.\n";

std::vector<std::int32_t> read_worlds(std::string text) {
  std::vector<std::int32_t> worlds;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    worlds.push_back(std::stoi(text.substr(0, comma)));
    text = comma == std::string::npos ? "" : text.substr(comma + 1);
  }
  return worlds;
}

Job read_arguments(const std::vector<std::string>& arguments) {
  Job job;
  const auto value = [&](std::size_t& i) -> const std::string& {
    require(i + 1 < arguments.size(), arguments[i], " needs a value\n", usage);
    return arguments[++i];
  };
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--worlds") {
      job.worlds = read_worlds(value(i));
    } else if (arguments[i] == "--seeds") {
      job.seeds = std::stoull(value(i));
    } else if (arguments[i] == "--baselines") {
      job.most_baseline_ranks = std::stoi(value(i));
    } else if (arguments[i] == "--nodes") {
      job.ranks_per_node = std::stoi(value(i));
    } else if (arguments[i] == "--check") {
      job.check = true;
    } else {
      require(!arguments[i].starts_with("--"), "unknown option ", arguments[i], '\n', usage);
      job.sources.push_back(source_from_file(arguments[i]));
    }
  }
  for (const LengthDistribution& histogram : builtin_length_distributions())
    job.sources.push_back(source_from_histogram(histogram));
  return job;
}

}  // namespace
}  // namespace waybill::bench

int main(int argc, char** argv) {
  try {
    const auto job = waybill::bench::read_arguments({argv + 1, argv + argc});
    waybill::bench::print_planner(job);
    if (job.most_baseline_ranks > 0) waybill::bench::print_baselines(job);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
