#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>

#include "../rank/gpu_rank.h"
#include "experts/expert_executor.h"
#include "params.h"
#include "tables.h"
#include "transport/transport.h"

namespace waybill::cuda {

/// Symmetric memory of the executor's own, by parity of the dispatch: counts, records and weights
/// of each source's tokens, and where low-latency tokens arrive.
struct RecordWorkspace {
  std::int64_t counts[2] = {};
  std::int64_t records[2] = {};
  std::int64_t weights[2] = {};
  std::int64_t gathered[2] = {};       ///< low latency: the ids of all, see RouteParams
  std::int64_t receive_slots[2] = {};  ///< see ReceiveSlots
  std::int64_t slot_tokens = 0;        ///< of a source
  std::int64_t slot_row_bytes = 0;
  std::int64_t total = 0;

  RecordWorkspace(const EPConfig& config, const EPDispatchOptions& options, bool low_latency);
};

/// The widest word, at most 16 bytes, of which all of these are multiples.
[[nodiscard]] int common_word(std::initializer_list<std::int64_t> values);
[[nodiscard]] std::int64_t address_of(const void* pointer);

[[nodiscard]] inline cudaStream_t stream_of(const ExpertCall& call) {
  return call.stream == nullptr ? nullptr : stream_of(*call.stream);
}

/// What kernels of one layer work with: memory beyond the layer's own, and the parameters that
/// point to all of it. Collective to make.
class ExpertParams {
 public:
  ExpertParams(Transport& transport, std::shared_ptr<GpuRank> gpu, int share,
               const EPConfig& config, const EPDispatchOptions& options,
               const ExpertMemory& memory);
  ExpertParams(const ExpertParams&) = delete;
  ExpertParams& operator=(const ExpertParams&) = delete;
  /// Nothing is freed while other ranks may still use it.
  ~ExpertParams();

  /// @param tables whose routing is being made
  [[nodiscard]] RouteParams route(const ExpertCall& call, const ExpertDispatchInput& input,
                                  GpuExpertTables& tables) const;

  [[nodiscard]] EnterParams enter(const ExpertCall& call, const ExpertDispatchInput& input,
                                  GpuExpertTables& tables) const;

  /// But for the tokens, their cuts, the number of senders and what they do ahead. On several nodes
  /// the tokens are those that this rank forwards: [nodes, M], on the workspace.
  [[nodiscard]] RowsParams rows(const ExpertCall& call, const ExpertDispatchInput& input,
                                const GpuExpertTables& tables) const;

  /// Without records: rows are copied, not summed.
  [[nodiscard]] StageParams stage(const ExpertCall& call, const ExpertCombineInput& input,
                                  const GpuExpertTables& tables) const;

  /// On several nodes the sums of this node, to where the output is still to be set; ranks have
  /// synchronized before.
  [[nodiscard]] CombineParams combine(const ExpertCall& call, const ExpertCombineInput& input,
                                      const GpuExpertTables& tables) const;

  /// How ranks synchronize in a call, and what this one is.
  [[nodiscard]] MoeArrive arrive(const ExpertCall& call, FaultKind kind) const;
  [[nodiscard]] MoeShape shape(const GpuExpertRouting& routing) const;

  [[nodiscard]] MoeHostFaults* faults() const { return static_cast<MoeHostFaults*>(faults_.get()); }

  /// Whether the layer's tokens are few; the same on all ranks.
  [[nodiscard]] bool is_low_latency() const { return low_latency_; }

  /// Room for float8 elements and scales of this rank's tokens; null unless the payload is
  /// quantised here; on several nodes it goes to the workspace.
  [[nodiscard]] std::byte* elements() const { return static_cast<std::byte*>(elements_.get()); }
  [[nodiscard]] std::byte* scales() const { return static_cast<std::byte*>(scales_.get()); }

 private:
  [[nodiscard]] MoeShape shape(std::int64_t num_tokens, std::int64_t capacity_rows) const;
  [[nodiscard]] MoeShape node_shape(const GpuExpertRouting& routing) const;
  void fill_tables(const ExpertCall& call, GpuExpertRouting& made, RowsParams& params) const;
  [[nodiscard]] NearPeers<std::byte> record_parts(std::int64_t offset) const;
  [[nodiscard]] const std::byte* weights_of(const ExpertDispatchInput& input) const;
  [[nodiscard]] std::int32_t first_rank() const {
    return config_.rank / config_.local_world_size * config_.local_world_size;
  }

  Transport& transport_;
  std::shared_ptr<GpuRank> gpu_;
  int share_;
  EPConfig config_;
  EPDispatchOptions options_;
  const ExpertMemory& memory_;
  bool low_latency_;
  std::uint32_t max_delay_ns_;  ///< MoeArrive's
  RecordWorkspace workspace_;
  SymmetricBuffer records_;
  SignalPad channels_;
  std::shared_ptr<void> state_;        ///< MoeState, and behind it which sources are placed
  std::shared_ptr<void> tile_counts_;  ///< scratch of route
  std::shared_ptr<void> nan_row_;      ///< see CombineParams
  std::shared_ptr<void> faults_;       ///< pinned MoeHostFaults
  std::shared_ptr<void> elements_;
  std::shared_ptr<void> scales_;
};

}  // namespace waybill::cuda
