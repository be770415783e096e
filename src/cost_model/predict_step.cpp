#include "waybill/cost_model/predict_step.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <unordered_map>

#include "core/checks.h"
#include "flows.h"
#include "routing/homes.h"
#include "waybill/core/error.h"
#include "waybill/planner/varlen_relay.h"

namespace waybill {
namespace {

using detail::end_of;
using detail::FlowSet;
using detail::homes_of;
using detail::StepFlows;
using detail::TimedPlan;

constexpr const char* in_predict_step = "predict_step";

void check_bytes(const TimedPlan& timed, const StepOptions& options) {
  double rows = 0;
  for (const std::int64_t total : timed.routing.fwd_kv.recv.total)
    rows += static_cast<double>(total);
  if (timed.relay != nullptr) {
    for (const RelayHop& hop : timed.relay->hops) rows += static_cast<double>(hop.num_rows);
  }
  const auto row_bytes =
      static_cast<double>(options.model.q_row_bytes() + options.model.kv_row_bytes());
  require(2 * rows * row_bytes < 0x1p62, in_predict_step, ": ", rows, " rows of ", row_bytes,
          " bytes, expected at most 2^62 bytes in all");
}

/// @param kv the flows of K and V; those of their gradients here go straight
StepFlows flows_of(const TimedPlan& timed, const Topology& nodes, const ModelShape& model,
                   const std::vector<detail::Flow>& kv) {
  StepFlows flows;
  flows.q.flows = detail::q_flows(timed, model.q_row_bytes());
  flows.dispatch.flows = kv;  // first: flows name others by their place
  flows.dispatch.flows.insert(flows.dispatch.flows.end(), flows.q.flows.begin(),
                              flows.q.flows.end());
  flows.gradient.flows = detail::kv_flows(timed, nodes, TransferMode::direct, model.kv_row_bytes());
  for (FlowSet* set : {&flows.dispatch, &flows.q, &flows.gradient}) set->count(nodes);
  return flows;
}

// Takes dK and dV back as K and V went, where that is sooner than straight. Those of a batch go
// straight on one node, as the dispatcher sends them there.
void try_forwarded_gradient(std::vector<detail::Flow> kv, const Topology& nodes, bool is_batch,
                            StepPrediction& step) {
  if (step.options.transfer == TransferMode::direct) return;
  if (is_batch && nodes.num_nodes() == 1) return;
  FlowSet set;
  set.flows = detail::gradient_flows(std::move(kv), detail::sum_width(step.options.model));
  set.count(nodes);
  PhasePrediction forwarded;
  forwarded.phase = StepPhase::kv_gradient;
  forwarded.begin = step.phases.back().begin;
  detail::run_transfer(set, true, step.options.costs.pull_share, nodes, step.options, forwarded);
  if (end_of(forwarded) >= end_of(step.phases.back())) return;
  step.phases.back() = std::move(forwarded);
  step.gradient_transfer = step.options.transfer;
}

/// Amounts by document for one cause.
struct Tally {
  StepCause* cause = nullptr;
  std::unordered_map<std::int32_t, std::int64_t> amounts;

  /// Whether a row from `src` to `dst`, forward, crosses the link that the cause names.
  [[nodiscard]] bool crosses(std::int32_t src, std::int32_t dst, bool same_node) const {
    const detail::LinkField& link = *detail::link_of(cause->resource);
    if (link.network == same_node) return false;
    const bool from_src = link.out != detail::is_reverse(cause->phase);
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

/// Fills amount, document and document_amount of causes whose phase, rank and resource are set.
/// A walk over all rows that move, for all causes at once.
/// @param work [N] pairs of each shard
void find_documents(const TimedPlan& timed, const Topology& nodes,
                    const std::vector<std::int64_t>& work, StepPrediction& step) {
  const QkvPlan& plan = *timed.plan;
  std::vector<Tally> tallies;
  const auto add_cause = [&](StepCause& cause) {
    if (cause.resource != StepResource::nothing) tallies.push_back({&cause, {}});
  };
  for (PhasePrediction& phase : step.phases) add_cause(phase.slowest);
  for (StepCause& cause : step.path) add_cause(cause);
  const ModelShape& model = step.options.model;
  const std::int64_t q_bytes = model.q_row_bytes();
  for (std::int64_t n = 0; n < plan.num_shards(); ++n) {
    const std::int32_t src = timed.home[n];
    const std::int32_t dst = plan.q_dst[n];
    const bool same = nodes.share_node(Rank{src}, Rank{dst});
    for (Tally& tally : tallies) {
      if (tally.cause->resource == StepResource::compute) {
        if (dst == tally.cause->rank) tally.add(timed.document[n], work[n]);
      } else if (src != dst && moves_q(tally.cause->phase) && tally.crosses(src, dst, same)) {
        tally.add(timed.document[n], plan.shard_len[n] * q_bytes);
      }
    }
  }
  const auto add_kv = [&](StepPhase phase, TransferMode transfer, std::int64_t width) {
    detail::visit_kv_moves(timed, nodes, transfer, [&](const detail::KvMove& move) {
      const bool same = nodes.share_node(Rank{move.src}, Rank{move.dst});
      for (Tally& tally : tallies) {
        if (tally.cause->phase != phase || !tally.crosses(move.src, move.dst, same)) continue;
        tally.add(timed.document[move.shard],
                  move.rows * model.kv_row_bytes() * (move.is_fed_on ? width : 1));
      }
    });
  };
  add_kv(StepPhase::dispatch, step.options.transfer, 1);
  add_kv(StepPhase::kv_gradient, step.gradient_transfer, detail::sum_width(model));
  for (const Tally& tally : tallies) tally.finish();
}

/// @param even as if every rank had the mean of the work
StepPrediction predict_plan(const TimedPlan& timed, const StepOptions& options, bool even) {
  options.check(in_predict_step);
  require(options.transfer != TransferMode::relay || timed.relay != nullptr, in_predict_step,
          ": options.transfer = relay, expected direct or once_per_node: the plan has no relay "
          "schedule");
  const AttentionMask mask = options.mask.as_in(*timed.plan, in_predict_step);
  check_bytes(timed, options);
  const Topology nodes{timed.plan->world_size, options.hardware.ranks_per_node};
  std::vector<detail::Flow> kv =
      detail::kv_flows(timed, nodes, options.transfer, options.model.kv_row_bytes());
  const StepFlows flows = flows_of(timed, nodes, options.model, kv);
  const std::vector<std::int64_t> shard_pairs =
      detail::work_of_shards(timed, mask, options.hardware);

  StepPrediction step;
  step.options = options;
  step.options.mask = mask;
  step.world_size = timed.plan->world_size;
  step.work.assign(step.world_size, 0);
  std::vector<std::int64_t> staying(timed.stays.empty() ? 0 : step.world_size);
  for (std::size_t n = 0; n < shard_pairs.size(); ++n) {
    step.work[timed.plan->q_dst[n]] += shard_pairs[n];
    if (!timed.stays.empty() && timed.stays[n] != 0)
      staying[timed.plan->q_dst[n]] += shard_pairs[n];
  }
  detail::run_phases(flows, nodes, options.costs.pull_share, even, staying, step);
  try_forwarded_gradient(std::move(kv), nodes, !timed.stays.empty(), step);
  detail::sum_up(step);
  find_documents(timed, nodes, shard_pairs, step);
  return step;
}

}  // namespace

std::string_view to_string(StepPhase phase) {
  static constexpr std::array<std::string_view, num_step_phases> names = {
      "dispatch Q K V",     "attention", "return O",    "dispatch dO",
      "attention backward", "return dQ", "return dK dV"};
  return names[static_cast<std::size_t>(phase)];
}

std::string_view to_string(StepResource resource) {
  static constexpr std::array<std::string_view, 6> names = {
      "nothing", "compute", "NVLink in", "NVLink out", "network in", "network out"};
  return names[static_cast<std::size_t>(resource)];
}

bool moves_rows(StepPhase phase) {
  return phase != StepPhase::attention && phase != StepPhase::attention_gradient;
}

const StepCause& StepPrediction::bottleneck() const {
  return *std::max_element(path.begin(), path.end(),
                           [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
}

namespace {

/// Without a routing.
std::unique_ptr<TimedPlan> timed_plan(const QkvPlan& plan, const RelaySchedule* relay) {
  auto made = std::make_unique<TimedPlan>();
  TimedPlan& timed = *made;
  timed.plan = &plan;
  timed.relay = relay != nullptr && !relay->empty() ? relay : nullptr;
  timed.home = homes_of(plan.rank_shard_offsets);
  if (timed.relay != nullptr)
    detail::check_hops(in_predict_step, timed.relay->hops, plan.world_size, plan.shard_len,
                       timed.home);
  timed.document.resize(timed.home.size());
  timed.position.resize(timed.home.size());
  detail::for_each_place(plan,
                         [&](std::int64_t d, std::int32_t, std::int64_t token, std::int32_t shard) {
                           timed.document[shard] = static_cast<std::int32_t>(d);
                           timed.position[shard] = token;
                         });
  return made;
}

}  // namespace

StepPredictor::StepPredictor(const QkvPlan& plan, const RelaySchedule* relay) {
  QkvRouting routing = compute_qkv_routing(plan);  // checks the plan
  auto timed = timed_plan(plan, relay);
  timed->routing = std::move(routing);
  timed_ = std::move(timed);
}

StepPredictor::StepPredictor(const QkvPlan& plan, const VarlenRouting& routing,
                             const RelaySchedule* relay) {
  plan.check(in_predict_step);
  auto timed = timed_plan(plan, relay);
  timed->routing.fwd_q = routing.fwd_q;
  timed->routing.fwd_kv = routing.fwd_kv;
  timed->stays.resize(plan.num_shards());
  for (std::int64_t n = 0; n < plan.num_shards(); ++n) {
    timed->stays[n] = routing.fwd_q.destination_end(n) == routing.fwd_q.destination_begin(n);
  }
  timed_ = std::move(timed);
}

StepPredictor::StepPredictor(const AttentionPlan& plan) : StepPredictor(plan.plan, &plan.relay) {}
StepPredictor::~StepPredictor() = default;
StepPredictor::StepPredictor(StepPredictor&&) noexcept = default;
StepPredictor& StepPredictor::operator=(StepPredictor&&) noexcept = default;

bool StepPredictor::has_relay() const { return timed_->relay != nullptr; }

StepPrediction StepPredictor::predict(const StepOptions& options) const {
  return predict_plan(*timed_, options, false);
}

StepPrediction StepPredictor::predict_even(const StepOptions& options) const {
  return predict_plan(*timed_, options, true);
}

StepPrediction predict_step(const QkvPlan& plan, const StepOptions& options) {
  return StepPredictor(plan).predict(options);
}

StepPrediction predict_step(const AttentionPlan& plan, const StepOptions& options) {
  return StepPredictor(plan).predict(options);
}

StepPrediction predict_step(const AttentionPlan& plan) {
  return predict_step(plan, StepOptions::of(plan));
}

StepOptions StepOptions::of(const AttentionPlan& plan) {
  StepOptions options;
  options.model = plan.options.model;
  options.mask = plan.options.mask;
  options.hardware = plan.options.hardware;
  options.transfer = plan.relay.empty() ? TransferMode::direct : TransferMode::relay;
  return options;
}

void StepOptions::check(const char* who) const {
  PlannerOptions options;
  options.model = model;
  options.mask = mask;
  options.hardware = hardware;
  options.check(who);
  detail::check_not_negative(who, "costs.phase_seconds", costs.phase_seconds);
  detail::check_positive(who, "costs.pull_share", costs.pull_share);
  detail::check_positive(who, "costs.forward_share", costs.forward_share);
  detail::check_not_negative(who, "costs.network_message_seconds", costs.network_message_seconds);
  detail::check_not_negative(who, "costs.network_post_seconds", costs.network_post_seconds);
  detail::check_at_least(who, "costs.forward_chunk_bytes", costs.forward_chunk_bytes, 0);
  detail::check_positive(who, "costs.forward_flops_per_second", costs.forward_flops_per_second);
  detail::check_positive(who, "costs.backward_flops_per_second", costs.backward_flops_per_second);
}

namespace {

/// As a dispatcher sends what has no schedule.
StepOptions without_relay(StepOptions options, std::int32_t world_size) {
  const bool several_nodes = world_size > options.hardware.ranks_per_node;
  options.transfer = several_nodes ? TransferMode::once_per_node : TransferMode::direct;
  return options;
}

}  // namespace

RelaySchedule relay_that_pays(const QkvPlan& plan, const VarlenRouting& routing,
                              const PlannerOptions& options) {
  constexpr double min_gain = 0.01;  // a share of the step
  RelaySchedule relay = plan_varlen_relay(plan, routing, options);
  if (relay.empty()) return relay;
  const StepPredictor predictor(plan, routing, &relay);
  StepOptions step{.model = options.model, .mask = options.mask, .hardware = options.hardware};
  const double without = predictor.predict(without_relay(step, plan.world_size)).seconds;
  step.transfer = TransferMode::relay;
  if (predictor.predict(step).seconds > (1 - min_gain) * without) return {};
  return relay;
}

std::string_view to_string(RemedyKind kind) {
  static constexpr std::array<std::string_view, 7> names = {
      "relay",          "once_per_node",  "even_work", "double_nvlink",
      "double_network", "double_compute", "no_relay"};
  return names[static_cast<std::size_t>(kind)];
}

std::vector<Remedy> step_remedies(const StepPredictor& predictor, const StepPrediction& step) {
  std::vector<Remedy> remedies;
  const auto add = [&](RemedyKind kind, const StepOptions& options) {
    remedies.push_back({kind, predictor.predict(options).seconds});
  };
  const bool several_nodes = step.world_size > step.options.hardware.ranks_per_node;
  StepOptions options = step.options;
  if (predictor.has_relay() && options.transfer != TransferMode::relay) {
    options.transfer = TransferMode::relay;
    add(RemedyKind::relay, options);
  }
  if (step.options.transfer == TransferMode::relay) {
    add(RemedyKind::no_relay, without_relay(options, step.world_size));
  }
  if (several_nodes && step.options.transfer == TransferMode::direct) {
    options.transfer = TransferMode::once_per_node;
    add(RemedyKind::once_per_node, options);
  }
  options = step.options;
  options.hardware.nvlink_bytes_per_second *= 2;
  add(RemedyKind::double_nvlink, options);
  if (several_nodes) {
    options = step.options;
    options.hardware.network_bytes_per_second *= 2;
    add(RemedyKind::double_network, options);
  }
  options = step.options;
  options.hardware.pairs_per_second *= 2;
  options.costs.forward_flops_per_second *= 2;
  options.costs.backward_flops_per_second *= 2;
  add(RemedyKind::double_compute, options);
  remedies.push_back({RemedyKind::even_work, predictor.predict_even(step.options).seconds});
  std::stable_sort(remedies.begin(), remedies.end(),
                   [](const Remedy& a, const Remedy& b) { return a.seconds < b.seconds; });
  return remedies;
}

namespace {

constexpr std::int64_t word_bytes = 8;
constexpr std::int64_t words_per_call = 5;  // that it has come, and the fingerprint's four

/// @param words that go to each other rank
CallOverhead overhead_of(const Topology& topology, std::int64_t words,
                         const HardwareFacts& hardware, const StepCosts& costs) {
  topology.check();
  StepOptions{.hardware = hardware, .costs = costs}.check("call_overhead");
  const std::int64_t world = topology.world_size;
  CallOverhead result;
  result.node_messages = topology.ranks_per_node - 1;
  result.network_messages = world - topology.ranks_per_node;
  result.bytes_out = (world - 1) * words * word_bytes;
  // By parity of the call, as a fast rank may be in the next one already.
  result.memory_bytes = 2 * world * words * word_bytes;
  const auto link_seconds = [&](std::int64_t messages, double of_message, double speed) {
    return static_cast<double>(messages) *
           (of_message + static_cast<double>(words * word_bytes) / speed);
  };
  const double latency = result.network_messages > 0 ? costs.network_message_seconds : 0;
  result.seconds =
      costs.phase_seconds +
      std::max(link_seconds(result.node_messages, hardware.message_seconds,
                            hardware.nvlink_bytes_per_second),
               latency + link_seconds(result.network_messages, costs.network_post_seconds,
                                      hardware.network_bytes_per_second));
  return result;
}

}  // namespace

CallOverhead call_overhead(const Topology& topology, const HardwareFacts& hardware,
                           const StepCosts& costs) {
  return overhead_of(topology, words_per_call, hardware, costs);
}

CallOverhead counting_overhead(const Topology& topology, std::int32_t num_experts,
                               const HardwareFacts& hardware, const StepCosts& costs) {
  require(topology.world_size > 0 && num_experts > 0 && num_experts % topology.world_size == 0,
          "counting_overhead: num_experts = ", num_experts, ", expected a multiple of ",
          topology.world_size, " ranks");
  const std::int64_t counts = std::int64_t{num_experts} + 1 + topology.world_size;
  return overhead_of(topology, words_per_call + counts, hardware, costs);
}

}  // namespace waybill
