#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "../../device/params.h"
#include "../../network/network_path.h"
#include "../../rank/gpu_rank.h"
#include "copies.h"
#include "experts/expert_executor.h"
#include "rounds.h"
#include "transport/transport.h"

namespace waybill::cuda {

/// One call of a store, as all parts of it see it.
struct CopyNetworkCall {
  const CopyStoreCall& call;
  const char* operation;
  FaultKind kind;
  CallFingerprint fingerprint;
  cudaStream_t stream;
  bool sums;  ///< gradients go home; else weights go to copies
};

/// Pinned memory that grows.
struct PinnedRoom {
  std::shared_ptr<void> memory;
  std::int64_t bytes = 0;

  /// @param retired gets memory that was too small: freeing it could wait for kernels
  [[nodiscard]] void* room_for(std::int64_t wanted, std::vector<std::shared_ptr<void>>& retired);
};

/// Moves copies between nodes whose memory is not mapped, in the rounds of rounds.h, over the path
/// that rows take. The host waits for the plan, which is on the device, so no graph holds a call.
/// Before the first round, after each and, with gradients, at the end all ranks meet: on the
/// stream, not on the host.
class CopyNetwork {
 public:
  /// Bytes of the stage, which a store has after its own.
  [[nodiscard]] static std::int64_t stage_bytes();

  /// Collective. @param store has the stage from byte `stage_at` on
  CopyNetwork(Transport& transport, std::shared_ptr<GpuRank> gpu, int share, NetworkPath& path,
              const SymmetricBuffer& store, std::int64_t stage_at, std::string_view name);
  CopyNetwork(const CopyNetwork&) = delete;
  CopyNetwork& operator=(const CopyNetwork&) = delete;
  ~CopyNetwork();
  /// Collective.
  void release() { transport_.release(pad_); }

  /// Brings weights to the first copy on each other node. Ranks of a node may then send them on.
  void bring_weights(const CopyNetworkCall& call, const CopyParams& params);

  /// Brings gradients to their homes, range by range.
  /// @param add queues the addition of one range, which the parameters name
  template <class Add>
  void take_gradients(const CopyNetworkCall& call, CopyParams params, Add&& add) {
    const CopyRounds rounds = begin(call, params);
    synchronize(call, {});
    for (std::int64_t r = 0; r < rounds.num_rounds(); ++r) {
      synchronize(call, rounds.moves(rank(), r));
      params.range_begin = r * rounds.range_bytes();
      params.range_bytes = rounds.range_bytes();
      params.landed = store_.local + rounds.half(r);
      add(params);
    }
    if (rounds.num_rounds() == 0) add(params);
    synchronize(call, {});  // nobody writes into a store that others still read
    end(call);
  }

 private:
  [[nodiscard]] CopyRounds begin(const CopyNetworkCall& call, const CopyParams& params);
  void read_plan(const CopyNetworkCall& call, const CopyParams& params);
  void stage(const CopyNetworkCall& call, const CopyParams& params,
             std::span<const StagedRange> ranges) const;
  void synchronize(const CopyNetworkCall& call, std::span<const WindowMove> moves);
  void end(const CopyNetworkCall& call) const;
  [[nodiscard]] PathTables tables_of(std::span<const WindowMove> moves);
  [[nodiscard]] NetworkPhase phase_of(std::span<const WindowMove> moves) const;
  [[nodiscard]] ArriveParams arrive(const CopyNetworkCall& call) const;
  [[nodiscard]] std::int32_t rank() const { return to_int(transport_.rank()); }

  Transport& transport_;
  std::shared_ptr<GpuRank> gpu_;
  int share_;
  NetworkPath& path_;
  const SymmetricBuffer& store_;
  CopyStage stage_;
  SignalPad pad_;                     ///< arrivals, then fingerprints
  std::shared_ptr<void> state_;       ///< CallState, PathState
  std::uint64_t epoch_ = 0;           ///< meetings so far
  PinnedRoom plan_;                   ///< slots, then quotas
  std::vector<std::int32_t> copies_;  ///< [R * spare]: the plan as CopyTable::experts
  std::uint64_t plan_hash_ = 0;
  /// Tables of puts, of a call's meetings in turn, which kernels read where they lie.
  std::vector<PinnedRoom> tables_;
  std::size_t next_table_ = 0;
  std::vector<std::shared_ptr<void>> retired_;
  cudaEvent_t done_ = nullptr;  ///< the last call's work
};

}  // namespace waybill::cuda
