#pragma nv_diag_suppress 554  // tensor_view.h: a view of constants converts to itself

#include "cuda/self_test/self_test.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "../rank/cuda_check.h"
#include "cuda/link_probe.h"
#include "self_test_job.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill {
namespace {

using cuda::cuda_check;
using cuda::TrialJob;
using cuda::TrialRows;
using cuda::TrialSources;

/// What one rank saw of one operation.
struct RankStep {
  double median_us = 0;
  std::int64_t bytes_checked = 0;
  unsigned long long wrong = 0;
};

/// One rank's tensors, queue and plans.
class RankTrial {
 public:
  RankTrial(World& world, const TrialJob& job)
      : world_(world),
        job_(job),
        rank_(to_int(world.rank())),
        dispatcher_(world, {.num_sms = job.options.num_sms}) {
    cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
    forward_ = dispatcher_.plan_dispatch(job.forward(), stream());
    back_ = dispatcher_.plan_dispatch(job.back(), stream());
    gradient_ = dispatcher_.plan_kv_gradient(job.has_gradient() ? job.gradient() : none_, stream());
    dispatcher_.reserve(
        std::max({forward_.window_bytes(), back_.window_bytes(), gradient_.window_bytes()}),
        stream());
    const PlanHandle& plan = forward_;
    for (std::size_t t = 0; t < 3; ++t) {
      own_.push_back(tensor(plan.tensors()[t], plan.own_rows()[t]));
      there_.push_back(tensor(plan.tensors()[t], plan.window_rows()[t]));
    }
    codes_ = upload(job.codes);
    byte_codes_ = upload(job.byte_codes);
    addresses_[0] = upload(job.q_places[rank_]);
    addresses_[1] = addresses_[2] = upload(job.kv_places[rank_]);
    home_q_ = upload(TrialJob::home_places(rank_, plan.own_rows()[0]));
    home_kv_ = upload(TrialJob::home_places(rank_, plan.own_rows()[1]));
    copies_ = upload(job.copies[rank_]);
    wrong_ = cuda::device_memory(sizeof(unsigned long long), stream_);
  }
  RankTrial(const RankTrial&) = delete;
  RankTrial& operator=(const RankTrial&) = delete;
  ~RankTrial() { (void)cudaStreamDestroy(stream_); }

  /// Q, K and V to where attention is.
  RankStep run_forward() {
    fill(false);
    RankStep step = time([&] { send(); });
    for (std::size_t t = 0; t < 3; ++t) check(step, rows_of(received_[t], t, false), t);
    keep();
    return finish(step);
  }

  /// What came of Q back home.
  RankStep run_back() {
    const std::vector<ConstTensorView> inputs{there_[0]};
    RankStep step = time([&] { received_ = dispatcher_.dispatch(back_, inputs, stream()); });
    check(step, rows_of(received_[0], 0, false), {pointer(home_q_), nullptr});
    return finish(step);
  }

  /// The sums of the copies of K and V, of numbers that are exact in their dtype.
  RankStep run_gradient() {
    fill(true);
    send();
    keep();
    synchronize();
    world_.barrier();
    const std::vector<ConstTensorView> inputs{there_[1], there_[2]};
    const std::vector<TensorView> outputs{own_[1], own_[2]};
    RankStep step = time([&] { dispatcher_.kv_gradient(gradient_, inputs, outputs, stream()); });
    const TrialSources home{pointer(home_kv_), static_cast<const std::int32_t*>(copies_.get())};
    for (std::size_t t = 1; t < 3; ++t) check(step, rows_of(own_[t], t, true), home);
    return finish(step);
  }

  void close() {
    dispatcher_.close();
    world_.barrier();
  }

 private:
  [[nodiscard]] Stream stream() const { return {stream_}; }
  void synchronize() { dispatcher_.synchronize(stream()); }
  static const std::int64_t* pointer(const std::shared_ptr<void>& table) {
    return static_cast<const std::int64_t*>(table.get());
  }

  template <class Element>
  std::shared_ptr<void> upload(const std::vector<Element>& table) {
    const std::size_t bytes = table.size() * sizeof(Element);
    auto memory = cuda::device_memory(static_cast<std::int64_t>(bytes), stream_);
    cuda_check(cudaMemcpyAsync(memory.get(), table.data(), bytes, cudaMemcpyHostToDevice, stream_),
               "copying to a device");
    synchronize();
    return memory;
  }

  TensorView tensor(const TensorFormat& format, std::int64_t rows) {
    memory_.push_back(cuda::device_memory(rows * format.row_bytes(), stream_));
    return {memory_.back().get(), format.dtype, Shape{rows, format.hidden}};
  }

  /// Bytes, or numbers of the tensor's dtype.
  [[nodiscard]] TrialRows rows_of(const TensorView& view, std::size_t t, bool numbers) const {
    const std::int64_t element_bytes = dtype_bytes(view.dtype);
    TrialRows rows;
    rows.data = reinterpret_cast<unsigned char*>(view.data);
    rows.rows = view.shape[0];
    rows.row_elements = numbers ? view.shape[1] : view.shape[1] * element_bytes;
    rows.element_bytes = numbers ? static_cast<int>(element_bytes) : 1;
    rows.tensor = static_cast<int>(t);
    rows.codes = static_cast<const std::uint64_t*>((numbers ? codes_ : byte_codes_).get());
    rows.first = numbers ? 1 : 0;
    rows.span = numbers ? job_.number_span : 256;
    return rows;
  }

  void fill(bool numbers) {
    for (std::size_t t = 0; t < 3; ++t) {
      // Q keeps its bytes: its dtype need not be a number's.
      cuda_check(cuda::launch_fill_self_test(rows_of(own_[t], t, numbers && t > 0), rank_, stream_),
                 "launching a kernel");
    }
    synchronize();
    world_.barrier();
  }

  void send() {
    const std::vector<ConstTensorView> inputs(own_.begin(), own_.end());
    received_ = dispatcher_.dispatch(forward_, inputs, stream());
  }

  /// What was received, to where the next call does not write.
  void keep() {
    for (std::size_t t = 0; t < 3; ++t) {
      const std::int64_t bytes = received_[t].shape[0] * forward_.tensors()[t].row_bytes();
      cuda_check(cudaMemcpyAsync(there_[t].data, received_[t].data, bytes, cudaMemcpyDeviceToDevice,
                                 stream_),
                 "copying rows");
    }
  }

  void check(RankStep& step, const TrialRows& rows, std::size_t t) {
    check(step, rows, TrialSources{pointer(addresses_[t]), nullptr});
  }

  void check(RankStep& step, const TrialRows& rows, const TrialSources& sources) {
    step.bytes_checked += rows.rows * rows.row_elements * rows.element_bytes;
    cuda_check(cuda::launch_check_self_test(
                   rows, sources, static_cast<unsigned long long*>(wrong_.get()), stream_),
               "launching a kernel");
  }

  RankStep finish(RankStep step) {
    synchronize();
    cuda_check(cudaMemcpyAsync(&step.wrong, wrong_.get(), sizeof(step.wrong),
                               cudaMemcpyDeviceToHost, stream_),
               "copying from a device");
    cuda_check(cudaMemsetAsync(wrong_.get(), 0, sizeof(step.wrong), stream_), "clearing memory");
    synchronize();
    world_.barrier();
    return step;
  }

  /// Median time from event to event.
  template <class Call>
  RankStep time(const Call& call) {
    for (int i = 0; i < job_.options.warmup; ++i) call();
    synchronize();
    world_.barrier();
    std::vector<cudaEvent_t> events(job_.options.calls + 1);
    for (cudaEvent_t& event : events) cuda_check(cudaEventCreate(&event), "making an event");
    cuda_check(cudaEventRecord(events[0], stream_), "timing");
    for (std::size_t i = 1; i < events.size(); ++i) {
      call();
      cuda_check(cudaEventRecord(events[i], stream_), "timing");
    }
    synchronize();
    std::vector<float> times(events.size() - 1);
    for (std::size_t i = 0; i < times.size(); ++i) {
      cuda_check(cudaEventElapsedTime(&times[i], events[i], events[i + 1]), "timing");
    }
    for (cudaEvent_t event : events) (void)cudaEventDestroy(event);
    std::ranges::sort(times);
    return {.median_us = 1e3 * static_cast<double>(times[times.size() / 2])};
  }

  World& world_;
  const TrialJob& job_;
  std::int32_t rank_;
  SequenceDispatcher dispatcher_;
  cudaStream_t stream_ = nullptr;
  std::vector<SequencePart> none_{{&job_.routing.fwd_kv, {}}};
  PlanHandle forward_;
  PlanHandle back_;
  PlanHandle gradient_;
  std::vector<std::shared_ptr<void>> memory_;
  std::vector<TensorView> own_;       ///< Q, K, V in the MLP layout
  std::vector<TensorView> there_;     ///< and in the attention layout
  std::vector<TensorView> received_;  ///< in the window
  std::shared_ptr<void> codes_, byte_codes_, addresses_[3], home_q_, home_kv_, copies_, wrong_;
};

void add_rank(GpuSelfTestStep& step, const RankStep& rank) {
  step.median_us = std::max(step.median_us, rank.median_us);
  step.bytes_checked += rank.bytes_checked;
  step.elements_wrong += static_cast<std::int64_t>(rank.wrong);
}

double best_link_gb_s(int gpus) {
  constexpr std::int64_t bytes = std::int64_t{64} << 20;
  double best = 0;
  for (const int sms : {8, 16, 132}) {
    best = std::max(best, link_gb_s(gpus, LinkWay::push_bulk, sms, bytes));
  }
  return best;
}

}  // namespace

double GpuSelfTest::limit_us(const GpuSelfTestStep& step) const {
  const auto time_us = [](std::int64_t bytes, double gb_s) {
    return gb_s > 0 ? static_cast<double>(bytes) / gb_s / 1e3 : 0;
  };
  return std::max(time_us(step.link_bytes, link_gb_s), time_us(2 * step.local_bytes, local_gb_s));
}

bool GpuSelfTest::passed() const {
  return std::ranges::all_of(steps, [](const GpuSelfTestStep& s) { return s.elements_wrong == 0; });
}

GpuSelfTest try_on_gpus(const QkvRouting& routing, const TensorFormat& q, const TensorFormat& kv,
                        const GpuSelfTestOptions& options) {
  require(options.num_sms >= 0, "try_on_gpus: num_sms = ", options.num_sms, ", expected >= 0");
  require(options.warmup >= 0 && options.calls >= 1, "try_on_gpus: warmup = ", options.warmup,
          " and calls = ", options.calls, ", expected >= 0 and >= 1");
  const int gpus = num_gpus();
  if (gpus == 0) throw Unsupported("try_on_gpus: there is no GPU");
  const TrialJob job(routing, q, kv, options);
  GpuSelfTest self_test;
  self_test.world_size = routing.fwd_q.world_size;
  self_test.num_gpus = std::min(gpus, self_test.world_size);
  self_test.link_gb_s = self_test.num_gpus > 1 ? best_link_gb_s(self_test.num_gpus) : 0;
  self_test.local_gb_s = local_copy_gb_s(std::int64_t{1} << 30);
  self_test.steps = job.steps(gpus);
  std::vector<std::vector<RankStep>> ranks(self_test.world_size);
  run_gpu_thread_world(self_test.world_size,
                       [&](World& world) {
                         auto& mine = ranks[to_int(world.rank())];
                         RankTrial rank(world, job);
                         world.barrier();
                         mine.push_back(rank.run_forward());
                         mine.push_back(rank.run_back());
                         if (job.has_gradient()) mine.push_back(rank.run_gradient());
                         rank.close();
                       },
                       {.timeout_s = options.timeout_s});
  for (const auto& rank : ranks) {
    for (std::size_t s = 0; s < rank.size(); ++s) add_rank(self_test.steps[s], rank[s]);
  }
  return self_test;
}

}  // namespace waybill
