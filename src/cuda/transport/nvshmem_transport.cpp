#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "../nvshmem/nvshmem_api.h"
#include "core/test_hooks.h"
#include "gpu_place.h"
#include "gpu_transport.h"
#include "network_paths.h"
#include "rank_memory.h"
#include "transport/share_memory.h"
#include "waybill/transport/bootstrap.h"

namespace waybill::cuda {
namespace {

constexpr const char* nvshmem_world = "make_nvshmem_world";
constexpr std::int64_t staging_bytes = std::int64_t{8} << 20;

/// Without these variables NVSHMEM looks for network cards and an interface, which one host does
/// not need. Multicast is off. Variables that the caller has set stay.
void set_defaults(bool one_host) {
  (void)setenv("NVSHMEM_DISABLE_NVLS", "1", 0);
  if (!one_host) return;
  (void)setenv("NVSHMEM_REMOTE_TRANSPORT", "none", 0);
  (void)setenv("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo", 0);
}

/// Rank, number of ranks and device of a process. NVSHMEM starts once per process: the first world
/// decides them.
using ProcessRank = std::tuple<std::int32_t, std::int32_t, int>;

std::string describe(const ProcessRank& process) {
  const auto& [rank, world_size, device] = process;
  return concat("rank ", rank, " of ", world_size, " on device ", device);
}

void start(Bootstrap& bootstrap, int device) {
  static std::optional<ProcessRank> first;
  const std::int32_t rank = to_int(bootstrap.rank());
  const ProcessRank now{rank, bootstrap.world_size(), device};
  run_collectively(bootstrap, nvshmem_world, [&] {
    (void)nvshmem_api();
    if (!first || *first == now) return;
    throw Unsupported(concat(nvshmem_world, ": this process is ", describe(now),
                             ", but it made an NVSHMEM world as ", describe(*first),
                             "; expected the same, as NVSHMEM starts once a process"));
  });
  if (first) return;
  const NvshmemApi& api = nvshmem_api();
  set_defaults(on_one_host(bootstrap));
  Bootstrap::Bytes id(api.unique_id_bytes);
  run_collectively(bootstrap, nvshmem_world, [&] {
    if (rank != 0) return;
    const int status = api.make_unique_id(id.data());
    if (status != 0) {
      throw TransportError(concat("nvshmemx_get_uniqueid returned ", status,
                                  " (NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME names the network interface "
                                  "on which ranks meet)"));
    }
  });
  id = bootstrap.all_gather(id, nvshmem_world).front();
  run_collectively(bootstrap, nvshmem_world, [&] {
    const int status = api.initialize(rank, bootstrap.world_size(), id.data());
    if (status != 0) {
      throw TransportError(concat("NVSHMEM ", api.nvshmem_version, " did not start: status ",
                                  status, " (NVSHMEM_DEBUG=INFO says more)"));
    }
  });
  first = now;
}

/// Kernels load signals themselves, with acquire: rows that were put before a signal must be
/// visible with it.
void require_consistent_rows(Bootstrap& bootstrap) {
  const NvshmemApi& api = nvshmem_api();
  run_collectively(bootstrap, nvshmem_world, [&] {
    const bool forced = waybill::detail::test_hooks().nvshmem_enforces != 0;
    const int enforces = forced ? 1 : api.enforces_consistency();
    if (enforces == 0) return;
    if (enforces < 0) {
      throw TransportError(concat("NVSHMEM ", api.nvshmem_version,
                                  " could not be asked whether rows are seen with their signals"));
    }
    throw Unsupported(
        concat("NVSHMEM ", api.nvshmem_version,
               " enforces consistency at the target: with its transport between nodes a signal may "
               "be seen before the rows that were put before it; expected one that shows them in "
               "order. Load GDRCopy for IBRC, or take another transport (NVSHMEM_REMOTE_TRANSPORT; "
               "IBGDA alone: NVSHMEM_IB_ENABLE_IBGDA=1 NVSHMEM_REMOTE_TRANSPORT=none), or NCCL "
               "(make_gpu_process_world)"));
  });
}

class NvshmemTransport final : public GpuTransport {
 public:
  NvshmemTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node,
                   std::shared_ptr<GpuRank> gpu, const std::vector<GpuPlace>& places)
      : GpuTransport(std::move(bootstrap), ranks_per_node, std::move(gpu), 1) {
    require_own_processes(places, nvshmem_world);
    this->gpu().use();
    start(this->bootstrap(), this->gpu().device());
    api_ = &nvshmem_api();
    if (topology().num_nodes() == 1) return;
    require_consistent_rows(this->bootstrap());
    staging_ = make_own(staging_bytes, "staging");
  }

  void put(const SymmetricBuffer& to, const PutRequest& piece) override {
    if (reach(piece.peer) != Reach::network) return GpuTransport::put(to, piece);
    check_piece(to, piece);
    gpu().use();
    // A network card reads only symmetric memory. The stream orders the slices.
    for (std::int64_t done = 0; done < piece.size_bytes; done += staging_bytes) {
      const std::size_t size = std::min(staging_bytes, piece.size_bytes - done);
      gpu().check(cudaMemcpyAsync(staging_.get(), piece.source + done, size, cudaMemcpyDefault,
                                  gpu().stream()),
                  "copying to a peer", "put");
      api_->put(to.local + piece.dst_offset_bytes + done, staging_.get(), size, to_int(piece.peer),
                gpu().stream());
    }
  }

  void signal(Rank peer, SignalSlot slot, std::uint64_t epoch) override {
    check_slot(slot);
    if (reach(peer) != Reach::network) return GpuTransport::signal(peer, slot, epoch);
    gpu().use();
    api_->quiet(gpu().stream());  // puts and signals may overtake each other in a network
    api_->signal(slot.pad->local + slot.idx, epoch, to_int(peer), gpu().stream());
  }

  std::uint64_t wait(SignalSlot slot, std::uint64_t wanted, Rank peer,
                     std::string_view operation) override {
    check_slot(slot);
    if (reach(peer) != Reach::network) return GpuTransport::wait(slot, wanted, peer, operation);
    gpu().use();
    const FlagWait wait{slot.pad->local + slot.idx, wanted, to_int(rank()), to_int(peer), seen()};
    const FaultSink to = sink();
    gpu().check(api_->wait(&wait, &to, gpu().stream()), "launching a wait", operation);
    wait_stream("waiting for a signal", operation);
    return *seen();
  }

  void quiet() override {
    gpu().use();
    api_->quiet(gpu().stream());
    GpuTransport::quiet();
  }

  [[nodiscard]] std::unique_ptr<NetworkPath> make_network_path() override {
    return make_nvshmem_path(*api_, shared_gpu(), topology());
  }

 private:
  /// NVSHMEM's part of an allocation waits for all ranks without a deadline, so they synchronize
  /// first.
  std::shared_ptr<void> make_own(std::int64_t size_bytes, const std::string& operation) {
    bootstrap().barrier(operation);
    std::shared_ptr<void> own;
    const std::size_t room = std::max<std::int64_t>(size_bytes, 1);
    run_collectively(bootstrap(), operation, [&] {
      void* const memory = api_->allocate(room);
      if (memory == nullptr) {
        throw TransportError(concat("the symmetric heap of NVSHMEM has no room for ", room,
                                    " bytes (NVSHMEM_SYMMETRIC_SIZE)"));
      }
      own = keep_until_released({memory, [api = api_](void* begin) { api->free(begin); }});
      cuda_check(cudaMemsetAsync(memory, 0, room, gpu().stream()), "clearing symmetric memory");
      gpu().wait_for(gpu().stream(), "clearing symmetric memory", operation);
    });
    return own;
  }

  Parts make_parts(std::int64_t size_bytes, std::string_view name) override {
    const std::string operation = concat("allocate(", name, ")");
    const SharedBlockInfo mine{size_bytes, {}};  // NVSHMEM needs no handle
    require_same_size(all_gather_value(bootstrap(), mine, operation), &SharedBlockInfo::size_bytes,
                      size_bytes, operation);
    gpu().use();
    const std::shared_ptr<void> own = make_own(size_bytes, operation);
    Parts parts;
    run_collectively(bootstrap(), operation, [&] {
      for (std::int32_t r = 0; r < topology().world_size; ++r) {
        void* const part = api_->peer(own.get(), r);
        if (part == nullptr && reach(Rank{r}) != Reach::network) {
          throw Unsupported(
              concat("rank ", r, " cannot be reached through pointers, but ranks_per_node = ",
                     topology().ranks_per_node, " puts it on the node of rank ", rank()));
        }
        parts.emplace_back(own, part);  // one owner for all
      }
    });
    return parts;
  }

  void free_parts(Parts parts) override {
    gpu().use();
    note_release(parts.front());
    parts.clear();
  }

  const NvshmemApi* api_ = nullptr;
  std::shared_ptr<void> staging_;  ///< symmetric; for puts to other nodes
};

}  // namespace

std::unique_ptr<GpuTransport> make_nvshmem_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                     std::int32_t ranks_per_node,
                                                     std::shared_ptr<GpuRank> gpu,
                                                     const std::vector<GpuPlace>& places) {
  return std::make_unique<NvshmemTransport>(std::move(bootstrap), ranks_per_node, std::move(gpu),
                                            places);
}

}  // namespace waybill::cuda
