// What checking a plan and its routing costs, beside computing them.

#include <benchmark/benchmark.h>

#include <vector>

#include "support/packed_plan.h"
#include "waybill/core/random.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/routing/validate.h"

namespace {

using waybill::KvLayout;

/// About `num_shards` shards of 4096 tokens on `world_size` ranks. Most documents are short, most
/// tokens are in long ones.
waybill::QkvPlan make_plan(std::int64_t world_size, std::int64_t num_shards, KvLayout layout) {
  waybill::test::PackedPlanOptions options;
  options.world_size = static_cast<std::int32_t>(world_size);
  options.shard_tokens = 4096;
  options.tokens_per_rank = num_shards * options.shard_tokens / world_size;
  options.kv_layout = layout;
  waybill::Random random(7);
  std::vector<std::int64_t> documents;
  std::int64_t left = options.tokens_per_rank * world_size;
  while (left > 0) {
    const std::int64_t longest = std::int64_t{2048} << random.below(7);
    documents.push_back(std::min(left, 1 + random.below(longest)));
    left -= documents.back();
  }
  return waybill::test::packed_plan(documents, options);
}

void set_counters(benchmark::State& state, const waybill::QkvPlan& plan,
                  const waybill::QkvRouting& routing) {
  state.counters["shards"] = static_cast<double>(plan.num_shards());
  state.counters["kv_copies"] = static_cast<double>(routing.fwd_kv.num_destinations());
}

KvLayout layout_of(const benchmark::State& state) {
  return state.range(2) == 0 ? KvLayout::per_rank : KvLayout::per_query;
}

void compute(benchmark::State& state) {
  const auto plan = make_plan(state.range(0), state.range(1), layout_of(state));
  waybill::QkvRouter router;
  for (auto _ : state) benchmark::DoNotOptimize(&router.compute(plan));
  set_counters(state, plan, router.compute(plan));
}

void validate_sparse(benchmark::State& state) {
  const auto plan = make_plan(state.range(0), state.range(1), layout_of(state));
  const auto routing = waybill::compute_qkv_routing(plan);
  if (!waybill::validate(plan, routing).empty()) state.SkipWithError("the routing is not valid");
  for (auto _ : state) benchmark::DoNotOptimize(waybill::validate(plan, routing));
  set_counters(state, plan, routing);
}

void validate_dense(benchmark::State& state) {
  const auto plan = make_plan(state.range(0), state.range(1), layout_of(state));
  const auto routing = waybill::compute_qkv_routing(plan);
  const auto dense = waybill::to_dense(routing);
  if (!waybill::validate(plan, dense).empty()) state.SkipWithError("the metadata is not valid");
  for (auto _ : state) benchmark::DoNotOptimize(waybill::validate(plan, dense));
  set_counters(state, plan, routing);
}

void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"W", "shards", "per_query"})->Unit(benchmark::kMicrosecond);
  for (const std::int64_t per_query : {0, 1}) {
    bench->Args({8, 1000, per_query})->Args({64, 10000, per_query})->Args({512, 10000, per_query});
  }
}

BENCHMARK(compute)->Name("validate/compute_qkv_routing")->Apply(sizes)->Args({4096, 100000, 0});
BENCHMARK(validate_sparse)->Name("validate/sparse")->Apply(sizes)->Args({4096, 100000, 0});
BENCHMARK(validate_dense)->Name("validate/dense")->Apply(sizes);

}  // namespace
