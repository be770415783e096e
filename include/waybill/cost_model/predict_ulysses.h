#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "waybill/cost_model/predict_step.h"
#include "waybill/planner/planner.h"
#include "waybill/planner/static_plans.h"

namespace waybill {

/// Heads of a model, or of it on one rank.
struct HeadCounts {
  std::int64_t q = 0;
  std::int64_t kv = 0;  ///< K has so many, and V too

  friend bool operator==(const HeadCounts&, const HeadCounts&) = default;
};

/// The heads of a model by its rows. None where `head_dim` does not divide them.
/// @throws InvalidArgument for head_dim < 1
[[nodiscard]] std::optional<HeadCounts> heads_of(const ModelShape& model, std::int64_t head_dim);

/// The heads that Ulysses gives each of `degree` ranks: q / degree, and kv / degree or, where there
/// are more ranks than KV heads, one, which degree / kv ranks have. None where they do not divide.
[[nodiscard]] std::optional<HeadCounts> ulysses_heads(const HeadCounts& heads, std::int32_t degree);

/// Predicts a step of Ulysses: heads are split over the ranks of a group instead of tokens
/// (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509). KV heads are repeated where a group
/// has more ranks, as DeepSpeed and bench/python/attention_ways.py do. Each rank attends to whole
/// documents, of its own heads, by a kernel of variable lengths.
///
/// A document lies on the group in which it begins; its tokens are packed and cut evenly. With d
/// ranks in the group, T tokens on it, h = ulysses_heads(...), and e = head_dim * bytes of an
/// element, a rank sends each of the d - 1 others, and gets from each,
///   T/d * e * (h.q + 2 * h.kv)  bytes in the dispatch of Q, K, V,
///   T/d * e * h.q               bytes in the return of O, the dispatch of dO, the return of dQ,
///   T/d * e * 2 * h.kv          bytes in the return of dK, dV, summed at home if repeated.
/// Work of a rank is that of the group's documents over d: even in a group, not between groups.
/// Times are those of predict_step: nothing overlaps. Gradients of K and V are pushed as all else.
/// Not counted: the copies that arrange rows by head before and after each exchange.
///
/// @param groups its world, tokens and degree; the mask is that of the options
/// @param options `transfer` is not looked at
/// @throws InvalidArgument as groups.check() and options.check() do, and where heads do not divide
[[nodiscard]] StepPrediction predict_ulysses(std::span<const std::int64_t> doc_lengths,
                                             const StaticPlanOptions& groups, std::int64_t head_dim,
                                             const StepOptions& options = {});

}  // namespace waybill
