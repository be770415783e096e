#include "measure.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>

#include "rows.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill::bench {
namespace {

void check(cudaError_t status, const char* doing) {
  if (status != cudaSuccess) {
    throw InternalError(concat("measure: ", doing, ": ", cudaGetErrorString(status)));
  }
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values.empty() ? 0 : values[values.size() / 2];
}

/// One rank's memory and queue.
class RankSetup {
 public:
  RankSetup(World& world, const Workload& workload, const MeasureOptions& options)
      : world_(world), workload_(workload), dispatcher_(world, options.dispatcher) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
    plan_ = make_plan();
    plan_ = {};  // its memory is kept for the next one
    synchronize();
    world_.barrier();  // another rank's allocation would hold this one up
    const auto start = std::chrono::steady_clock::now();
    plan_ = make_plan();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    compile_us_ = took.count();
    dispatcher_.reserve(plan_.window_bytes(), stream());
    const PlanHandle& plan = plan_;
    for (std::size_t t = 0; t < plan.tensors().size(); ++t) {
      const std::int64_t rows = is_dispatch() ? plan.own_rows()[t] : plan.window_rows()[t];
      inputs_.push_back(tensor(plan.tensors()[t], rows));
      fill_rows(inputs_.back(), to_int(world.rank()), t);
      if (!is_dispatch()) outputs_.push_back(tensor(plan.tensors()[t], plan.own_rows()[t]));
    }
    views_.assign(inputs_.begin(), inputs_.end());
  }
  RankSetup(const RankSetup&) = delete;
  RankSetup& operator=(const RankSetup&) = delete;
  ~RankSetup() {
    for (void* memory : memory_) (void)cudaFree(memory);
    (void)cudaStreamDestroy(stream_);
  }

  void call() {
    if (is_dispatch()) {
      outputs_ = dispatcher_.dispatch(plan_, views_, stream());
    } else {
      dispatcher_.kv_gradient(plan_, views_, outputs_, stream());
    }
  }

  void synchronize() { dispatcher_.synchronize(stream()); }

  void check_outputs() {
    const auto r = to_int(world_.rank());
    std::size_t t = 0;
    for (const SequencePart& part : workload_.parts()) {
      for (std::size_t i = 0; i < part.tensors.size(); ++i, ++t) {
        (is_dispatch() ? check_rows : check_sums)(outputs_[t], *part.metadata, r, t);
      }
    }
  }

  /// Median time from event to event.
  double time_calls(int calls) {
    std::vector<cudaEvent_t> events(calls + 1);
    for (cudaEvent_t& event : events) check(cudaEventCreate(&event), "making an event");
    check(cudaEventRecord(events[0], stream_), "timing");
    for (int i = 1; i <= calls; ++i) {
      call();
      check(cudaEventRecord(events[i], stream_), "timing");
    }
    synchronize();
    std::vector<double> times;
    for (int i = 1; i <= calls; ++i) {
      float ms = 0;
      check(cudaEventElapsedTime(&ms, events[i - 1], events[i]), "timing");
      times.push_back(ms * 1e3);
    }
    for (cudaEvent_t event : events) (void)cudaEventDestroy(event);
    return median(std::move(times));
  }

  /// Time of a call when `calls` (an even number) are one graph.
  double time_graph(int calls, int replays) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing");
    for (int i = 0; i < calls; ++i) call();
    check(cudaStreamEndCapture(stream_, &graph), "capturing");
    check(cudaGraphInstantiate(&ready, graph, 0), "making a graph");
    cudaEvent_t begun = nullptr;
    cudaEvent_t ended = nullptr;
    check(cudaEventCreate(&begun), "making an event");
    check(cudaEventCreate(&ended), "making an event");
    std::vector<double> times;
    for (int i = 0; i < replays + 2; ++i) {
      check(cudaEventRecord(begun, stream_), "timing");
      check(cudaGraphLaunch(ready, stream_), "replaying");
      check(cudaEventRecord(ended, stream_), "timing");
      synchronize();
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begun, ended), "timing");
      if (i >= 2) times.push_back(ms * 1e3 / calls);
    }
    (void)cudaGraphExecDestroy(ready);
    (void)cudaGraphDestroy(graph);
    return median(std::move(times));
  }

  [[nodiscard]] double compile_us() const { return compile_us_; }
  void close() { dispatcher_.close(); }

 private:
  [[nodiscard]] bool is_dispatch() const {
    return workload_.operation == SequenceOperation::dispatch;
  }
  [[nodiscard]] Stream stream() const { return {stream_}; }
  [[nodiscard]] PlanHandle make_plan() {
    const auto parts = workload_.parts();
    return is_dispatch() ? dispatcher_.plan_dispatch(parts, stream())
                         : dispatcher_.plan_kv_gradient(parts, stream());
  }

  TensorView tensor(const TensorFormat& format, std::int64_t rows) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, std::max<std::int64_t>(rows * format.row_bytes(), 16)), "allocating");
    memory_.push_back(memory);
    return {memory, format.dtype, Shape{rows, format.hidden}};
  }

  World& world_;
  const Workload& workload_;
  SequenceDispatcher dispatcher_;
  cudaStream_t stream_ = nullptr;
  PlanHandle plan_;
  double compile_us_ = 0;
  std::vector<void*> memory_;
  std::vector<TensorView> inputs_;
  std::vector<ConstTensorView> views_;
  std::vector<TensorView> outputs_;
};

}  // namespace

CallTimes measure_rank(World& world, const Workload& workload, const MeasureOptions& options) {
  RankSetup setup(world, workload, options);
  CallTimes times;
  world.barrier();
  for (int i = 0; i < options.warmup; ++i) setup.call();
  setup.synchronize();
  setup.check_outputs();
  world.barrier();
  times.median_us = setup.time_calls(options.calls);
  setup.check_outputs();
  world.barrier();
  if (options.graph) times.graph_us = setup.time_graph(20, 10);
  times.compile_us = setup.compile_us();
  world.barrier();
  setup.close();
  return times;
}

CallTimes slowest(std::span<const CallTimes> ranks) {
  CallTimes result;
  for (const CallTimes& times : ranks) {
    result.median_us = std::max(result.median_us, times.median_us);
    result.graph_us = std::max(result.graph_us, times.graph_us);
    result.compile_us = std::max(result.compile_us, times.compile_us);
  }
  return result;
}

CallTimes measure(std::int32_t world_size, const Workload& workload,
                  const MeasureOptions& options) {
  std::vector<CallTimes> ranks(world_size);
  run_gpu_thread_world(
      world_size,
      [&](World& world) { ranks[to_int(world.rank())] = measure_rank(world, workload, options); },
      {.timeout_s = 30});
  return slowest(ranks);
}

}  // namespace waybill::bench
