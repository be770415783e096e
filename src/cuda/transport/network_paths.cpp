#include "nccl_path.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "../network/phase_path_kernel.h"
#include "../rank/cuda_check.h"
#include "network_paths.h"

namespace waybill::cuda {
namespace {

constexpr std::int64_t message_bytes = 8;  ///< of a piece without rows

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

  /// What is to be queued comes in join(): NCCL may wait for room in its queues, and so for kernels
  /// that have yet to be launched.
  void start(const NetworkCall& call) override {
    communicator_->check(call.operation);
    call_ = call;
    stream_ = side_.fork(call.stream, call.operation);
  }

  void join(cudaStream_t stream) override {
    const PathParams params = path_params(call_, *gpu_, topology_, share_);
    const bool tells = call_.arrival != PathArrival::none;
    std::vector<bool> sent_words(topology_.world_size);
    std::vector<bool> heard(topology_.world_size);
    for (const NetworkPhase& phase : call_.phases) {
      queue_waits(params, phase.waits, tells && &phase == &call_.phases.front());
      auto sent = pieces_of(phase.sent, 0);
      auto received = pieces_of(phase.received, topology_.world_size);
      if (tells) {
        put_words_first(sent, sent_words, [&](std::int32_t) { return to_int(gpu_->rank()); });
        put_words_first(received, heard, [](std::int32_t peer) { return peer; });
      }
      communicator_->exchange(sent, received, stream_, call_.operation);
      if (call_.unpack) call_.unpack(stream_);
      queue_raises(params, phase, &phase == &call_.phases.back());
    }
    side_.join(stream, call_.operation);
  }

 private:
  /// The first message between two ranks in a call says what the sender means by it: with other
  /// plans there may be rows of other sizes behind it, for which NCCL would wait for ever.
  /// @param met peers for which it has been put before
  /// @param rank_of whose words go to a peer, or come from it
  template <class RankOf>
  void put_words_first(std::vector<NcclPiece>& pieces, std::vector<bool>& met,
                       RankOf&& rank_of) const {
    constexpr std::int64_t bytes = fault_words * sizeof(std::uint64_t);
    const std::int32_t world = topology_.world_size;
    std::vector<NcclPiece> with;
    for (const NcclPiece& piece : pieces) {
      if (!met[piece.peer]) {
        const auto parity = static_cast<std::int32_t>(call_.epoch % 2);
        const std::int64_t slot =
            call_.fingerprint.first_slot + (parity * world + rank_of(piece.peer)) * fault_words;
        with.push_back(
            {reinterpret_cast<std::byte*>(call_.arrivals->local + slot), bytes, piece.peer});
        met[piece.peer] = true;
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

  /// @param first_message of this direction
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

std::unique_ptr<NetworkPath> make_nccl_path(std::shared_ptr<GpuRank> gpu, Topology topology,
                                            int share,
                                            std::shared_ptr<NcclCommunicator> communicator) {
  return std::make_unique<NcclPath>(std::move(gpu), topology, share, std::move(communicator));
}

}  // namespace waybill::cuda
