#include "gpu_rank.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device_limits.h"
#include "runtime/fingerprint.h"

namespace waybill::cuda {
namespace {

constexpr double nanoseconds = 1e9;
constexpr std::uint64_t shared_device_grace_ns = 300'000'000;
constexpr std::uint64_t look_after_ns = 100'000'000;  // calls that go well rarely wait so long
constexpr double yields_s = 0.02;

/// All ranks of this process: their records tell which rank lost a shared device.
std::mutex ranks_mutex;
std::vector<const GpuRank*> local_ranks;

const char* name_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::dispatch:
    case FaultKind::moe_dispatch:
      return "dispatch";
    case FaultKind::moe_combine:
      return "combine";
    case FaultKind::kv_gradient:
      return "kv_gradient";
    case FaultKind::wait:
      return "wait";
    case FaultKind::barrier:
      return "ep_barrier_all";
    case FaultKind::expert_weights:
      return "fetch_weights";
    case FaultKind::expert_gradients:
      return "add_gradients";
    default:
      return "meet";
  }
}

FingerprintWords words_of(const volatile std::uint64_t (&words)[fault_words]) {
  FingerprintWords copy{};
  std::ranges::copy(words, copy.begin());
  return copy;
}

std::string describe_difference(const FaultRecord& record) {
  return describe_disagreement(name_of(record.call), record.wanted, Rank{record.rank},
                               words_of(record.mine), Rank{record.peer}, words_of(record.theirs));
}

std::string describe_parity(const FaultRecord& record) {
  return concat(name_of(record.call), ": rank ", record.rank, " replayed a graph in epoch ",
                record.seen, ", expected ", record.wanted == 0 ? "even" : "odd",
                ": over several nodes a graph must hold an even number of calls of a dispatcher, "
                "and of dispatches and of combines of a layer; its device is lost now");
}

/// Describes an input of a call of experts that the device found wrong.
std::string describe_input(const FaultRecord& record) {
  const auto value = [&](int i) {
    return static_cast<std::int64_t>(i < fault_words ? record.mine[i]
                                                     : record.theirs[i - fault_words]);
  };
  const std::string call = concat(name_of(record.call), " ", record.wanted, ": ");
  switch (record.kind) {
    case FaultKind::expert_id:
      return concat(call, "exp_indices of rank ", record.rank, " hold id ", value(0), " at token ",
                    value(1), ", topk slot ", value(2), "; expected 0..", value(3) - 1, " or ",
                    value(4), " (dropped)");
    case FaultKind::scatter_size:
      return concat(call, "full_scatter_indices of rank ", record.rank, " has ", value(0),
                    " tokens, expected ", value(1), ": those of all ranks, one rank after another");
    case FaultKind::scatter_position:
      return concat(call, "full_scatter_indices of rank ", record.rank, " hold position ", value(0),
                    " at token ", value(1), ", topk slot ", value(2), " of rank ", value(3),
                    "; expected ", value(4), "..", value(5), ", the rows of rank ", value(6),
                    ", where its expert is");
    case FaultKind::scatter_twice:
      return concat(call, "full_scatter_indices put token ", value(1), ", topk slot ", value(2),
                    " of rank ", value(3), " into row ", value(0), " of rank ", record.rank,
                    ", where another topk slot is; expected a row for each");
    case FaultKind::expert_times:
      return concat(call, "exp_indices of rank ", record.rank, " hold expert ", value(0),
                    " more than max_per_expert = ", value(1), " times");
    default:
      return concat(call, "input of rank ", record.rank, " has ", value(0),
                    " rows, expected at least ", value(1), ", as the dispatch gave");
  }
}

std::string describe(const FaultRecord& record) {
  if (record.kind >= FaultKind::expert_id) return describe_input(record);
  if (record.kind == FaultKind::parity) return describe_parity(record);
  if (record.kind == FaultKind::disagreement) return describe_difference(record);
  return concat(name_of(record.kind), ": rank ", record.rank,
                " waited for signal >= ", record.wanted, " from rank ", record.peer, "; last seen ",
                record.seen);
}

}  // namespace

GpuRank::GpuRank(Rank rank, Topology topology, int device, double timeout_s)
    : rank_(rank), topology_(topology), device_(device), timeout_s_(timeout_s) {
  use();
  cudaDeviceProp properties{};
  cuda_check(cudaGetDeviceProperties(&properties, device), "reading device properties");
  device_name_ = properties.name;
  num_sms_ = properties.multiProcessorCount;
  has_bulk_copies_ = waybill::cuda::has_bulk_copies(device);
  cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  record_ = pinned_memory(sizeof(FaultRecord));
  claimed_ = device_memory(sizeof(unsigned long long), stream_);
  const std::lock_guard lock(ranks_mutex);
  local_ranks.push_back(this);
}

GpuRank::~GpuRank() {
  (void)cudaStreamDestroy(stream_);
  const std::lock_guard lock(ranks_mutex);
  std::erase(local_ranks, this);
}

void GpuRank::use() const { cuda_check(cudaSetDevice(device_), "choosing the device"); }

FaultSink GpuRank::sink(int share) const {
  const auto timeout_ns = static_cast<std::uint64_t>(timeout_s_ * nanoseconds);
  return {.record = static_cast<FaultRecord*>(record_.get()),
          .claimed = static_cast<unsigned long long*>(claimed_.get()),
          .timeout_ns = timeout_ns,
          .look_after_ns = std::min(timeout_ns, look_after_ns),
          .grace_ns = share > 1 ? shared_device_grace_ns : 0,
          .traps = traps_};
}

void GpuRank::give_up() noexcept { static_cast<FaultRecord*>(record_.get())->given_up = 1; }

WaitOptions GpuRank::wait_options(std::string_view operation) const {
  return {.yields_s = yields_s, .check = [this, operation] {
            if (peer_check_) peer_check_(operation);
          }};
}

void GpuRank::wait_for(cudaStream_t stream, std::string_view doing,
                       std::string_view operation) const {
  check(poll_until_done([&] { return cudaStreamQuery(stream); }, wait_options(operation)), doing,
        operation);
}

void GpuRank::wait_for(cudaEvent_t event, std::string_view doing,
                       std::string_view operation) const {
  check(poll_until_done([&] { return cudaEventQuery(event); }, wait_options(operation)), doing,
        operation);
}

/// CUDA can only wait for a device, not query it. So another thread waits, also after this one is
/// interrupted.
void GpuRank::wait_for_device(std::string_view doing, std::string_view operation) const {
  std::packaged_task<cudaError_t()> wait([device = device_] {
    const cudaError_t status = cudaSetDevice(device);
    return status != cudaSuccess ? status : cudaDeviceSynchronize();
  });
  auto status = wait.get_future();
  std::thread waiter(std::move(wait));
  try {
    PollingWait polls(std::numeric_limits<double>::infinity(), wait_options(operation));
    while (status.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      (void)polls.pause();
    }
  } catch (...) {
    waiter.detach();
    throw;
  }
  waiter.join();  // it must have ended when the device's memory is freed
  check(status.get(), doing, operation);
}

const FaultRecord& GpuRank::record() const noexcept {
  return *static_cast<const FaultRecord*>(record_.get());
}

bool GpuRank::has_fault() const noexcept { return record().kind != FaultKind::none; }

std::vector<DeviceFault> reported_faults() {
  const std::lock_guard lock(ranks_mutex);
  std::vector<DeviceFault> faults;
  for (const GpuRank* gpu : local_ranks) {
    if (!gpu->has_fault()) continue;
    const auto sharing = std::ranges::count(local_ranks, gpu->device(), &GpuRank::device);
    faults.push_back({.rank = to_int(gpu->rank()),
                      .device = gpu->device(),
                      .num_ranks = static_cast<std::int32_t>(sharing),
                      .text = describe(gpu->record())});
  }
  return faults;
}

void GpuRank::throw_fault() const {
  if (!has_fault()) return;
  const FaultRecord& record = this->record();
  if (record.kind == FaultKind::parity) throw TransportError(describe_parity(record));
  if (record.kind == FaultKind::disagreement) throw Disagreement(describe_difference(record));
  if (record.kind >= FaultKind::expert_id) throw InvalidArgument(describe_input(record));
  const auto waited_s = static_cast<double>(record.waited_ns) / nanoseconds;
  if (record.given_up != 0 && waited_s < timeout_s_) {
    throw TransportError(concat(name_of(record.kind), ": rank ", rank_,
                                " has given up the calls that its device waited in; the device is "
                                "lost now"));
  }
  throw Timeout({.operation = name_of(record.kind),
                 .rank = to_int(rank_),
                 .peer = record.peer,
                 .wanted = record.wanted,
                 .seen = record.seen,
                 .seconds = waited_s,
                 .peer_node = to_int(topology_.node(Rank{record.peer})),
                 .peer_local = to_int(topology_.local_rank(Rank{record.peer})),
                 .in_call = record.kind != FaultKind::wait && record.kind != FaultKind::arrive});
}

void GpuRank::check(cudaError_t status, std::string_view doing, std::string_view operation) const {
  if (status == cudaSuccess) [[likely]] {
    return;
  }
  // A rank that gave up because another one failed throws the error of that one.
  const FaultRecord& record = this->record();
  const bool names_more =
      record.kind == FaultKind::parity || record.kind >= FaultKind::disagreement;
  if (record.given_up != 0 && !names_more && peer_check_) peer_check_(operation);
  throw_fault();
  {
    const std::lock_guard lock(ranks_mutex);
    for (const GpuRank* gpu : local_ranks) {
      if (gpu->device_ == device_ && gpu->has_fault()) {
        throw PeerFailed(concat(operation, ": rank ", rank_, " lost device ", device_,
                                ", which it shares with rank ", gpu->rank_, ": ",
                                describe(gpu->record())));
      }
    }
  }
  cuda_check(status, doing);
}

}  // namespace waybill::cuda
