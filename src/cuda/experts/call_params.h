#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>

#include "../rank/gpu_rank.h"
#include "experts/expert_executor.h"
#include "kernels.h"
#include "tables.h"
#include "transport/transport.h"

namespace waybill::cuda {

/// Symmetric memory of the executor. It holds the counts, records and weights of each source's
/// tokens, and the receive slots, all by parity of the dispatch.
struct RecordWorkspace {
  std::int64_t counts[2] = {};
  std::int64_t records[2] = {};
  std::int64_t weights[2] = {};
  std::int64_t gathered[2] = {};       ///< low latency: the ids of all ranks, see RouteParams
  std::int64_t expert_counts[2] = {};  ///< spare experts: counts of experts, as those of slots
  std::int64_t receive_slots[2] = {};  ///< see ReceiveSlots
  std::int64_t slot_tokens = 0;        ///< receive slots per source
  std::int64_t slot_row_bytes = 0;
  std::int64_t total = 0;

  /// @param config of slots, @param experts as given: without spare experts the same
  RecordWorkspace(const EPConfig& config, const EPConfig& experts, const EPDispatchOptions& options,
                  bool low_latency);
};

/// The widest word, at most 16 bytes, that divides all of these.
[[nodiscard]] int common_word(std::initializer_list<std::int64_t> values);
[[nodiscard]] std::int64_t address_of(const void* pointer);

[[nodiscard]] inline cudaStream_t stream_of(const ExpertCall& call) {
  return call.stream == nullptr ? nullptr : stream_of(*call.stream);
}

/// The surroundings of a layer on a rank, for all parts of its executor, which outlives them.
struct GpuExpertLayer {
  Transport& transport;
  std::shared_ptr<GpuRank> gpu;
  int share;         ///< ranks on this device
  EPConfig config;   ///< slot_config: what is said of experts is of slots
  EPConfig experts;  ///< the config given; without spare experts the same
  EPDispatchOptions options;
  const ExpertMemory& memory;
  bool reaches_all;  ///< kernels reach the memory of all ranks: one node, or nodes that are mapped

  /// Whether a dispatch plans copies from ids that nodes have sent each other. Else it plans first.
  [[nodiscard]] bool plans_after_ids() const { return options.spare_experts > 0 && !reaches_all; }

  /// The dropped id in the ids that are routed; those of slots were checked before.
  [[nodiscard]] std::int32_t dropped_id() const {
    return options.spare_experts > 0 ? config.num_experts : options.dropped(config);
  }
};

/// Makes the parameters of all kernels of one layer. It has the memory that they need in addition
/// to the layer's memory. Collective to make.
class ExpertParams {
 public:
  explicit ExpertParams(const GpuExpertLayer& layer);
  ExpertParams(const ExpertParams&) = delete;
  ExpertParams& operator=(const ExpertParams&) = delete;
  /// Frees nothing while other ranks may still use it.
  ~ExpertParams();
  /// Collective.
  void release();

  /// @param tables their routing is being made
  [[nodiscard]] RouteParams route(const ExpertCall& call, const ExpertDispatchInput& input,
                                  GpuExpertTables& tables) const;

  /// With spare experts: the same of experts, which are counted before slots take their place: this
  /// rank's for all ranks that kernels reach, or those that it forwards for the ranks of its node.
  [[nodiscard]] RouteParams count(const ExpertCall& call, const ExpertDispatchInput& input,
                                  GpuExpertTables& tables) const;

  [[nodiscard]] EnterParams enter(const ExpertCall& call, const ExpertDispatchInput& input,
                                  GpuExpertTables& tables) const;

  /// All parameters but the tokens, their cuts, the number of senders and the early work. With
  /// several nodes the tokens are those that this rank forwards: [nodes, M] on the workspace.
  [[nodiscard]] RowsParams rows(const ExpertCall& call, const ExpertDispatchInput& input,
                                const GpuExpertTables& tables) const;

  /// Parameters without records, so that rows are copied and not summed.
  [[nodiscard]] StageParams stage(const ExpertCall& call, const ExpertCombineInput& input,
                                  const GpuExpertTables& tables) const;

  /// Parameters of the sum of pulled rows. With several nodes it is the sum of this node; the ranks
  /// have synchronized before, and the caller sets the output.
  [[nodiscard]] CombineParams combine(const ExpertCall& call, const ExpertCombineInput& input,
                                      const GpuExpertTables& tables) const;

  /// How ranks synchronize in a call, and the shape of this rank.
  [[nodiscard]] MoeArrive arrive(const ExpertCall& call, FaultKind kind) const;
  [[nodiscard]] MoeShape shape(const GpuExpertRouting& routing) const;
  /// The shape of a layer of `num_tokens` tokens whose experts are those that were given.
  [[nodiscard]] MoeShape experts_shape(std::int64_t num_tokens) const;

  [[nodiscard]] HostOverflow* overflow() const {
    return static_cast<HostOverflow*>(overflow_.get());
  }

  /// Whether the layer uses the low-latency route. All ranks get the same answer.
  [[nodiscard]] bool is_low_latency() const { return low_latency_; }

  /// Memory for float8 elements and scales of this rank's tokens. It is null unless this rank
  /// quantises them; with several nodes they go to the workspace instead.
  [[nodiscard]] std::byte* elements() const { return static_cast<std::byte*>(elements_.get()); }
  [[nodiscard]] std::byte* scales() const { return static_cast<std::byte*>(scales_.get()); }

 private:
  [[nodiscard]] MoeShape shape(std::int64_t num_tokens, std::int64_t capacity_rows) const;
  [[nodiscard]] MoeShape node_shape(const GpuExpertRouting& routing) const;
  void fill_tables(const ExpertCall& call, GpuExpertRouting& made, RowsParams& params) const;
  [[nodiscard]] NearPeers<std::byte> record_parts(std::int64_t offset) const;
  [[nodiscard]] const std::byte* weights_of(const ExpertDispatchInput& input) const;
  [[nodiscard]] std::int32_t first_rank() const {
    return layer_.config.rank / layer_.config.local_world_size * layer_.config.local_world_size;
  }

  const GpuExpertLayer& layer_;
  bool low_latency_;
  std::uint32_t max_delay_ns_;  ///< see MoeArrive
  RecordWorkspace workspace_;
  SymmetricBuffer records_;
  SignalPad channels_;
  std::shared_ptr<void> state_;        ///< MoeState, then the words of placed sources
  std::shared_ptr<void> tile_counts_;  ///< scratch of the route
  std::shared_ptr<void> nan_row_;      ///< CombineParams::lost_row
  std::shared_ptr<void> overflow_;     ///< HostOverflow, pinned
  std::shared_ptr<void> elements_;
  std::shared_ptr<void> scales_;
};

}  // namespace waybill::cuda
