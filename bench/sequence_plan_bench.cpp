// Compiling a rank's work: what a dispatcher does on the host for every new plan.

#include <benchmark/benchmark.h>

#include <string>

#include "plans.h"
#include "schedule/sequence_plan.h"
#include "support/packed_plan.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::bench {
namespace {

constexpr TensorFormat query_rows{DType::bfloat16, 32 * 128};
constexpr TensorFormat key_rows{DType::bfloat16, 8 * 128};

/// Documents of a list, 64K tokens per rank.
QkvRouting routing_of_documents(std::int32_t world_size, const std::string& lengths) {
  test::PackedPlanOptions options;
  options.world_size = world_size;
  const auto docs = sample_documents(length_distribution(lengths),
                                     world_size * options.tokens_per_rank, /*seed=*/1);
  return compute_qkv_routing(test::packed_plan(docs, options));
}

void compile(benchmark::State& state, const QkvRouting& routing, bool chunks) {
  const SequencePart parts[] = {{&routing.fwd_q, {query_rows}},
                                {&routing.fwd_kv, {key_rows, key_rows}}};
  CompileOptions options;
  options.chunks = chunks;
  options.separate_local_copies = !chunks;
  SequencePlan plan;
  for (auto _ : state) {
    plan = compile_dispatch(parts, Rank{0}, options);
    benchmark::DoNotOptimize(plan.segments.data());
  }
  state.counters["shards"] = static_cast<double>(routing.fwd_q.num_entries());
  state.counters["segments"] = static_cast<double>(plan.segments.size());
  state.counters["local"] = static_cast<double>(plan.local_segments.size());
  state.counters["chunks"] = static_cast<double>(plan.num_chunks);
  state.counters["places"] = static_cast<double>(plan.num_addresses);
}

void compile_documents(benchmark::State& state, const std::string& lengths, bool chunks) {
  compile(state, routing_of_documents(static_cast<std::int32_t>(state.range(0)), lengths), chunks);
}

/// The worst metadata: every KV shard has as many destinations as it can have.
void compile_spread_plan(benchmark::State& state) {
  compile(state, compute_qkv_routing(spread_plan(8, state.range(0))), false);
}

BENCHMARK(compile_spread_plan)->Arg(1000)->Arg(10'000);
BENCHMARK_CAPTURE(compile_documents, wlbllm, "wlbllm", false)->Arg(4)->Arg(8);
BENCHMARK_CAPTURE(compile_documents, prolong, "prolong", false)->Arg(4)->Arg(8);
BENCHMARK_CAPTURE(compile_documents, wlbllm_with_chunks, "wlbllm", true)->Arg(8);

}  // namespace
}  // namespace waybill::bench
