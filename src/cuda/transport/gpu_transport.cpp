#include "gpu_transport.h"

#include <algorithm>
#include <utility>

#include "../device/arrive_kernels.h"
#include "network_paths.h"
#include "waybill/transport/bootstrap.h"

namespace waybill::cuda {

GpuTransport::GpuTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node,
                           std::shared_ptr<GpuRank> gpu, int share)
    : PeerTransport(std::move(bootstrap), ranks_per_node), gpu_(std::move(gpu)), share_(share) {
  gpu_->use();
  seen_ = pinned_memory(sizeof(std::uint64_t));
  staged_table_ = pinned_memory(topology().world_size * std::int64_t{sizeof(void*)});
  cuda_check(prepare_arrive_and_wait(), "loading kernels");
  gpu_->ask_while_waiting([this](std::string_view operation) { check_peers(operation, rank()); });
  if (const auto scope = this->bootstrap().failure_scope(); scope != nullptr) {
    ended_ = scope->on_end([gpu = gpu_.get()] { gpu->give_up(); });
  }
}

void GpuTransport::use_peer_memory(PeerMemory where) noexcept {
  peer_memory_ = where;
  if (where == PeerMemory::host) gpu_->forgo_bulk_copies();
}

GpuTransport::~GpuTransport() { gpu_->ask_while_waiting({}); }

void GpuTransport::give_up(const char* after, std::string_view reason) noexcept {
  gpu_->give_up();
  PeerTransport::give_up(after, reason);
}

void GpuTransport::put(const SymmetricBuffer& to, const PutRequest& piece) {
  std::byte* const address = address_of(to, piece);
  if (piece.size_bytes == 0) return;
  gpu_->use();
  gpu_->check(
      cudaMemcpyAsync(address, piece.source, piece.size_bytes, cudaMemcpyDefault, gpu_->stream()),
      "copying to a peer", "put");
}

void GpuTransport::signal(Rank peer, SignalSlot slot, std::uint64_t epoch) {
  std::uint64_t* const flag = slot_of(peer, slot);
  gpu_->use();
  gpu_->check(launch_signal(flag, epoch, gpu_->stream()), "launching a signal", "signal");
}

std::uint64_t GpuTransport::wait(SignalSlot slot, std::uint64_t wanted, Rank peer,
                                 std::string_view operation) {
  check_slot(slot);
  gpu_->use();
  const std::uint64_t* const flag = slot.pad->local + slot.idx;
  gpu_->check(
      launch_wait({flag, wanted, to_int(rank()), to_int(peer), seen()}, sink(), gpu_->stream()),
      "launching a wait", operation);
  wait_stream("waiting for a signal", operation);
  gpu_->throw_fault();
  return *seen();
}

void GpuTransport::quiet() {
  gpu_->use();
  wait_stream("waiting for puts", "quiet");
}

std::shared_ptr<void> GpuTransport::make_table(const Parts& parts, std::string_view name) {
  std::shared_ptr<void> table;
  run_collectively(bootstrap(), concat("allocate(", name, ")"), [&] {
    gpu_->use();
    const std::size_t bytes = parts.size() * sizeof(void*);
    table = device_memory(static_cast<std::int64_t>(bytes), gpu_->stream());
    std::ranges::transform(parts, static_cast<void**>(staged_table_.get()),
                           [](const auto& part) { return part.get(); });
    gpu_->check(cudaMemcpyAsync(table.get(), staged_table_.get(), bytes, cudaMemcpyHostToDevice,
                                gpu_->stream()),
                "writing a table of memory", name);
    gpu_->wait_for(gpu_->stream(), "writing a table of memory", name);
  });
  return table;
}

void GpuTransport::wait_stream(std::string_view doing, std::string_view operation) {
  try {
    gpu_->wait_for(gpu_->stream(), doing, operation);
  } catch (const Interrupted& error) {
    give_up("an interrupt: ", error.what());
    throw;
  }
}

std::unique_ptr<NetworkPath> GpuTransport::make_network_path() {
  return make_peer_path(gpu_, topology(), share_);
}

}  // namespace waybill::cuda
