#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "experts/expert_executor.h"
#include "transport/transport.h"
#include "waybill/experts/ep_all2all_layer.h"

// How the ranks of a layer agree: on its settings once, in each call on the call, and between calls
// by signals of their own.

namespace waybill::detail {

/// The settings that all ranks of a layer must have alike.
[[nodiscard]] std::vector<Setting> layer_settings(const EPConfig& config,
                                                  const EPLayerOptions& options);

/// The same settings as hashes, for calls without arguments.
[[nodiscard]] CallFingerprint layer_fingerprint(const EPConfig& config,
                                                const EPLayerOptions& options);

/// A dispatch.
/// @param routing number of the dispatch whose routing it takes; not given: it counts
/// @param present number of the dispatch whose copies are there already; 0: none
[[nodiscard]] CallFingerprint dispatch_fingerprint(CallFingerprint layer,
                                                   const ExpertDispatchInput& input,
                                                   std::optional<std::uint32_t> routing,
                                                   std::uint32_t present);

/// A combine of the rows of dispatch `number`.
[[nodiscard]] CallFingerprint combine_fingerprint(CallFingerprint layer,
                                                  const ExpertCombineInput& input,
                                                  std::uint32_t number);

/// Signals apart from those of calls: barriers, and answers to ranks without rows. Collective to
/// make.
class LayerSignals {
 public:
  LayerSignals(Transport& transport, const EPConfig& config);
  LayerSignals(const LayerSignals&) = delete;
  LayerSignals& operator=(const LayerSignals&) = delete;
  ~LayerSignals();

  /// Lets the ranks of this node, or all ranks, wait for each other.
  void barrier(ExpertExecutor& executor, const Stream& stream, bool intra_node_only);

  /// Whether combine `number`, counted from 1, will have a backward. A rank with rows knows it
  /// (`mine`); a rank without rows gets the answer of the first rank with rows.
  /// @param counts rows that each rank received [W]
  /// @param asks whether this rank wants to know
  [[nodiscard]] bool needs_gradients(std::span<const std::int32_t> counts, std::uint64_t number,
                                     bool mine, bool asks);

  /// Collective.
  void release();

 private:
  [[nodiscard]] bool exchange(bool mine);
  [[nodiscard]] bool ask(std::int32_t rank, std::uint64_t number);
  void answer(std::span<const std::int32_t> counts, std::uint64_t number, bool mine);

  Transport& transport_;
  EPConfig config_;
  SignalPad signals_;  ///< [3, W]: barriers of the node, of the world, answers
  std::uint64_t node_barriers_ = 0;
  std::uint64_t world_barriers_ = 0;
  std::uint64_t answered_ = 0;  ///< last combine for which this rank answered
  std::uint32_t answers_ = 0;   ///< bit i: the answer for combine answered_ - i
};

}  // namespace waybill::detail
