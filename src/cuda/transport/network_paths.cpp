#include "network_paths.h"

#include <algorithm>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "../network/path_launch.h"

namespace waybill::cuda {
namespace {

/// A path on a stream of its own, which starts after the work of a call's stream and rejoins it by
/// events.
class StreamPath : public NetworkPath {
 public:
  /// @param share ranks on the device
  StreamPath(std::shared_ptr<GpuRank> gpu, Topology topology, int share);
  ~StreamPath() override;
  void join(cudaStream_t stream) override;

 protected:
  /// Starts after the work on the call's stream.
  void fork(const NetworkCall& call);

  /// Returns the parameters of a network path's kernel, without the peers' memory.
  [[nodiscard]] PathParams path_params(const NetworkCall& call) const;

  [[nodiscard]] GpuRank& gpu() const { return *gpu_; }
  [[nodiscard]] const Topology& topology() const { return topology_; }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }

 private:
  std::shared_ptr<GpuRank> gpu_;
  Topology topology_;
  int share_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begun_ = nullptr;
  cudaEvent_t done_ = nullptr;
  const char* operation_ = "";
};

StreamPath::StreamPath(std::shared_ptr<GpuRank> gpu, Topology topology, int share)
    : gpu_(std::move(gpu)), topology_(topology), share_(share) {
  gpu_->use();
  int least = 0;
  int greatest = 0;
  cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities");
  cuda_check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
             "making a stream");
  for (cudaEvent_t* event : {&begun_, &done_})
    cuda_check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
}

StreamPath::~StreamPath() {
  (void)cudaStreamDestroy(stream_);
  (void)cudaEventDestroy(begun_);
  (void)cudaEventDestroy(done_);
}

void StreamPath::fork(const NetworkCall& call) {
  operation_ = call.operation;
  gpu_->check(cudaEventRecord(begun_, call.stream), "recording an event", operation_);
  gpu_->check(cudaStreamWaitEvent(stream_, begun_, 0), "ordering streams", operation_);
}

void StreamPath::join(cudaStream_t stream) {
  gpu_->check(cudaEventRecord(done_, stream_), "recording an event", operation_);
  gpu_->check(cudaStreamWaitEvent(stream, done_, 0), "ordering streams", operation_);
}

PathParams StreamPath::path_params(const NetworkCall& call) const {
  return {.rank = to_int(gpu_->rank()),
          .world_size = topology_.world_size,
          .ranks_per_node = topology_.ranks_per_node,
          .parity = static_cast<std::uint32_t>(call.epoch % 2),
          .kind = call.kind,
          .arrival = call.arrival,
          .state = call.state,
          .sink = gpu_->sink(share_),
          .tables = call.tables,
          .window = call.window->local,
          .slots = call.slots->local + call.first_slot,
          .arrivals = call.arrivals == nullptr ? nullptr : call.arrivals->local,
          .fingerprint = call.fingerprint};
}

/// Runs one kernel, of this library or of libwaybill_nvshmem.so.
class KernelPath final : public StreamPath {
 public:
  using Launch =
      std::function<cudaError_t(PathParams params, const NetworkCall& call, cudaStream_t stream)>;

  KernelPath(std::shared_ptr<GpuRank> gpu, Topology topology, int share, bool maps_peers,
             Launch launch)
      : StreamPath(std::move(gpu), topology, share),
        maps_peers_(maps_peers),
        launch_(std::move(launch)) {}

  [[nodiscard]] bool maps_peers() const override { return maps_peers_; }

  void start(const NetworkCall& call) override {
    fork(call);
    gpu().check(launch_(path_params(call), call, stream()), "launching a kernel", call.operation);
  }

 private:
  bool maps_peers_;
  Launch launch_;
};

/// Returns the addresses of a call's memory at all ranks.
PeerAddresses addresses_of(const NetworkCall& call) {
  PeerAddresses peers{};
  peers.windows = peers_of<std::byte>(call.window->table, 0);
  peers.slots = peers_of<std::uint64_t>(call.slots->table,
                                        call.first_slot * std::int64_t{sizeof(std::uint64_t)});
  if (call.arrivals != nullptr) {
    peers.arrivals = peers_of<std::uint64_t>(call.arrivals->table, 0);
  }
  return peers;
}

/// Says whether NVSHMEM's puts to other nodes go through a network card. Otherwise they are copies,
/// for which one block does not suffice.
bool posts(const NvshmemApi& api, const SymmetricBuffer& window, Rank me,
           const Topology& topology) {
  for (std::int32_t r = 0; r < topology.world_size; ++r) {
    const bool of_node = topology.node(Rank{r}) == topology.node(me);
    if (!of_node && api.peer(window.local, r) != nullptr) return false;
  }
  return true;
}

constexpr std::int64_t message_bytes = 8;  ///< a piece without rows has so many

class NcclPath final : public StreamPath {
 public:
  NcclPath(std::shared_ptr<GpuRank> gpu, Topology topology, int share,
           std::shared_ptr<NcclCommunicator> communicator)
      : StreamPath(std::move(gpu), topology, share),
        communicator_(std::move(communicator)),
        messages_(device_memory(std::int64_t{2} * topology.world_size * message_bytes,
                                this->gpu().stream())) {
    cuda_check(prepare_phase_path(), "loading kernels");
  }

  [[nodiscard]] bool needs_phases() const override { return true; }

  /// join() queues the phases: NCCL may wait for room in its queues, and so for kernels that have
  /// yet to be launched.
  void start(const NetworkCall& call) override {
    communicator_->check(call.operation);
    call_ = call;
    fork(call);
  }

  void join(cudaStream_t stream) override {
    const PathParams params = path_params(call_);
    const bool tells = call_.arrival != PathArrival::none;
    std::vector<bool> sent_words(topology().world_size);
    std::vector<bool> received_words(topology().world_size);
    for (const NetworkPhase& phase : call_.phases) {
      queue_waits(params, phase.waits, tells && &phase == &call_.phases.front());
      auto sent = pieces_of(phase.sent, 0);
      auto received = pieces_of(phase.received, topology().world_size);
      if (tells) {
        put_words_first(sent, sent_words, [&](std::int32_t) { return to_int(gpu().rank()); });
        put_words_first(received, received_words, [](std::int32_t peer) { return peer; });
      }
      communicator_->exchange(sent, received, this->stream(), call_.operation);
      if (call_.unpack) call_.unpack(this->stream());
      queue_raises(params, phase, &phase == &call_.phases.back());
    }
    StreamPath::join(stream);
  }

 private:
  /// The first message between two ranks in a call holds the words of the sender's call: with
  /// another plan rows of other sizes may follow, for which NCCL would wait for ever.
  /// @param done peers for which it has been put before
  /// @param rank_of returns the rank whose words go to a peer, or come from it
  template <class RankOf>
  void put_words_first(std::vector<NcclPiece>& pieces, std::vector<bool>& done,
                       RankOf&& rank_of) const {
    constexpr std::int64_t bytes = fault_words * sizeof(std::uint64_t);
    const std::int32_t world = topology().world_size;
    std::vector<NcclPiece> with;
    for (const NcclPiece& piece : pieces) {
      if (!done[piece.peer]) {
        const auto parity = static_cast<std::int32_t>(call_.epoch % 2);
        const std::int64_t slot =
            call_.fingerprint.first_slot + (parity * world + rank_of(piece.peer)) * fault_words;
        with.push_back(
            {reinterpret_cast<std::byte*>(call_.arrivals->local + slot), bytes, piece.peer});
        done[piece.peer] = true;
      }
      with.push_back(piece);
    }
    pieces = std::move(with);
  }

  void queue_waits(const PathParams& params, std::span<const BatchSlot> waits, bool tells) const {
    while (!waits.empty() || tells) {
      const auto some = waits.first(std::min<std::size_t>(waits.size(), max_phase_waits));
      PhaseWaits launch{};
      launch.path = params;
      launch.tells = std::exchange(tells, false);
      launch.given_up = communicator_->given_up();
      launch.count = static_cast<std::int32_t>(some.size());
      std::ranges::copy(some, launch.waits);
      gpu().check(launch_phase_waits(launch, stream()), "launching a kernel", call_.operation);
      waits = waits.subspan(some.size());
    }
  }

  void queue_raises(const PathParams& params, const NetworkPhase& phase, bool ends) const {
    std::span<const std::int32_t> slots = phase.slots;
    std::span<const std::int32_t> arrived = phase.arrived;
    do {
      const auto first = slots.first(std::min<std::size_t>(slots.size(), max_phase_raises));
      const auto then =
          arrived.first(std::min<std::size_t>(arrived.size(), max_phase_raises - first.size()));
      slots = slots.subspan(first.size());
      arrived = arrived.subspan(then.size());
      PhaseRaises launch{};
      launch.path = params;
      launch.given_up = communicator_->given_up();
      launch.num_slots = static_cast<std::int32_t>(first.size());
      launch.num_arrived = static_cast<std::int32_t>(then.size());
      std::ranges::copy(then, std::ranges::copy(first, launch.which).out);
      launch.ends = ends && slots.empty() && arrived.empty();
      if (first.empty() && then.empty() && !launch.ends) return;
      gpu().check(launch_phase_raises(launch, stream()), "launching a kernel", call_.operation);
    } while (!slots.empty() || !arrived.empty());
  }

  /// @param first_message index of the first message of this direction
  [[nodiscard]] std::vector<NcclPiece> pieces_of(std::span<const NetworkPiece> pieces,
                                                 std::int64_t first_message) const {
    auto* const messages = static_cast<std::byte*>(messages_.get());
    std::vector<NcclPiece> result;
    for (const NetworkPiece& piece : pieces) {
      const bool rows = piece.size_bytes > 0;
      std::byte* const from = rows ? call_.window->local + piece.offset_bytes
                                   : messages + (first_message + piece.peer) * message_bytes;
      result.push_back({from, rows ? piece.size_bytes : message_bytes, piece.peer});
    }
    return result;
  }

  std::shared_ptr<NcclCommunicator> communicator_;
  std::shared_ptr<void> messages_;  ///< [2][W]
  NetworkCall call_;
};

}  // namespace

std::unique_ptr<NetworkPath> make_peer_path(std::shared_ptr<GpuRank> gpu, Topology topology,
                                            int share) {
  // With bulk copies a block takes a multiprocessor of its own, while the kernel that it works with
  // has others.
  const bool bulk = gpu->has_bulk_copies() && 2 * share <= gpu->num_sms();
  gpu->use();
  cuda_check(prepare_peer_path(bulk), "loading kernels");
  const auto launch = [bulk](const PathParams& params, const NetworkCall& call,
                             cudaStream_t stream) {
    return launch_peer_path(params, addresses_of(call), bulk, call.num_sms, stream);
  };
  return std::make_unique<KernelPath>(std::move(gpu), topology, share, true, launch);
}

std::unique_ptr<NetworkPath> make_nvshmem_path(const NvshmemApi& api, std::shared_ptr<GpuRank> gpu,
                                               Topology topology) {
  const auto launch = [&api, topology](PathParams params, const NetworkCall& call,
                                       cudaStream_t stream) {
    params.tables.one_block_of_peer = posts(api, *call.window, Rank{params.rank}, topology);
    return api.path(&params, call.num_sms, stream);
  };
  return std::make_unique<KernelPath>(std::move(gpu), topology, 1, false, launch);
}

std::unique_ptr<NetworkPath> make_nccl_path(std::shared_ptr<GpuRank> gpu, Topology topology,
                                            int share,
                                            std::shared_ptr<NcclCommunicator> communicator) {
  return std::make_unique<NcclPath>(std::move(gpu), topology, share, std::move(communicator));
}

}  // namespace waybill::cuda
