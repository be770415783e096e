#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "waybill/cost_model/expert_costs.h"
#include "waybill/moe/ep_config.h"
#include "waybill/planner/relay.h"

namespace waybill {

/// A call of a layer of experts.
enum class ExpertCallKind : std::uint8_t {
  grouped_dispatch,      ///< counts are exchanged; a row arrives for each topk slot
  cached_dispatch,       ///< by a known routing; a row for each token and rank (compact)
  compact_combine,       ///< a row for each token and rank, which experts have left so
  summed_combine,        ///< the same from a row for each topk slot, summed on its rank first
  grouped_combine,       ///< a row for each topk slot goes
  low_latency_dispatch,  ///< straight to the final ranks, without waiting for counts
  low_latency_combine,   ///< the rank's sum of a token straight to its home
};
inline constexpr int num_expert_calls = 7;

[[nodiscard]] std::string_view to_string(ExpertCallKind kind);

/// One call of all ranks. Seconds are those of `rank`, which takes longest.
struct ExpertCallPrediction {
  ExpertCallKind kind = ExpertCallKind::grouped_dispatch;
  std::vector<LinkBytes> links;    ///< [W] bytes of rows
  std::vector<std::int64_t> puts;  ///< [W] that a rank makes to other nodes, to carry them
  std::int32_t rank = 0;
  double begin_seconds = 0;  ///< before rows: launches, signals of all ranks, ids, counts
  /// What rows to other nodes do not wait for, where they are pipelined: counting, adding sums.
  double beside_seconds = 0;
  double network_seconds = 0;  ///< rows between nodes
  double nvlink_seconds = 0;   ///< rows inside the node
  double block_seconds = 0;    ///< what multiprocessors store: rows, and copies where they arrive
  double end_seconds = 0;      ///< what the longest of them does not cover: forwarding, sums
  /// begin, the longer of network and beside + the longer of the other two, and end
  double seconds = 0;
};

/// Predicts the calls of a layer for these choices: from rows and bytes of each link, counted as a
/// call would send them, and from measured and nominal costs. Nothing runs. A token goes over the
/// network once for each node, to the rank of the same local index, which forwards it; with
/// low_latency once for each rank. docs/functions/predict_experts.md has the formulas.
/// @param ids one entry per rank, [T, topk] each, of read_expert_ids: a dropped topk slot is
///   num_experts
/// @throws InvalidArgument as summarize_experts, and when options.check() does
[[nodiscard]] std::vector<ExpertCallPrediction> predict_experts(
    const EPConfig& config, const EPDispatchOptions& dispatch,
    std::span<const std::vector<std::int32_t>> ids, const ExpertCostOptions& options = {});

}  // namespace waybill
