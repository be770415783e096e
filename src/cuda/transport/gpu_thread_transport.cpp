#include "gpu_thread_transport.h"

#include <string>
#include <vector>

#include "../executor/cuda_check.h"
#include "../kernel/launch.h"
#include "waybill/core/at.h"
#include "waybill/transport/share_memory.h"

namespace waybill::cuda {
namespace {

using waybill::detail::at;

void enable_peer_access(int device, int peer) {
  if (device == peer) return;
  int can = 0;
  cuda_check(cudaDeviceCanAccessPeer(&can, device, peer), "asking for peer access");
  if (can == 0) {
    throw Unsupported(
        concat("gpu world: device ", device, " cannot reach the memory of device ", peer));
  }
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
    return;
  }
  cuda_check(status, "enabling peer access");
}

class GpuThreadTransport final : public Transport {
 public:
  GpuThreadTransport(std::shared_ptr<Bootstrap> bootstrap, Topology topology,
                     std::shared_ptr<GpuRank> gpu)
      : Transport(bootstrap->rank(), topology, bootstrap->timeout_s()),
        bootstrap_(std::move(bootstrap)),
        gpu_(std::move(gpu)) {
    gpu_->use();
    for (const int peer : all_gather_value(*bootstrap_, gpu_->device(), "gpu world: devices")) {
      enable_peer_access(gpu_->device(), peer);
      if (peer == gpu_->device()) ++share_;
    }
    seen_ = pinned_memory(sizeof(std::uint64_t));
    cuda_check(prepare_meet(), "loading kernels");
  }

  SymmetricBuffer allocate(std::int64_t size_bytes, std::string_view name) override {
    require(size_bytes >= 0, "allocate: size_bytes = ", size_bytes, ", expected >= 0");
    SymmetricBuffer buffer;
    buffer.size_bytes = size_bytes;
    share(buffer, size_bytes, name);
    return buffer;
  }

  SignalPad allocate_signals(std::int64_t count, std::string_view name) override {
    require(count >= 0, "allocate_signals: count = ", count, ", expected >= 0");
    SignalPad pad;
    pad.count = count;
    share(pad, count * static_cast<std::int64_t>(sizeof(std::uint64_t)), name);
    return pad;
  }

  void release(SymmetricBuffer& buffer) override { give_back(buffer); }

  void release(SignalPad& pad) override { give_back(pad); }

  void abandon(std::vector<std::shared_ptr<void>> memory) override {
    abandoned_.insert(abandoned_.end(), memory.begin(), memory.end());
  }

  void put(const SymmetricBuffer& to, const PutRequest& piece) override {
    check_piece(to, piece);
    if (piece.size_bytes == 0) return;
    gpu_->use();
    auto* const base = static_cast<std::byte*>(to.memory[at(to_int(piece.peer))].get());
    gpu_->check(cudaMemcpyAsync(base + piece.dst_offset_bytes, piece.source, at(piece.size_bytes),
                                cudaMemcpyDefault, gpu_->stream()),
                "copying to a peer", "put");
  }

  void signal(Rank peer, SignalSlot slot, std::uint64_t epoch) override {
    check_slot(slot);
    const auto r = at(to_int(peer));
    require(r < slot.pad->memory.size(), "signal: peer = ", peer, ", expected 0..",
            topology().world_size - 1);
    gpu_->use();
    auto* const base = static_cast<std::uint64_t*>(slot.pad->memory[r].get());
    gpu_->check(launch_signal(base + slot.idx, epoch, gpu_->stream()), "launching a signal",
                "signal");
  }

  std::uint64_t wait(SignalSlot slot, std::uint64_t wanted, Rank peer,
                     std::string_view operation) override {
    check_slot(slot);
    gpu_->use();
    const std::uint64_t* const flag = slot.pad->local + slot.idx;
    auto* const seen = static_cast<std::uint64_t*>(seen_.get());
    gpu_->check(launch_wait({flag, wanted, to_int(rank()), to_int(peer), seen}, gpu_->sink(share_),
                            gpu_->stream()),
                "launching a wait", operation);
    gpu_->check(cudaStreamSynchronize(gpu_->stream()), "waiting for a signal", operation);
    return *seen;
  }

  void quiet() override {
    gpu_->use();
    gpu_->check(cudaStreamSynchronize(gpu_->stream()), "waiting for puts", "quiet");
  }

  void barrier(std::string_view operation) override { bootstrap_->barrier(operation); }

 private:
  template <class Symmetric>
  void share(Symmetric& result, std::int64_t size_bytes, std::string_view name) {
    using Element = std::remove_pointer_t<decltype(result.local)>;
    gpu_->use();
    result.memory =
        share_memory(*bootstrap_, device_memory(size_bytes, gpu_->stream()), size_bytes, name);
    for (std::int32_t r = 0; r < topology().world_size; ++r) {
      auto* const part = static_cast<Element*>(result.memory[at(r)].get());
      result.peers.push_back(reach(Rank{r}) == Reach::network ? nullptr : part);
    }
    result.local = result.peers[at(to_int(rank()))];
  }

  /// cudaFree waits for the device, on which a kernel may wait for a rank that has yet to launch
  /// its own: so nobody goes on before the memory of all is free.
  template <class Symmetric>
  void give_back(Symmetric& memory) {
    barrier("release");
    memory = {};
    barrier("release");
  }

  std::shared_ptr<Bootstrap> bootstrap_;
  std::shared_ptr<GpuRank> gpu_;
  std::vector<std::shared_ptr<void>> abandoned_;
  int share_ = 0;               ///< ranks on this rank's device
  std::shared_ptr<void> seen_;  ///< pinned: what a wait saw
};

}  // namespace

std::unique_ptr<Transport> make_gpu_thread_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                     Topology topology,
                                                     std::shared_ptr<GpuRank> gpu) {
  return std::make_unique<GpuThreadTransport>(std::move(bootstrap), topology, std::move(gpu));
}

}  // namespace waybill::cuda
