#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "waybill/core/link_speeds.h"
#include "waybill/cost_model/predict_experts.h"
#include "waybill/moe/ep_config.h"
#include "waybill/planner/expert_balance.h"
#include "waybill/report/html_report.h"

namespace waybill {

/// The sizes and speeds that copies of experts are priced by. An expert has three matrices of
/// config.hidden x intermediate elements of config.token_dtype (SwiGLU).
struct ExpertCopyCosts {
  std::int64_t intermediate = 2048;
  /// A rank's grouped products, forward and backward. Nominal, as StepCosts has it.
  double gemm_flops_per_second = 600e12;
  LinkSpeeds links = {};

  friend bool operator==(const ExpertCopyCosts&, const ExpertCopyCosts&) = default;
};

/// The copies that EvenExpertsPlanner plans, what they cost and gain. Nothing has run. Seconds are
/// those of the slowest rank.
struct ExpertCopies {
  EvenExperts plan;
  std::int32_t num_experts = 0;
  std::int64_t alignment = 1;
  std::vector<std::int64_t> expert_rows;  ///< [E]
  std::vector<std::int64_t> rows_before;  ///< [R] rows that a rank computes without copies
  std::vector<std::int64_t> rows_after;   ///< [R]
  /// Rows of the fullest rank where each slot has whole tiles of `alignment` rows.
  std::int64_t tiled_before = 0;
  std::int64_t tiled_after = 0;
  double gemm_before = 0;  ///< seconds of the experts' products, forward
  double gemm_after = 0;

  std::int64_t weight_bytes = 0;    ///< one expert's
  std::int64_t gradient_bytes = 0;  ///< one expert's, float32
  std::int32_t busiest = 0;         ///< the rank whose weights take longest
  bool busiest_sends = false;       ///< else it receives them
  bool network = false;             ///< over the network, else over NVLink
  std::int32_t busiest_weights = 0;
  double weight_seconds = 0;  ///< for these weights over that link alone
  /// The dispatch takes so much longer with the weights on its links. Rows of other ranks and
  /// stores of multiprocessors hide the rest.
  double exposed_seconds = 0;
  double gradient_seconds = 0;  ///< float32 gradients home, over the links alone

  /// Seconds that a forward gains; a backward has two products for each, the weights again, and
  /// the gradients.
  [[nodiscard]] double forward_gain() const { return gemm_before - gemm_after - exposed_seconds; }
  [[nodiscard]] double backward_gain() const {
    return 2 * (gemm_before - gemm_after) - exposed_seconds - gradient_seconds;
  }
};

/// Plans and prices copies.
/// @param config as predict_experts has it; nodes have config.local_world_size ranks
/// @param rows [R, E] of each source rank for each expert
/// @param dispatch the grouped dispatch that the weights travel with, of predict_experts
/// @throws InvalidArgument as even_experts, and for sizes or speeds that are not positive
[[nodiscard]] ExpertCopies price_expert_copies(const EPConfig& config,
                                               std::span<const std::int64_t> rows,
                                               const EvenExpertsOptions& options,
                                               const ExpertCallPrediction& dispatch,
                                               const ExpertCopyCosts& costs = {});

/// Which expert is hot, what its copies cost and gain, and whether they pay, a sentence each.
[[nodiscard]] std::vector<std::string> explain_expert_copies(const ExpertCopies& copies,
                                                             const ExpertCopyCosts& costs = {});

/// The hot experts with their copies, a line per rank with bars before and after, and
/// explain_expert_copies(), for a terminal 80 columns wide.
[[nodiscard]] std::string expert_copies_text(const ExpertCopies& copies,
                                             const ExpertCopyCosts& costs = {},
                                             const TextStyle& style = {});

/// The same as a page that stands alone, as html_report. It takes title, command and inputs of the
/// context.
[[nodiscard]] std::string expert_copies_report(const ExpertCopies& copies,
                                               const ExpertCopyCosts& costs,
                                               const ReportContext& context);

}  // namespace waybill
