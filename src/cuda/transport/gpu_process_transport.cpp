#include <algorithm>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "../nccl/nccl_communicator.h"
#include "gpu_place.h"
#include "gpu_transport.h"
#include "network_paths.h"
#include "rank_memory.h"
#include "transport/peer_status.h"
#include "transport/share_memory.h"
#include "waybill/transport/bootstrap.h"

namespace waybill::cuda {
namespace {

constexpr const char* process_world = "make_gpu_process_world";

/// Other ranks may have it mapped; CUDA forbids to free it before they have closed it.
std::shared_ptr<void> make_own(std::int64_t size_bytes, cudaStream_t stream) {
  return keep_until_released(make_shared_block(size_bytes, stream));
}

const char* name_of(NetworkBackend backend) {
  if (backend == NetworkBackend::peer) return "peer";
  return backend == NetworkBackend::nccl ? "nccl" : "automatic";
}

class GpuProcessTransport final : public GpuTransport {
 public:
  GpuProcessTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node,
                      std::shared_ptr<GpuRank> gpu, const std::vector<GpuPlace>& places,
                      NetworkBackend backend)
      : GpuTransport(std::move(bootstrap), ranks_per_node, gpu, 1) {
    const Setting settings[] = {{"wire", name_of(backend)}};
    require_same(process_world, settings);
    require_own_processes(places, process_world);
    require_nodes_on_hosts(places, topology().ranks_per_node, process_world);
    const bool one_host = on_one_host(this->bootstrap());
    const bool by_nccl = topology().num_nodes() > 1 && backend != NetworkBackend::peer &&
                         (backend == NetworkBackend::nccl || !one_host);
    if (!by_nccl) require_one_host(this->bootstrap(), process_world);
    first_mapped_ = by_nccl ? to_int(rank()) - to_int(topology().local_rank(rank())) : 0;
    num_mapped_ = by_nccl ? topology().ranks_per_node : topology().world_size;
    choose_memory(places, by_nccl);
    if (one_host) watch_peers(peer_status());
    if (by_nccl) {
      network_ = std::make_shared<NcclCommunicator>(this->bootstrap(), topology(), std::move(gpu));
    }
  }

  [[nodiscard]] std::unique_ptr<NetworkPath> make_network_path() override {
    if (network_ == nullptr) return GpuTransport::make_network_path();
    return make_nccl_path(shared_gpu(), topology(), share(), network_);
  }

  void put(const SymmetricBuffer& to, const PutRequest& piece) override {
    require_mapped(piece.peer, "put");
    GpuTransport::put(to, piece);
  }

  void signal(Rank peer, SignalSlot slot, std::uint64_t epoch) override {
    require_mapped(peer, "signal");
    GpuTransport::signal(peer, slot, epoch);
  }

 private:
  void choose_memory(const std::vector<GpuPlace>& places, bool by_nccl) {
    PeerAccessWish wish{};
    std::string trouble;
    run_collectively(bootstrap(), process_world, [&] {
      wish = peer_access_wish(std::getenv("WAYBILL_PEER_ACCESS"));
      trouble = missing_peer_access(std::span(places).subspan(first_mapped_, num_mapped_),
                                    first_mapped_, gpu().device());
    });
    const std::string not_mapped =
        try_to_map(bootstrap(), process_world, places, first_mapped_, num_mapped_, gpu());
    if (trouble.empty()) trouble = not_mapped;
    use_peer_memory(agree_on_peer_memory(
        bootstrap(), process_world, wish, trouble,
        by_nccl ? "NCCL connects the nodes, and sends from memory of devices" : ""));
    if (peer_memory() == PeerMemory::host) share_host_memory();
  }

  /// Containers may share no memory: then all ranks throw here.
  void share_host_memory() {
    shared_.emplace(bootstrap());
    try {
      (void)shared_->make(bootstrap(), 1, "memory of the host");
    } catch (const TransportError& error) {
      throw Unsupported(
          concat(process_world,
                 ": GPUs without access to each other's memory, and the ranks share none of the "
                 "host's: ",
                 error.what(),
                 ". Give them one /dev/shm (--ipc=host), or make each rank "
                 "a node of its own over NCCL (ranks_per_node = 1, NetworkBackend::nccl)"));
    }
  }

  void give_up(const char* after, std::string_view reason) noexcept override {
    GpuTransport::give_up(after, reason);
    if (network_ != nullptr) network_->give_up(0);
  }

  /// Null if the ranks have no shared memory: then only deadlines tell which rank is gone.
  [[nodiscard]] std::shared_ptr<PeerStatus> peer_status() {
    try {
      return make_peer_status(bootstrap());
    } catch (const TransportError&) {
      return nullptr;
    }
  }

  [[nodiscard]] bool is_mapped(std::int32_t r) const {
    return first_mapped_ <= r && r < first_mapped_ + num_mapped_;
  }

  void require_mapped(Rank peer, const char* operation) const {
    if (is_mapped(to_int(peer))) return;
    throw Unsupported(concat(operation, ": rank ", peer, " is on another node, and NCCL sends ",
                             "nothing that the other rank does not ask for, expected ranks ",
                             first_mapped_, "..", first_mapped_ + num_mapped_ - 1));
  }

  Parts make_parts(std::int64_t size_bytes, std::string_view name) override {
    gpu().use();
    if (shared_) return make_pinned_parts(size_bytes, name);
    const std::string operation = concat("allocate(", name, ")");
    const std::size_t me = to_int(rank());
    Parts parts(topology().world_size);
    SharedBlockInfo mine{size_bytes, {}};
    run_collectively(bootstrap(), operation, [&] {
      parts[me] = make_own(size_bytes, gpu().stream());
      cuda_check(cudaIpcGetMemHandle(&mine.handle, parts[me].get()), "making a handle of memory");
    });
    const auto blocks = all_gather_value(bootstrap(), mine, operation);
    require_same_size(blocks, &SharedBlockInfo::size_bytes, size_bytes, operation);
    run_collectively(bootstrap(), operation, [&] {
      for (std::size_t r = 0; r < blocks.size(); ++r) {
        if (r == me || !is_mapped(static_cast<std::int32_t>(r))) continue;
        parts[r] = open_shared(blocks[r].handle, r, gpu().device());
      }
    });
    return parts;
  }

  Parts make_pinned_parts(std::int64_t size_bytes, std::string_view name) {
    Parts parts = shared_->make(bootstrap(), size_bytes, name);
    run_collectively(bootstrap(), concat("allocate(", name, ")"), [&] {
      for (auto& part : parts) part = pin_part(std::move(part), size_bytes);
    });
    return parts;
  }

  void free_parts(Parts parts) override {
    std::shared_ptr<void> own = std::move(parts[to_int(rank())]);
    parts.clear();
    bootstrap().barrier("release");  // no rank has it mapped any more
    note_release(own);
  }

  std::int32_t first_mapped_ = 0;
  std::int32_t num_mapped_ = 0;
  std::shared_ptr<NcclCommunicator> network_;
  std::optional<waybill::detail::ProcessMemory> shared_;  ///< where memory is the host's
};

}  // namespace

std::unique_ptr<GpuTransport> make_gpu_process_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                         std::int32_t ranks_per_node,
                                                         std::shared_ptr<GpuRank> gpu,
                                                         const std::vector<GpuPlace>& places,
                                                         NetworkBackend backend) {
  return std::make_unique<GpuProcessTransport>(std::move(bootstrap), ranks_per_node, std::move(gpu),
                                               places, backend);
}

}  // namespace waybill::cuda
