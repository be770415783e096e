#include "step_causes.h"

#include <algorithm>
#include <unordered_map>

namespace waybill::detail {
namespace {

bool goes_out(StepResource resource) {
  return resource == StepResource::nvlink_out || resource == StepResource::network_out;
}

bool over_network(StepResource resource) {
  return resource == StepResource::network_in || resource == StepResource::network_out;
}

bool is_reverse(StepPhase phase) {
  return phase == StepPhase::output || phase == StepPhase::q_gradient ||
         phase == StepPhase::kv_gradient;
}

/// Amounts by document for one cause.
struct Tally {
  StepCause* cause = nullptr;
  std::unordered_map<std::int32_t, std::int64_t> amounts;

  /// Whether a row from `src` to `dst`, forward, crosses the link that the cause names.
  [[nodiscard]] bool crosses(std::int32_t src, std::int32_t dst, bool same_node) const {
    if (over_network(cause->resource) == same_node) return false;
    const bool from_src = goes_out(cause->resource) != is_reverse(cause->phase);
    return (from_src ? src : dst) == cause->rank;
  }

  void add(std::int32_t document, std::int64_t amount) {
    amounts[document] += amount;
    cause->amount += amount;
  }

  void finish() const {
    for (const auto& [document, amount] : amounts) {
      if (amount < cause->document_amount) continue;
      if (amount == cause->document_amount && document > cause->document) continue;
      cause->document = document;
      cause->document_amount = amount;
    }
  }
};

bool moves_q(StepPhase phase) { return moves_rows(phase) && phase != StepPhase::kv_gradient; }

}  // namespace

void find_documents(const TimedPlan& timed, const Topology& nodes, const StepPrediction& step,
                    const std::vector<std::int64_t>& work, const std::vector<StepCause*>& causes) {
  const QkvPlan& plan = *timed.plan;
  std::vector<Tally> kernels;
  std::vector<Tally> links;
  for (StepCause* cause : causes) {
    if (cause->resource == StepResource::nothing) continue;
    (cause->resource == StepResource::compute ? kernels : links).push_back({cause, {}});
  }
  for (std::int64_t n = 0; n < plan.num_shards() && !kernels.empty(); ++n) {
    for (Tally& tally : kernels) {
      if (plan.q_dst[n] == tally.cause->rank) tally.add(timed.document[n], work[n]);
    }
  }
  const ModelShape& model = step.options.model;
  const std::int64_t q_bytes = model.q_row_bytes();
  for (std::int64_t n = 0; n < plan.num_shards(); ++n) {
    const std::int32_t src = timed.home[n];
    const std::int32_t dst = plan.q_dst[n];
    if (src == dst) continue;
    for (Tally& tally : links) {
      if (moves_q(tally.cause->phase) &&
          tally.crosses(src, dst, nodes.share_node(Rank{src}, Rank{dst})))
        tally.add(timed.document[n], plan.shard_len[n] * q_bytes);
    }
  }
  const auto add_kv = [&](StepPhase phase, TransferMode transfer, std::int64_t width) {
    visit_kv_moves(timed, nodes, transfer, [&](const KvMove& move) {
      const bool same = nodes.share_node(Rank{move.src}, Rank{move.dst});
      for (Tally& tally : links) {
        if (tally.cause->phase != phase || !tally.crosses(move.src, move.dst, same)) continue;
        tally.add(timed.document[move.shard],
                  move.rows * model.kv_row_bytes() * (move.is_fed_on ? width : 1));
      }
    });
  };
  add_kv(StepPhase::dispatch, step.options.transfer, 1);
  add_kv(StepPhase::kv_gradient, step.gradient_transfer, sum_width(model));
  for (const auto* tallies : {&kernels, &links}) {
    for (const Tally& tally : *tallies) tally.finish();
  }
}

}  // namespace waybill::detail
