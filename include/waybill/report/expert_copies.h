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
  /// Links, and the costs of a dispatch and a combine besides bytes.
  ExpertCostOptions calls = {};

  /// @throws InvalidArgument "who: field = got, expected ..."
  void check(const char* who) const;

  friend bool operator==(const ExpertCopyCosts&, const ExpertCopyCosts&) = default;
};

/// One layer of experts in a step, seconds of the slowest rank.
struct ExpertStepSeconds {
  double dispatch = 0;         ///< tokens, with counting; with copies planning, too
  double cached_dispatch = 0;  ///< gradients, by the known routing
  double combine = 0;          ///< sums, and the gradients of tokens
  double gemm = 0;             ///< the experts' products forward; backward takes twice as long
  double weights = 0;          ///< copies come after the rows of a dispatch; backward fetches again
  double gradients = 0;        ///< float32 gradients of copies home, over the links alone

  [[nodiscard]] double forward() const { return dispatch + weights + gemm + combine; }
  [[nodiscard]] double backward() const {
    return cached_dispatch + weights + 2 * gemm + combine + gradients;
  }
};

/// The copies that EvenExpertsPlanner plans, what they cost and gain. Nothing has run. Seconds are
/// those of the slowest rank.
struct ExpertCopies {
  EPConfig config;
  EvenExperts plan;
  std::int64_t alignment = 1;
  std::vector<std::int64_t> expert_rows;  ///< [E]
  std::vector<std::int64_t> rows_before;  ///< [R] rows that a rank computes without copies
  std::vector<std::int64_t> rows_after;   ///< [R]
  /// Rows of the fullest rank where each slot has whole tiles of `alignment` rows.
  std::int64_t tiled_before = 0;
  std::int64_t tiled_after = 0;
  ExpertStepSeconds before;  ///< without copies
  ExpertStepSeconds after;

  std::int64_t weight_bytes = 0;    ///< one expert's
  std::int64_t gradient_bytes = 0;  ///< one expert's, float32
  /// [R] transfers that a rank makes, to copies of its experts and from copies that it forwards.
  std::vector<std::int32_t> weights_sent;
  std::int32_t busiest = 0;    ///< the rank whose weights take longest
  bool busiest_sends = false;  ///< else it receives them
  bool network = false;        ///< over the network, else over NVLink
  std::int32_t busiest_weights = 0;
  double weight_seconds = 0;  ///< for these weights over that link alone

  [[nodiscard]] std::int64_t num_copies() const;  ///< that take rows
  [[nodiscard]] double forward_gain() const { return before.forward() - after.forward(); }
  [[nodiscard]] double backward_gain() const { return before.backward() - after.backward(); }
};

/// Plans and prices copies: calls of a layer without copies and with them, whose rows then go to
/// other ranks. Combines sum on each rank first on one node, as ExpertParallel has them.
/// @param config as predict_experts has it; nodes have config.local_world_size ranks
/// @param options with spare experts
/// @param ids as predict_experts has them
/// @throws InvalidArgument as predict_experts, and for sizes or speeds that are not positive
[[nodiscard]] ExpertCopies price_expert_copies(const EPConfig& config,
                                               const EPDispatchOptions& options,
                                               std::span<const std::vector<std::int32_t>> ids,
                                               const ExpertCopyCosts& costs = {});

/// How often a copy travels for one microbatch.
struct ExpertCopyTrips {
  double weights = 2;    ///< forward and backward; 1: they are kept, or there is no backward
  double gradients = 1;  ///< home, float32; 0: there is no backward
  double gemm = 3;       ///< products of a row: one forward, two backward; 1: no backward
  bool network = false;  ///< to another node
};

/// The rows from which a copy takes more time off the fullest rank than it takes itself over one
/// link, if nothing hides it: `min_rows` of EvenExpertsOptions that always pay. An expert's size
/// does not count, as its products grow with its bytes.
/// @throws InvalidArgument for speeds and trips that are no positive numbers
[[nodiscard]] std::int64_t break_even_rows(const EPConfig& config,
                                           const ExpertCopyCosts& costs = {},
                                           const ExpertCopyTrips& trips = {});

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
