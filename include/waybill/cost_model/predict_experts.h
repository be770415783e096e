#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "waybill/core/link_speeds.h"
#include "waybill/cost_model/predict_step.h"
#include "waybill/moe/ep_config.h"
#include "waybill/planner/planner.h"

namespace waybill {

/// How rows of experts cross a network.
enum class ExpertPath : std::uint8_t {
  waiting,  ///< as of 22 November 2026: a put is awaited before its block posts the next; a node's
            ///< rows are forwarded when all of them have come, its sums leave when all are made
  pipelined,  ///< many puts in flight; rows are forwarded, and sums leave, piece by piece
};

[[nodiscard]] std::string_view to_string(ExpertPath path);

/// The costs of a call of experts besides bytes over links ("measured" and "nominal" as in
/// HardwareFacts; docs/functions/predictions.md says from which runs).
struct ExpertCosts {
  std::int32_t num_sms = 32;  ///< multiprocessors of the call; a quarter of them, 1 to 8, puts
  ExpertPath path = ExpertPath::pipelined;
  /// Counting and placing. Measured, 4 x H200: what few tokens take, and what one multiprocessor
  /// takes for a token.
  double count_seconds = 14e-6;
  double count_token_seconds = 50e-9;
  /// With spare experts: the kernel that plans copies, of one block, takes these together. Fit
  /// 256 x 8, 256 x 32, 256 x 64 and 512 x 128 experts x ranks, one H200.
  double plan_seconds = 10.5e-6;
  double plan_rank_seconds = 0.08e-6;   ///< per rank
  double plan_count_seconds = 0.62e-9;  ///< per pair of rank and expert
  /// Sums of a token's rows on one rank, read and written, all of the device. Measured, 4 x H200.
  double sum_bytes_per_second = 3.0e12;
  /// Copies on one rank, read and written, all of the device. Measured, 4 and 8 x H200.
  double copy_bytes_per_second = 4.1e12;
  /// Bytes that one multiprocessor of a combine that pulls loads and stores, together. Measured,
  /// 2 x H200 with few multiprocessors: 66e9 to 85e9.
  double combine_block_bytes_per_second = 75e9;
  /// A kernel of a call besides its first. Fits calls of 128 tokens, 2 logical nodes; measured, 2 x
  /// H200: a dispatch of one token by a known routing takes 4 us more than a combine.
  double kernel_seconds = 4e-6;
  /// The time after the last row of a low latency dispatch: fence, signal, copy. Measured, 4 x
  /// H200.
  double last_row_seconds = 8e-6;
  /// The time of its block that a put takes besides its bytes, where it is awaited. Fits 4096
  /// tokens, 2 logical nodes.
  double put_seconds = 4e-6;
  /// 0: a network card reads rows from memory. Above: the nodes are parts of one host, rows to
  /// others are copied by blocks, each at this speed (measured, 2 x H200: 33e9), over NVLink.
  double path_bytes_per_second = 0;

  /// The kernel that plans copies.
  [[nodiscard]] double planning_seconds(const EPConfig& config) const;

  /// @throws InvalidArgument "who: field = got, expected ..."
  void check(const char* who) const;

  friend bool operator==(const ExpertCosts&, const ExpertCosts&) = default;
};

/// The question to predict_experts.
struct ExpertCostOptions {
  LinkSpeeds links = {};  ///< measured by `waybill calibrate`, or the defaults
  double message_seconds = HardwareFacts{}.message_seconds;
  StepCosts step = {};  ///< phases, pulls and messages between nodes
  ExpertCosts costs = {};
  /// Deprecated, goes in 0.3. Combines pull since 0.2, and true is refused.
  bool push_combine = false;

  /// @throws InvalidArgument "who: field = got, expected ..."
  void check(const char* who) const;

  friend bool operator==(const ExpertCostOptions&, const ExpertCostOptions&) = default;
};

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
  /// Counting and adding sums, for which pipelined rows to other nodes do not wait.
  double overlapped_seconds = 0;
  double network_seconds = 0;  ///< rows between nodes
  double nvlink_seconds = 0;   ///< rows inside the node
  double block_seconds = 0;    ///< stores of multiprocessors: rows, and copies where they arrive
  double end_seconds = 0;      ///< forwarding and sums that the longest of them does not cover
  /// begin + max(network, overlapped_seconds + max(nvlink, block)) + end
  double seconds = 0;
};

/// Predicts the calls of a layer for these choices: from rows and bytes of each link, counted as a
/// call would send them, and from measured and nominal costs. Nothing runs. A token goes over the
/// network once for each node, to the rank of the same local index, which forwards it; with
/// low_latency once for each rank. docs/functions/predictions.md has the formulas.
/// With spare experts rows go to the slots of the plan. A grouped dispatch then counts experts and
/// plans before any row leaves, and counts slots.
/// @param ids one entry per rank, [T, topk] each, of read_expert_ids: a dropped topk slot is
///   num_experts
/// @throws InvalidArgument as summarize_experts, and when options.check() does
[[nodiscard]] std::vector<ExpertCallPrediction> predict_experts(
    const EPConfig& config, const EPDispatchOptions& dispatch,
    std::span<const std::vector<std::int32_t>> ids, const ExpertCostOptions& options = {});

}  // namespace waybill
