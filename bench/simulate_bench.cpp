#include <benchmark/benchmark.h>

#include <chrono>
#include <cstring>
#include <vector>

#include "core/parallel_for.h"
#include "waybill/core/host_tensor.h"
#include "waybill/core/random.h"
#include "waybill/simulate/orchestrate.h"

// The simulator against plain memcpy: the same bytes, the same number of threads, buffers touched
// before, and the two timed in turns, so that both see the same machine.

namespace waybill {
namespace {

constexpr std::int64_t world_size = 8;
constexpr std::int64_t total_bytes = std::int64_t{256} << 20;

/// Every rank cuts its rows into equal shards, which go to ranks in a random order.
Metadata shuffled_shards(std::int64_t rows_per_rank, std::int64_t shard_rows) {
  const std::int64_t num_shards = rows_per_rank / shard_rows;
  Metadata metadata;
  metadata.seq_len = IndexArray::full({world_size, num_shards}, shard_rows);
  metadata.dst_rank = IndexArray({world_size, num_shards});
  metadata.dst_offset = IndexArray({world_size, num_shards});
  Random random(7);
  const std::int64_t all = world_size * num_shards;
  const std::vector<std::int32_t> place =
      random.permutation(static_cast<std::int32_t>(all), static_cast<std::int32_t>(all));
  for (std::size_t i = 0; i < place.size(); ++i) {
    metadata.dst_rank.i64()[i] = place[i] / num_shards;
    metadata.dst_offset.i64()[i] = place[i] % num_shards * shard_rows;
  }
  return metadata;
}

void fill(HostTensor& tensor, int value) {
  std::memset(tensor.bytes().data(), value, tensor.bytes().size());
}

/// The best that memcpy does: one unbroken piece a thread.
void copy_with_memcpy(HostTensor& to, const HostTensor& from, int num_threads) {
  const std::int64_t part = total_bytes / num_threads;
  parallel_for(num_threads, 1, num_threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      std::memcpy(to.bytes().data() + t * part, from.bytes().data() + t * part,
                  static_cast<std::size_t>(part));
    }
  });
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Arguments: bytes of a row, rows of a shard, threads (0: all), elements between rows.
void orchestrate_against_memcpy(benchmark::State& state) {
  const std::int64_t row_bytes = state.range(0);
  const std::int64_t shard_rows = state.range(1);
  const int threads =
      state.range(2) == 0 ? default_num_threads() : static_cast<int>(state.range(2));
  const std::int64_t gap_bytes = state.range(3);
  const std::int64_t rows = total_bytes / world_size / row_bytes;
  const Metadata metadata = shuffled_shards(rows, shard_rows);
  HostTensor source(DType::uint8, {world_size, rows, row_bytes + gap_bytes});
  HostTensor output(DType::uint8, {world_size, rows, row_bytes + gap_bytes});
  fill(source, 1);
  fill(output, 2);
  ConstTensorView from = source.view();
  TensorView to = output.view();
  from.shape[2] = to.shape[2] = row_bytes;

  double memcpy_seconds = 0;
  double job_seconds = 0;
  const SimulateOptions options{Overlap::reject, threads};
  for (auto _ : state) {
    const auto memcpy_start = std::chrono::steady_clock::now();
    copy_with_memcpy(output, source, threads);
    memcpy_seconds += seconds_since(memcpy_start);
    const auto start = std::chrono::steady_clock::now();
    orchestrate_simulate(from, to, metadata, options);
    const double seconds = seconds_since(start);
    job_seconds += seconds;
    state.SetIterationTime(seconds);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * total_bytes);
  state.counters["of_memcpy"] = memcpy_seconds / job_seconds;
  state.counters["memcpy_bytes/s"] =
      static_cast<double>(state.iterations() * total_bytes) / memcpy_seconds;
}

}  // namespace
}  // namespace waybill

BENCHMARK(waybill::orchestrate_against_memcpy)
    ->Name("orchestrate_simulate")
    ->ArgNames({"row_bytes", "shard_rows", "threads", "gap_bytes"})
    ->Args({512, 64, 0, 0})
    ->Args({4096, 1, 0, 0})
    ->Args({4096, 1, 1, 0})
    ->Args({4096, 16, 0, 0})
    ->Args({4096, 16, 1, 0})
    ->Args({4096, 512, 0, 0})
    ->Args({4096, 512, 1, 0})
    ->Args({4096, 16, 0, 64})
    ->Args({16384, 1, 0, 0})
    ->Args({16384, 128, 0, 0})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
