#include <benchmark/benchmark.h>

#include "plans.h"
#include "waybill/core/random.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

void count_entries(benchmark::State& state, const QkvPlan& plan, const QkvRouting& routing) {
  const auto entries = plan.num_shards() + routing.fwd_kv.num_destinations();
  state.counters["shards"] = static_cast<double>(plan.num_shards());
  state.counters["documents"] = static_cast<double>(plan.num_documents());
  state.counters["entries"] = static_cast<double>(entries);  // Q shards + KV copies
  state.counters["ns_per_entry"] = benchmark::Counter(
      static_cast<double>(entries) * 1e-9,
      benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

/// All four metadata and the attention layout from the sparse plan; the memory is kept.
void run(benchmark::State& state, const QkvPlan& plan, int num_threads) {
  QkvRouter router;
  for (auto _ : state) {
    benchmark::DoNotOptimize(router.compute(plan, num_threads).rev_kv.dst_offset.data());
    benchmark::ClobberMemory();
  }
  count_entries(state, plan, router.compute(plan));
}

/// The same with memory fetched from the system and given back in every call.
void run_fresh(benchmark::State& state, const QkvPlan& plan) {
  for (auto _ : state) {
    QkvRouting routing = compute_qkv_routing(plan, /*num_threads=*/1);
    benchmark::DoNotOptimize(routing.rev_kv.dst_offset.data());
    benchmark::ClobberMemory();
  }
  count_entries(state, plan, compute_qkv_routing(plan));
}

void routing_of_spread_plan(benchmark::State& state) {
  run(state, bench::spread_plan(static_cast<std::int32_t>(state.range(0)), state.range(1)), 1);
}
void routing_of_spread_plan_fresh(benchmark::State& state) {
  run_fresh(state, bench::spread_plan(static_cast<std::int32_t>(state.range(0)), state.range(1)));
}
void routing_of_spread_plan_all_threads(benchmark::State& state) {
  run(state, bench::spread_plan(static_cast<std::int32_t>(state.range(0)), state.range(1)), 0);
}
void routing_of_spread_plan_per_query(benchmark::State& state) {
  run(state,
      bench::spread_plan(static_cast<std::int32_t>(state.range(0)), state.range(1),
                         KvLayout::per_query),
      1);
}
void routing_of_long_documents(benchmark::State& state) {
  run(state,
      bench::long_document_plan(static_cast<std::int32_t>(state.range(0)), state.range(1),
                                state.range(2)),
      1);
}

void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"W", "shards"})->Unit(benchmark::kMicrosecond);
  bench->Args({8, 1000})->Args({64, 10000})->Args({512, 10000})->Args({4096, 100000});
}

/// compute_metadata of dense tables [W, S], or [W, S, C] where C > 0; of the copies after the first
/// `used` in a hundred go anywhere, the others are -1.
void dense_metadata(benchmark::State& state) {
  const Shape shape{state.range(0), state.range(1)};
  const std::int64_t copies = state.range(2);
  Random random(1);
  IndexArray lens(shape);
  for (std::int64_t& rows : lens.i64()) rows = 1 + random.below(4095);
  IndexArray dispatch(copies > 0 ? Shape{shape[0], shape[1], copies} : shape);
  std::int64_t at = 0;
  for (std::int64_t& rank : dispatch.i64()) {
    const bool first = copies == 0 || at++ % copies == 0;
    rank = first || random.below(100) < state.range(3) ? random.below(shape[0]) : -1;
  }
  for (auto _ : state) {
    DispatchMetadata result = compute_metadata(lens, dispatch);
    benchmark::DoNotOptimize(result.rev.dst_offset.data());
    benchmark::ClobberMemory();
  }
}

BENCHMARK(dense_metadata)
    ->ArgNames({"W", "S", "C", "used"})
    ->Unit(benchmark::kMicrosecond)
    ->Args({64, 160, 0, 0})
    ->Args({64, 160, 1, 0})
    ->Args({64, 160, 2, 0})
    ->Args({64, 160, 2, 100});
BENCHMARK(routing_of_spread_plan)->Apply(sizes);
BENCHMARK(routing_of_spread_plan_fresh)->Apply(sizes);
BENCHMARK(routing_of_spread_plan_all_threads)->Apply(sizes)->UseRealTime();
BENCHMARK(routing_of_spread_plan_per_query)->Apply(sizes);
BENCHMARK(routing_of_long_documents)
    ->ArgNames({"W", "shards", "per_document"})
    ->Unit(benchmark::kMicrosecond)
    ->Args({8, 1000, 25})
    ->Args({64, 10000, 25})
    ->Args({512, 10000, 25})
    ->Args({512, 100000, 25})
    ->Args({4096, 100000, 25});

}  // namespace
}  // namespace waybill
