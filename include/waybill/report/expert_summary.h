#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "waybill/core/link_speeds.h"
#include "waybill/cost_model/predict_experts.h"
#include "waybill/moe/ep_config.h"
#include "waybill/report/plan_summary.h"

namespace waybill {

/// The part of a rank in a dispatch of experts' tokens, in rows. A row crosses a link once for each
/// rank that it goes to, between nodes once for each node. A row that stays crosses none.
struct ExpertRankFigures {
  std::int64_t tokens = 0;    ///< its own ones
  std::int64_t dropped = 0;   ///< topk slots of its own tokens that go nowhere
  std::int64_t computed = 0;  ///< topk slots that its experts get: the rows of their products
  std::int64_t received = 0;  ///< tokens that it gets, its own among them
  std::int64_t node_in = 0;   ///< rows over the links inside a node
  std::int64_t node_out = 0;
  std::int64_t network_in = 0;  ///< rows between nodes
  std::int64_t network_out = 0;
  // Rows if each topk slot travelled by itself, straight to the rank of its expert:
  std::int64_t slot_node_in = 0;
  std::int64_t slot_node_out = 0;
  std::int64_t slot_network_in = 0;
  std::int64_t slot_network_out = 0;
};

/// Seconds that the slowest link takes for a dispatch and its combine, by what programs do; no
/// kernel, copy or wait is in them.
struct ExpertWays {
  double waybill = 0;     ///< a row for each token and rank, sums of a rank's rows back
  double all_to_all = 0;  ///< a row for each topk slot, there and back
  double all_gather = 0;  ///< every token to every rank, reduce_scatter of the sums
};

/// The rank and link that need longest.
struct ExpertLimit {
  std::int32_t rank = 0;
  bool network = false;  ///< else a link inside the node
  Direction direction = Direction::in;
  std::int64_t rows = 0;
  double mean_rows = 0;  ///< over the ranks, on such a link that way
  double seconds = 0;    ///< 0: nothing crosses a link
};

/// The figures of a dispatch. Its combine moves the same rows the other way, where the rows of a
/// token are summed before they leave a rank.
struct ExpertSummary {
  EPConfig config;
  std::int64_t row_bytes = 0;                ///< bytes of a row that travels, its scales too
  std::vector<ExpertRankFigures> ranks;      ///< [W]
  std::vector<std::int64_t> expert_entries;  ///< [E] topk slots of each expert

  [[nodiscard]] std::int64_t num_tokens() const;
  [[nodiscard]] Spread computed() const;  ///< over ranks
  [[nodiscard]] ExpertLimit limit(const LinkSpeeds& speeds) const;
};

/// Counts what crosses links, without moving anything.
/// @param ids one entry per rank, [T, topk] each, of read_expert_ids: a dropped topk slot is
/// num_experts
/// @throws InvalidArgument for a config that is not right, another number of ranks, more than
///   max_tokens tokens, or an id that is not in 0..num_experts
[[nodiscard]] ExpertSummary summarize_experts(const EPConfig& config,
                                              const EPDispatchOptions& options,
                                              std::span<const std::vector<std::int32_t>> ids);

[[nodiscard]] ExpertWays compare_expert_ways(const ExpertSummary& summary,
                                             const LinkSpeeds& speeds);

/// The rank for each expert, world_size / num_experts each, such that the busiest rank has little
/// more than the others: experts in falling order of topk slots, each to the rank with the fewest
/// so far that has room (Graham's rule). [E]
[[nodiscard]] std::vector<std::int32_t> place_experts(const ExpertSummary& summary);

/// The meaning of the figures, a sentence each: which rank and link set the limit, how even the
/// experts' work is and how much another placement would give, how much sending a token once saves.
[[nodiscard]] std::vector<std::string> explain_experts(const ExpertSummary& summary,
                                                       const LinkSpeeds& speeds = {});

/// Figures, a line per rank with bars, and explain_experts(), for a terminal 80 columns wide. Of
/// the style gb_per_s is not looked at.
[[nodiscard]] std::string expert_text(const ExpertSummary& summary, const LinkSpeeds& speeds = {},
                                      const TextStyle& style = {});

/// The calls of a layer as predicted, a line each, and what the figures rest on; low latency where
/// `max_tokens` is small enough. 80 columns. @throws as predict_experts
[[nodiscard]] std::string expert_calls_text(const EPConfig& config,
                                            const EPDispatchOptions& dispatch,
                                            std::span<const std::vector<std::int32_t>> ids,
                                            const ExpertCostOptions& options = {},
                                            const TextStyle& style = {});

}  // namespace waybill
