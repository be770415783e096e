// Dispatch between ranks that are threads against plain memcpy: the same bytes, the same threads,
// buffers touched before, and the two timed in turns between the same barriers.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "core/parallel_for.h"
#include "waybill/core/host_tensor.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill::bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Every rank has as many shards of equal length for each rank; they alternate.
QkvPlan uniform_plan(std::int32_t world_size, std::int64_t shards, std::int64_t shard_rows) {
  QkvPlan plan;
  plan.world_size = world_size;
  plan.kv_layout = KvLayout::per_rank;
  for (std::int32_t r = 0; r < world_size; ++r) {
    plan.rank_shard_offsets.push_back(r * shards);
    for (std::int64_t s = 0; s < shards; ++s) {
      plan.shard_len.push_back(shard_rows);
      plan.q_dst.push_back(static_cast<std::int32_t>((r + s) % world_size));
    }
  }
  plan.rank_shard_offsets.push_back(world_size * shards);
  for (std::int64_t s = 0; s <= world_size * shards; ++s) plan.doc_shard_offsets.push_back(s);
  for (std::int32_t s = 0; s < world_size * shards; ++s) plan.doc_shards.push_back(s);
  return plan;
}

/// Seconds of all calls of each.
struct Times {
  double dispatch = 0;
  double memcpy = 0;
};

/// One rank's dispatch and memcpy in turns. Times are those of rank 0, from barrier to barrier.
class RankBench {
 public:
  RankBench(World& world, const QkvRouting& routing, std::int64_t row_bytes)
      : world_(world),
        dispatcher_(world),
        parts_{{&routing.fwd_q, {TensorFormat{DType::uint8, row_bytes}}}},
        plan_(dispatcher_.plan_dispatch(parts_)),
        rows_(DType::uint8, {plan_.own_rows()[0], row_bytes}),
        other_(DType::uint8, {plan_.own_rows()[0], row_bytes}) {
    std::memset(rows_.bytes().data(), 1, rows_.bytes().size());
    std::memset(other_.bytes().data(), 2, other_.bytes().size());
    dispatcher_.reserve(plan_.window_bytes());
  }

  Times run(int calls) {
    Times times;
    for (int i = 0; i < calls; ++i) {
      times.memcpy += timed(
          [&] { std::memcpy(other_.bytes().data(), rows_.bytes().data(), rows_.bytes().size()); });
      const std::vector<ConstTensorView> inputs{rows_.view()};
      times.dispatch += timed([&] { (void)dispatcher_.dispatch(plan_, inputs); });
    }
    return times;
  }

  void close() { dispatcher_.close(); }

 private:
  template <class Work>
  double timed(const Work& work) {
    world_.barrier();
    const auto start = Clock::now();
    work();
    world_.barrier();
    return seconds_since(start);
  }

  World& world_;
  SequenceDispatcher dispatcher_;
  std::vector<SequencePart> parts_;
  PlanHandle plan_;
  HostTensor rows_;
  HostTensor other_;
};

/// Arguments: KiB per rank, bytes of a row, rows of a shard, ranks (0: a thread a processor).
void dispatch_against_memcpy(benchmark::State& state) {
  const auto ranks = static_cast<std::int32_t>(
      state.range(3) == 0 ? std::max(2, default_num_threads()) : state.range(3));
  const std::int64_t row_bytes = state.range(1);
  const std::int64_t shard_rows = state.range(2);
  const std::int64_t shard_bytes = row_bytes * shard_rows;
  const std::int64_t shards = std::max<std::int64_t>(ranks, state.range(0) * 1024 / shard_bytes);
  const QkvRouting routing = compute_qkv_routing(uniform_plan(ranks, shards, shard_rows));
  const std::int64_t bytes = shards * shard_bytes * ranks;
  const int calls = static_cast<int>(std::clamp<std::int64_t>((512 << 20) / bytes, 4, 200));
  Times all;
  for (auto _ : state) {
    Times times;
    run_thread_world(ranks, [&](World& world) {
      RankBench rank(world, routing, row_bytes);
      (void)rank.run(2);
      const Times mine = rank.run(calls);
      if (world.rank() == Rank{0}) times = mine;
      rank.close();
    });
    state.SetIterationTime(times.dispatch);
    all.dispatch += times.dispatch;
    all.memcpy += times.memcpy;
  }
  const auto moved = static_cast<double>(state.iterations() * calls * bytes);
  state.counters["ranks"] = ranks;
  state.counters["bytes/s"] = moved / all.dispatch;
  state.counters["memcpy_bytes/s"] = moved / all.memcpy;
  state.counters["of_memcpy"] = all.memcpy / all.dispatch;
}

}  // namespace
}  // namespace waybill::bench

BENCHMARK(waybill::bench::dispatch_against_memcpy)
    ->Name("thread_dispatch")
    ->ArgNames({"KiB_a_rank", "row_bytes", "shard_rows", "ranks"})
    ->Args({1 << 10, 4096, 16, 0})
    ->Args({8 << 10, 4096, 16, 0})
    ->Args({64 << 10, 4096, 1, 0})
    ->Args({64 << 10, 4096, 16, 0})
    ->Args({64 << 10, 4096, 512, 0})
    ->Args({64 << 10, 256, 64, 0})
    ->Args({64 << 10, 8192, 16, 0})
    ->Args({64 << 10, 4096, 16, 8})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
