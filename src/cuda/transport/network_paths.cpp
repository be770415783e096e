#include "network_paths.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "../network/path_launch.h"

namespace waybill::cuda {
namespace {

/// A stream of its own, which starts after the work of another stream and rejoins it by events.
class SideStream {
 public:
  explicit SideStream(std::shared_ptr<GpuRank> gpu);
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  ~SideStream();

  /// Starts after the work on `from`. @return the side stream
  [[nodiscard]] cudaStream_t fork(cudaStream_t from, const char* operation);
  void join(cudaStream_t to, const char* operation);

 private:
  std::shared_ptr<GpuRank> gpu_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begun_ = nullptr;
  cudaEvent_t done_ = nullptr;
};

SideStream::SideStream(std::shared_ptr<GpuRank> gpu) : gpu_(std::move(gpu)) {
  gpu_->use();
  int least = 0;
  int greatest = 0;
  cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities");
  cuda_check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
             "making a stream");
  for (cudaEvent_t* event : {&begun_, &done_})
    cuda_check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
}

SideStream::~SideStream() {
  (void)cudaStreamDestroy(stream_);
  (void)cudaEventDestroy(begun_);
  (void)cudaEventDestroy(done_);
}

cudaStream_t SideStream::fork(cudaStream_t from, const char* operation) {
  gpu_->check(cudaEventRecord(begun_, from), "recording an event", operation);
  gpu_->check(cudaStreamWaitEvent(stream_, begun_, 0), "ordering streams", operation);
  return stream_;
}

void SideStream::join(cudaStream_t to, const char* operation) {
  gpu_->check(cudaEventRecord(done_, stream_), "recording an event", operation);
  gpu_->check(cudaStreamWaitEvent(to, done_, 0), "ordering streams", operation);
}

/// Returns the parameters of a network path's kernel, without the peers' memory.
/// @param share ranks on the device
PathParams path_params(const NetworkCall& call, const GpuRank& gpu, const Topology& topology,
                       int share) {
  return {.rank = to_int(gpu.rank()),
          .world_size = topology.world_size,
          .ranks_per_node = topology.ranks_per_node,
          .parity = static_cast<std::uint32_t>(call.epoch % 2),
          .kind = call.kind,
          .arrival = call.arrival,
          .state = call.state,
          .sink = gpu.sink(share),
          .tables = call.tables,
          .window = call.window->local,
          .slots = call.slots->local + call.first_slot,
          .arrivals = call.arrivals == nullptr ? nullptr : call.arrivals->local,
          .fingerprint = call.fingerprint};
}

class PeerPath final : public NetworkPath {
 public:
  PeerPath(std::shared_ptr<GpuRank> gpu, Topology topology, int share)
      : gpu_(std::move(gpu)), topology_(topology), share_(share), side_(gpu_) {
    // A block then takes a multiprocessor of its own, while the kernel that it works with has
    // others.
    bulk_ = gpu_->has_bulk_copies() && 2 * share <= gpu_->num_sms();
    cuda_check(prepare_peer_path(bulk_), "loading kernels");
  }

  [[nodiscard]] bool maps_peers() const override { return true; }

  void start(const NetworkCall& call) override {
    const PathParams params = path_params(call, *gpu_, topology_, share_);
    PeerAddresses peers{};
    peers.windows = peers_of<std::byte>(call.window->table, 0);
    peers.slots = peers_of<std::uint64_t>(call.slots->table,
                                          call.first_slot * std::int64_t{sizeof(std::uint64_t)});
    if (call.arrivals != nullptr) {
      peers.arrivals = peers_of<std::uint64_t>(call.arrivals->table, 0);
    }
    operation_ = call.operation;
    const cudaStream_t side = side_.fork(call.stream, call.operation);
    gpu_->check(launch_peer_path(params, peers, bulk_, call.num_sms, side), "launching a kernel",
                call.operation);
  }

  void join(cudaStream_t stream) override { side_.join(stream, operation_); }

 private:
  std::shared_ptr<GpuRank> gpu_;
  Topology topology_;
  int share_;
  SideStream side_;
  bool bulk_ = false;
  const char* operation_ = "";
};

class NvshmemPath final : public NetworkPath {
 public:
  NvshmemPath(const NvshmemApi& api, std::shared_ptr<GpuRank> gpu, Topology topology)
      : api_(api), gpu_(std::move(gpu)), topology_(topology), side_(gpu_) {}

  void start(const NetworkCall& call) override {
    operation_ = call.operation;
    PathParams params = path_params(call, *gpu_, topology_, 1);
    params.tables.one_block_of_peer = posts(*call.window);
    const cudaStream_t side = side_.fork(call.stream, operation_);
    gpu_->check(api_.path(&params, call.num_sms, side), "launching a kernel", operation_);
  }

  void join(cudaStream_t stream) override { side_.join(stream, operation_); }

 private:
  /// Says whether puts to other nodes go through a network card. Otherwise they are copies, for
  /// which one block does not suffice.
  [[nodiscard]] bool posts(const SymmetricBuffer& window) const {
    for (std::int32_t r = 0; r < topology_.world_size; ++r) {
      const bool of_node =
          r / topology_.ranks_per_node == to_int(gpu_->rank()) / topology_.ranks_per_node;
      if (!of_node && api_.peer(window.local, r) != nullptr) return false;
    }
    return true;
  }

  const NvshmemApi& api_;
  std::shared_ptr<GpuRank> gpu_;
  Topology topology_;
  SideStream side_;
  const char* operation_ = "";
};

constexpr std::int64_t message_bytes = 8;  ///< a piece without rows has so many

class NcclPath final : public NetworkPath {
 public:
  NcclPath(std::shared_ptr<GpuRank> gpu, Topology topology, int share,
           std::shared_ptr<NcclCommunicator> communicator)
      : gpu_(std::move(gpu)),
        topology_(topology),
        share_(share),
        communicator_(std::move(communicator)),
        side_(gpu_),
        messages_(
            device_memory(std::int64_t{2} * topology.world_size * message_bytes, gpu_->stream())) {
    cuda_check(prepare_phase_path(), "loading kernels");
  }

  [[nodiscard]] bool needs_phases() const override { return true; }

  /// join() queues the phases: NCCL may wait for room in its queues, and so for kernels that have
  /// yet to be launched.
  void start(const NetworkCall& call) override {
    communicator_->check(call.operation);
    call_ = call;
    stream_ = side_.fork(call.stream, call.operation);
  }

  void join(cudaStream_t stream) override {
    const PathParams params = path_params(call_, *gpu_, topology_, share_);
    const bool tells = call_.arrival != PathArrival::none;
    std::vector<bool> sent_words(topology_.world_size);
    std::vector<bool> received_words(topology_.world_size);
    for (const NetworkPhase& phase : call_.phases) {
      queue_waits(params, phase.waits, tells && &phase == &call_.phases.front());
      auto sent = pieces_of(phase.sent, 0);
      auto received = pieces_of(phase.received, topology_.world_size);
      if (tells) {
        put_words_first(sent, sent_words, [&](std::int32_t) { return to_int(gpu_->rank()); });
        put_words_first(received, received_words, [](std::int32_t peer) { return peer; });
      }
      communicator_->exchange(sent, received, stream_, call_.operation);
      if (call_.unpack) call_.unpack(stream_);
      queue_raises(params, phase, &phase == &call_.phases.back());
    }
    side_.join(stream, call_.operation);
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
    const std::int32_t world = topology_.world_size;
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
      gpu_->check(launch_phase_waits(launch, stream_), "launching a kernel", call_.operation);
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
      gpu_->check(launch_phase_raises(launch, stream_), "launching a kernel", call_.operation);
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

  std::shared_ptr<GpuRank> gpu_;
  Topology topology_;
  int share_;
  std::shared_ptr<NcclCommunicator> communicator_;
  SideStream side_;
  std::shared_ptr<void> messages_;  ///< [2][W]
  NetworkCall call_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

std::unique_ptr<NetworkPath> make_peer_path(std::shared_ptr<GpuRank> gpu, Topology topology,
                                            int share) {
  return std::make_unique<PeerPath>(std::move(gpu), topology, share);
}

std::unique_ptr<NetworkPath> make_nvshmem_path(const NvshmemApi& api, std::shared_ptr<GpuRank> gpu,
                                               Topology topology) {
  return std::make_unique<NvshmemPath>(api, std::move(gpu), topology);
}

std::unique_ptr<NetworkPath> make_nccl_path(std::shared_ptr<GpuRank> gpu, Topology topology,
                                            int share,
                                            std::shared_ptr<NcclCommunicator> communicator) {
  return std::make_unique<NcclPath>(std::move(gpu), topology, share, std::move(communicator));
}

}  // namespace waybill::cuda
