#include "nccl_communicator.h"

#include <chrono>
#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "waybill/transport/bootstrap.h"

namespace waybill::cuda {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr const char* starting = "NCCL";
constexpr double share_of_deadline = 0.75;
constexpr double abort_patience_s = 5;
constexpr int max_ctas = 8;  // a network path has no more multiprocessors

bool is_good(NcclResult result) {
  return result == NcclResult::success || result == NcclResult::in_progress;
}

/// Asks again and again; returns false when `patience_s` have passed. @throws as PollingWait
template <class IsDone>
bool poll_until(double patience_s, IsDone&& is_done) {
  PollingWait wait(patience_s);
  while (!is_done()) {
    if (!wait.pause()) return false;
  }
  return true;
}

}  // namespace

NcclCommunicator::NcclCommunicator(Bootstrap& bootstrap, const Topology& topology,
                                   std::shared_ptr<GpuRank> gpu)
    : gpu_(std::move(gpu)),
      rank_(bootstrap.rank()),
      patience_s_(bootstrap.timeout_s() * share_of_deadline) {
  run_collectively(bootstrap, starting, [&] { api_ = &nccl_api(); });
  gpu_->use();
  given_up_ = pinned_memory(sizeof(std::uint32_t));
  try {
    start(bootstrap);
    run_collectively(bootstrap, starting, [&] { connect(topology); });
    if (!gpu_->sink(1).traps)
      watch_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
  } catch (...) {
    give_up(abort_patience_s);
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() {
  watch_ = {};  // ends it
  give_up(abort_patience_s);
}

/// If a report does not end the context, kernels of NCCL keep waiting on the device.
void NcclCommunicator::watch(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (!gpu_->has_fault()) continue;
    return give_up(abort_patience_s);
  }
}

void NcclCommunicator::start(Bootstrap& bootstrap) {
  NcclUniqueId id{};
  run_collectively(bootstrap, starting, [&] {
    if (rank_ != Rank{0}) return;
    const NcclResult result = api_->get_unique_id(&id);
    if (result != NcclResult::success) fail(result, "making an id");
  });
  id = all_gather_value(bootstrap, id, starting).front();
  run_collectively(bootstrap, starting, [&] {
    NcclConfig config;
    config.blocking = 0;
    config.max_ctas = max_ctas;
    config.comm_name = "waybill";
    const NcclResult result =
        api_->init_rank(&comm_, bootstrap.world_size(), id, to_int(rank_), &config);
    if (!is_good(result)) fail(result, "starting NCCL");
  });  // an error at once reaches the ranks that would wait for this one
  run_collectively(bootstrap, starting, [&] { settle("starting NCCL"); });
}

/// NCCL connects two ranks at their first message, and then allocates memory and waits for the
/// device. That must not happen while kernels wait for other ranks.
void NcclCommunicator::connect(const Topology& topology) {
  constexpr std::int64_t message_bytes = 8;
  const std::int32_t world = topology.world_size;
  messages_ = device_memory(std::int64_t{2} * world * message_bytes, gpu_->stream());
  auto* const own = static_cast<std::byte*>(messages_.get());
  std::vector<NcclPiece> sent;
  std::vector<NcclPiece> received;
  for (std::int32_t r = 0; r < world; ++r) {
    if (topology.node(Rank{r}) == topology.node(rank_)) continue;
    sent.push_back({own + r * message_bytes, message_bytes, r});
    received.push_back({own + (world + r) * message_bytes, message_bytes, r});
  }
  exchange(sent, received, gpu_->stream(), "connecting to other nodes");
  cudaError_t status = cudaSuccess;
  const bool done = poll_until(patience_s_, [&] {
    check("connecting to other nodes");
    status = cudaStreamQuery(gpu_->stream());
    return status != cudaErrorNotReady;
  });
  if (!done) {
    throw TransportError(concat("NCCL: rank ", rank_,
                                " got no message from all ranks of other "
                                "nodes within ",
                                patience_s_, " s (NCCL_DEBUG=INFO says more)"));
  }
  gpu_->check(status, "connecting to other nodes", starting);
}

void NcclCommunicator::exchange(std::span<const NcclPiece> sent,
                                std::span<const NcclPiece> received, cudaStream_t stream,
                                std::string_view operation) {
  if (sent.empty() && received.empty()) return;
  const std::lock_guard lock(mutex_);
  require_alive(operation);
  NcclResult result = api_->group_start();
  const auto add = [&](NcclResult added) {
    if (is_good(result)) result = added;
  };
  for (const NcclPiece& piece : sent) {
    add(api_->send(piece.data, piece.size_bytes, nccl_int8, piece.peer, comm_, stream));
  }
  for (const NcclPiece& piece : received) {
    add(api_->receive(piece.data, piece.size_bytes, nccl_int8, piece.peer, comm_, stream));
  }
  add(api_->group_end());
  if (!is_good(result)) fail(result, operation);
  settle(operation);
}

/// Returns when the host part of NCCL's last call is done.
void NcclCommunicator::settle(std::string_view doing) const {
  NcclResult state = NcclResult::in_progress;
  const bool done = poll_until(patience_s_, [&] {
    const NcclResult asked = api_->get_async_error(comm_, &state);
    if (asked != NcclResult::success) state = asked;
    return state != NcclResult::in_progress || gpu_->has_fault();
  });
  gpu_->throw_fault();
  if (!done) {
    throw TransportError(concat(doing, ": rank ", rank_, " waited ", patience_s_,
                                " s for NCCL, which waits for other ranks (NCCL_SOCKET_IFNAME "
                                "names the network interface, NCCL_DEBUG=INFO says more)"));
  }
  if (state != NcclResult::success) fail(state, doing);
}

void NcclCommunicator::require_alive(std::string_view doing) const {
  gpu_->throw_fault();
  if (comm_ == nullptr) throw TransportError(concat(doing, ": NCCL was given up"));
}

void NcclCommunicator::check(std::string_view operation) const {
  const std::lock_guard lock(mutex_);
  require_alive(operation);
  NcclResult state = NcclResult::success;
  const NcclResult asked = api_->get_async_error(comm_, &state);
  if (asked != NcclResult::success) state = asked;
  if (!is_good(state)) fail(state, operation);
}

void NcclCommunicator::fail(NcclResult result, std::string_view doing) const {
  const char* const what = api_->error_text(result);
  const char* const more = api_->last_error(comm_);
  throw TransportError(concat(doing, ": rank ", rank_, ": NCCL ", nccl_version_text(api_->version),
                              ": ", what != nullptr ? what : "an error without a text",
                              more != nullptr && *more != '\0' ? ": " : "",
                              more != nullptr ? more : ""));
}

/// The abort waits for NCCL's threads, which a lost device may hold up: then they last until the
/// end of the process.
void NcclCommunicator::give_up(double patience_s) noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  *static_cast<volatile std::uint32_t*>(given_up_.get()) = 1;
  try {
    std::packaged_task<void()> task(
        [api = api_, comm = std::exchange(comm_, nullptr)] { (void)api->abort(comm); });
    const auto done = task.get_future();
    std::thread(std::move(task)).detach();
    (void)done.wait_for(Seconds(patience_s));
  } catch (const std::exception&) {  // no thread: the communicator lasts until the process ends
    comm_ = nullptr;
  }
}

}  // namespace waybill::cuda
