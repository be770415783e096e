#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "../rank/gpu_rank.h"
#include "core/number.h"
#include "cuda/self_test/self_test.h"
#include "routing/homes.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/runtime/sequence_dispatcher.h"

// Kernels make rows and check them (rows), a job says where each row must come from (job), and each
// rank runs the operations (rank).
namespace waybill::cuda {

/// Rows of one tensor whose elements say where they belong: element e of row r of a rank's tensor
/// is codes[number], with the number drawn from (rank, tensor, r, e) in first..first + span - 1.
struct TrialRows {
  unsigned char* data = nullptr;  ///< contiguous
  std::int64_t rows = 0;
  std::int64_t row_elements = 0;
  int element_bytes = 1;
  int tensor = 0;
  const std::uint64_t* codes = nullptr;  ///< on the device: numbers in the dtype
  std::uint32_t first = 0;
  std::uint32_t span = 256;
};

/// The origin of a row, in one word, and the number of its copies; -1: not written.
inline constexpr int rank_shift = 44;
struct TrialSources {
  const std::int64_t* place = nullptr;   ///< [rows]: rank above, row below
  const std::int32_t* copies = nullptr;  ///< [rows]: the number is multiplied by it; null: by 1
};

/// All ranks of a self test read this: parts, and the origin of every row that arrives.
struct TrialJob {
  /// @throws InvalidArgument as compile_dispatch
  TrialJob(const QkvRouting& routing, const TensorFormat& q, const TensorFormat& kv,
           const GpuSelfTestOptions& options);

  [[nodiscard]] std::vector<SequencePart> forward() const {
    return {{&routing.fwd_q, {q}}, {&routing.fwd_kv, {kv, kv}}};
  }
  [[nodiscard]] std::vector<SequencePart> back() const { return {{&routing.rev_q, {q}}}; }
  [[nodiscard]] std::vector<SequencePart> gradient() const { return {{&routing.fwd_kv, {kv, kv}}}; }

  /// Says whether sums of K and V can be checked: their dtype must hold them exactly.
  [[nodiscard]] bool has_gradient() const { return number_span > 0; }

  /// Returns the operations and their bytes if rank r lies on GPU r modulo `gpus`.
  [[nodiscard]] std::vector<GpuSelfTestStep> steps(int gpus) const;

  /// Returns the origins of a rank's own rows: [rows].
  [[nodiscard]] static std::vector<std::int64_t> home_places(std::int32_t rank, std::int64_t rows);

  const QkvRouting& routing;
  TensorFormat q;
  TensorFormat kv;
  GpuSelfTestOptions options;
  std::vector<std::vector<std::int64_t>> q_places;   ///< [W][window rows]
  std::vector<std::vector<std::int64_t>> kv_places;  ///< [W][window rows]
  std::vector<std::vector<std::int32_t>> copies;     ///< [W][own rows of K and V]
  std::vector<std::uint64_t> byte_codes;             ///< [256]: 0..255 themselves
  std::vector<std::uint64_t> codes;                  ///< [257]: 0..256 in the dtype of K and V
  std::uint32_t number_span = 0;                     ///< gradients are 1..span; 0: none
};

namespace {

constexpr unsigned blocks = 1024;
constexpr unsigned threads = 256;

__device__ std::uint32_t number_of(const TrialRows& rows, std::int64_t rank, std::int64_t row,
                                   std::int64_t element) {
  // Finalizer of MurmurHash3 on a word that names the element.
  std::uint64_t x = (static_cast<std::uint64_t>(rank * 8 + rows.tensor) << 48) ^
                    static_cast<std::uint64_t>(row * rows.row_elements + element);
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return rows.first + static_cast<std::uint32_t>((x ^ (x >> 33)) % rows.span);
}

__global__ void fill(TrialRows to, std::int32_t rank) {
  const std::int64_t total = to.rows * to.row_elements;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < total; i += step) {
    const std::uint64_t code =
        to.codes[number_of(to, rank, i / to.row_elements, i % to.row_elements)];
    for (int b = 0; b < to.element_bytes; ++b) {
      to.data[i * to.element_bytes + b] = static_cast<unsigned char>(code >> (8 * b));
    }
  }
}

__global__ void check(TrialRows rows, TrialSources sources, unsigned long long* wrong) {
  const std::int64_t total = rows.rows * rows.row_elements;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  unsigned long long differ = 0;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < total; i += step) {
    const std::int64_t row = i / rows.row_elements;
    const std::int64_t place = sources.place[row];
    if (place < 0) continue;
    const std::int64_t from = place & ((std::int64_t{1} << rank_shift) - 1);
    std::uint32_t number = number_of(rows, place >> rank_shift, from, i % rows.row_elements);
    if (sources.copies != nullptr) number *= static_cast<std::uint32_t>(sources.copies[row]);
    const std::uint64_t code = rows.codes[number];
    bool same = true;
    for (int b = 0; b < rows.element_bytes; ++b) {
      same &= rows.data[i * rows.element_bytes + b] == static_cast<unsigned char>(code >> (8 * b));
    }
    differ += same ? 0 : 1;
  }
  if (differ > 0) atomicAdd(wrong, differ);
}

cudaError_t launch_fill(const TrialRows& to, std::int32_t rank, cudaStream_t stream) {
  if (to.rows > 0) fill<<<blocks, threads, 0, stream>>>(to, rank);
  return cudaGetLastError();
}

/// Adds the elements that differ to *wrong, on the device.
cudaError_t launch_check(const TrialRows& rows, const TrialSources& sources,
                         unsigned long long* wrong, cudaStream_t stream) {
  if (rows.rows > 0) check<<<blocks, threads, 0, stream>>>(rows, sources, wrong);
  return cudaGetLastError();
}

constexpr std::int64_t max_number = 256;  // whole numbers up to it are exact in bfloat16
constexpr std::uint32_t max_numbers = 4;

std::int64_t place_of(std::int32_t rank, std::int64_t row) {
  return (std::int64_t{rank} << rank_shift) | row;
}

std::vector<std::vector<std::int64_t>> places_of(const SparseMetadata& metadata) {
  std::vector<std::vector<std::int64_t>> addresses(metadata.world_size);
  waybill::detail::for_each_entry(metadata,
                                  [&](std::int32_t from, std::int64_t first, std::int64_t entry) {
                                    const std::int64_t len = metadata.seq_len[entry];
                                    for (auto c = metadata.destination_begin(entry);
                                         c < metadata.destination_end(entry) && len > 0; ++c) {
                                      auto& rows = addresses[metadata.dst_rank[c]];
                                      const std::int64_t begin = metadata.dst_offset[c];
                                      if (std::ssize(rows) < begin + len)
                                        rows.resize(begin + len, -1);
                                      for (std::int64_t k = 0; k < len; ++k)
                                        rows[begin + k] = place_of(from, first + k);
                                    }
                                  });
  return addresses;
}

std::vector<std::vector<std::int32_t>> copies_of(const SparseMetadata& metadata) {
  std::vector<std::vector<std::int32_t>> copies(metadata.world_size);
  waybill::detail::for_each_entry(
      metadata, [&](std::int32_t from, std::int64_t /*first*/, std::int64_t entry) {
        const auto count = metadata.destination_end(entry) - metadata.destination_begin(entry);
        copies[from].insert(copies[from].end(), metadata.seq_len[entry],
                            static_cast<std::int32_t>(count));
      });
  return copies;
}

bool encode(DType dtype, float value, std::uint64_t& code) {
  switch (dtype) {
    case DType::bfloat16:
      code = float_to_bfloat16(value);
      return true;
    case DType::float16:
      code = float_to_float16(value);
      return true;
    case DType::float32:
      code = std::bit_cast<std::uint32_t>(value);
      return true;
    case DType::float64:
      code = std::bit_cast<std::uint64_t>(static_cast<double>(value));
      return true;
    default:
      return false;
  }
}

/// Counts the bytes of the busiest GPU: those that cross links, and those that stay.
void count_bytes(GpuSelfTestStep& step, const std::vector<SequencePart>& parts, std::int32_t world,
                 int gpus) {
  std::vector<std::int64_t> out(gpus);
  std::vector<std::int64_t> in(gpus);
  std::vector<std::int64_t> local(gpus);
  for (std::int32_t w = 0; w < world; ++w) {
    const SequencePlan plan = compile_dispatch(parts, Rank{w}, {.chunks = false});
    for (std::int32_t r = 0; r < world; ++r) {
      const std::int64_t bytes = plan.wire_bytes[r];
      if (w % gpus == r % gpus) {
        local[w % gpus] += bytes;
      } else {
        out[w % gpus] += bytes;
        in[r % gpus] += bytes;
      }
    }
  }
  step.local_bytes = *std::ranges::max_element(local);
  step.link_bytes = std::max(*std::ranges::max_element(out), *std::ranges::max_element(in));
}

}  // namespace

TrialJob::TrialJob(const QkvRouting& the_routing, const TensorFormat& the_q,
                   const TensorFormat& the_kv, const GpuSelfTestOptions& the_options)
    : routing(the_routing),
      q(the_q),
      kv(the_kv),
      options(the_options),
      q_places(places_of(routing.fwd_q)),
      kv_places(places_of(routing.fwd_kv)),
      copies(copies_of(routing.fwd_kv)),
      byte_codes(256),
      codes(max_number + 1) {
  std::iota(byte_codes.begin(), byte_codes.end(), std::uint64_t{0});
  bool encoded = true;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    encoded = encode(kv.dtype, static_cast<float>(i), codes[i]) && encoded;
  }
  std::int64_t max_copies = 1;
  for (const auto& of_rank : copies) {
    for (const std::int32_t count : of_rank) {
      max_copies = std::max<std::int64_t>(max_copies, count);
    }
  }
  if (!encoded || max_copies > max_number) return;
  number_span = std::min(max_numbers, static_cast<std::uint32_t>(max_number / max_copies));
}

std::vector<GpuSelfTestStep> TrialJob::steps(int gpus) const {
  std::vector<GpuSelfTestStep> all;
  const auto add = [&](const char* name, const std::vector<SequencePart>& parts) {
    all.push_back({.name = name});
    count_bytes(all.back(), parts, routing.fwd_q.world_size, gpus);
  };
  add("Q, K and V", forward());
  add("Q back", back());
  if (has_gradient()) add("dK and dV", gradient());
  return all;
}

std::vector<std::int64_t> TrialJob::home_places(std::int32_t rank, std::int64_t rows) {
  std::vector<std::int64_t> addresses(rows);
  std::iota(addresses.begin(), addresses.end(), place_of(rank, 0));
  return addresses;
}

namespace {

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
    wrong_ = device_memory(sizeof(unsigned long long), stream_);
  }
  RankTrial(const RankTrial&) = delete;
  RankTrial& operator=(const RankTrial&) = delete;
  ~RankTrial() { (void)cudaStreamDestroy(stream_); }

  /// Sends Q, K and V to the attention layout.
  GpuSelfTestStep run_forward() {
    fill(false);
    GpuSelfTestStep step = time([&] { send(); });
    for (std::size_t t = 0; t < 3; ++t) check(step, rows_of(received_[t], t, false), t);
    keep();
    return finish(step);
  }

  /// Sends the rows of Q back home.
  GpuSelfTestStep run_back() {
    const std::vector<ConstTensorView> inputs{there_[0]};
    GpuSelfTestStep step = time([&] { received_ = dispatcher_.dispatch(back_, inputs, stream()); });
    check(step, rows_of(received_[0], 0, false), {pointer(home_q_), nullptr});
    return finish(step);
  }

  /// Sums the copies of K and V, in numbers that are exact in their dtype.
  GpuSelfTestStep run_gradient() {
    fill(true);
    send();
    keep();
    synchronize();
    world_.barrier();
    const std::vector<ConstTensorView> inputs{there_[1], there_[2]};
    const std::vector<TensorView> outputs{own_[1], own_[2]};
    GpuSelfTestStep step =
        time([&] { dispatcher_.kv_gradient(gradient_, inputs, outputs, stream()); });
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
    auto memory = device_memory(static_cast<std::int64_t>(bytes), stream_);
    cuda_check(cudaMemcpyAsync(memory.get(), table.data(), bytes, cudaMemcpyHostToDevice, stream_),
               "copying to a device");
    synchronize();
    return memory;
  }

  TensorView tensor(const TensorFormat& format, std::int64_t rows) {
    memory_.push_back(device_memory(rows * format.row_bytes(), stream_));
    return {memory_.back().get(), format.dtype, Shape{rows, format.hidden}};
  }

  /// Describes the rows as bytes, or as numbers of the tensor's dtype.
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
      cuda_check(launch_fill(rows_of(own_[t], t, numbers && t > 0), rank_, stream_),
                 "launching a kernel");
    }
    synchronize();
    world_.barrier();
  }

  void send() {
    const std::vector<ConstTensorView> inputs(own_.begin(), own_.end());
    received_ = dispatcher_.dispatch(forward_, inputs, stream());
  }

  /// Copies the received rows, as the next call overwrites them.
  void keep() {
    for (std::size_t t = 0; t < 3; ++t) {
      const std::int64_t bytes = received_[t].shape[0] * forward_.tensors()[t].row_bytes();
      cuda_check(cudaMemcpyAsync(there_[t].data, received_[t].data, bytes, cudaMemcpyDeviceToDevice,
                                 stream_),
                 "copying rows");
    }
  }

  void check(GpuSelfTestStep& step, const TrialRows& rows, std::size_t t) {
    check(step, rows, TrialSources{pointer(addresses_[t]), nullptr});
  }

  void check(GpuSelfTestStep& step, const TrialRows& rows, const TrialSources& sources) {
    step.bytes_checked += rows.rows * rows.row_elements * rows.element_bytes;
    cuda_check(launch_check(rows, sources, static_cast<unsigned long long*>(wrong_.get()), stream_),
               "launching a kernel");
  }

  GpuSelfTestStep finish(GpuSelfTestStep step) {
    synchronize();
    static_assert(sizeof(step.elements_wrong) == sizeof(unsigned long long));
    cuda_check(cudaMemcpyAsync(&step.elements_wrong, wrong_.get(), sizeof(step.elements_wrong),
                               cudaMemcpyDeviceToHost, stream_),
               "copying from a device");
    cuda_check(cudaMemsetAsync(wrong_.get(), 0, sizeof(step.elements_wrong), stream_),
               "clearing memory");
    synchronize();
    world_.barrier();
    return step;
  }

  /// Returns the median time from event to event.
  template <class Call>
  GpuSelfTestStep time(const Call& call) {
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

void add_rank(GpuSelfTestStep& step, const GpuSelfTestStep& rank) {
  step.median_us = std::max(step.median_us, rank.median_us);
  step.bytes_checked += rank.bytes_checked;
  step.elements_wrong += rank.elements_wrong;
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
}  // namespace waybill::cuda

namespace waybill {

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
  const cuda::TrialJob job(routing, q, kv, options);
  GpuSelfTest self_test;
  self_test.world_size = routing.fwd_q.world_size;
  self_test.num_gpus = std::min(gpus, self_test.world_size);
  self_test.link_gb_s = self_test.num_gpus > 1 ? cuda::best_link_gb_s(self_test.num_gpus) : 0;
  self_test.local_gb_s = local_copy_gb_s(std::int64_t{1} << 30);
  self_test.steps = job.steps(gpus);
  std::vector<std::vector<GpuSelfTestStep>> ranks(self_test.world_size);
  run_gpu_thread_world(self_test.world_size,
                       [&](World& world) {
                         auto& mine = ranks[to_int(world.rank())];
                         cuda::RankTrial rank(world, job);
                         world.barrier();
                         mine.push_back(rank.run_forward());
                         mine.push_back(rank.run_back());
                         if (job.has_gradient()) mine.push_back(rank.run_gradient());
                         rank.close();
                       },
                       {.timeout_s = options.timeout_s});
  for (const auto& rank : ranks) {
    for (std::size_t s = 0; s < rank.size(); ++s) cuda::add_rank(self_test.steps[s], rank[s]);
  }
  return self_test;
}

}  // namespace waybill
