#include "waybill/cost_model/predict_step.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "flows.h"
#include "phase_clock.h"
#include "planner/node_routes.h"
#include "predictor_memory.h"
#include "routing/homes.h"
#include "step_causes.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

using detail::FlowSet;
using detail::FlowWay;
using detail::homes_of;
using detail::RelayedShards;
using detail::TimedPlan;
using detail::wrong_with_hop;

constexpr const char* in_predict_step = "predict_step";

/// Operations of a pair for each element of a row of Q: two products forward, five backward.
constexpr double forward_flops = 4;
constexpr double backward_flops = 10;

void check_relay(const TimedPlan& timed) {
  const std::vector<RelayHop>& hops = timed.relay->hops;
  const RelayedShards shards{timed.plan->world_size, timed.plan->shard_len, timed.home};
  for (std::size_t i = 0; i < hops.size(); ++i) {
    const char* const expected = wrong_with_hop(hops, i, shards);
    require(expected == nullptr, in_predict_step, ": relay.hops[", i, "]: ", hops[i].num_rows,
            " rows from ", hops[i].row_begin, " of shard ", hops[i].shard, ", from rank ",
            hops[i].src_rank, " to ", hops[i].dst_rank, ", expected ", expected);
  }
}

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

double forward_pairs_per_second(const StepOptions& options) {
  if (options.hardware.pairs_per_second > 0) return options.hardware.pairs_per_second;
  return options.costs.forward_flops_per_second /
         (forward_flops * static_cast<double>(options.model.q_hidden));
}

double kernel_pairs_per_second(const StepOptions& options, StepPhase phase) {
  const double forward = forward_pairs_per_second(options);
  if (phase == StepPhase::attention) return forward;
  return forward * forward_flops / backward_flops * options.costs.backward_flops_per_second /
         options.costs.forward_flops_per_second;
}

std::vector<double> kernel_seconds(const std::vector<std::int64_t>& work, double pairs_per_second,
                                   bool even) {
  std::vector<double> seconds(work.size());
  const double mean = std::accumulate(work.begin(), work.end(), 0.0) /
                      static_cast<double>(std::max<std::size_t>(1, work.size()));
  for (std::size_t r = 0; r < work.size(); ++r)
    seconds[r] = (even ? mean : static_cast<double>(work[r])) / pairs_per_second;
  return seconds;
}

// The flows of the three kinds of phases.
struct StepFlows {
  FlowSet dispatch;
  FlowSet q;
  FlowSet gradient;            ///< of K and V, straight
  FlowSet forwarded_gradient;  ///< as K and V went; empty where they went straight

  StepFlows(const TimedPlan& timed, const Topology& nodes, const StepOptions& options) {
    q.flows = detail::q_flows(timed, options.model.q_row_bytes());
    std::vector<detail::Flow> kv =
        detail::kv_flows(timed, nodes, options.transfer, options.model.kv_row_bytes());
    dispatch.flows = kv;  // first: flows name others by their place
    dispatch.flows.insert(dispatch.flows.end(), q.flows.begin(), q.flows.end());
    gradient.flows =
        detail::kv_flows(timed, nodes, TransferMode::direct, options.model.kv_row_bytes());
    if (options.transfer != TransferMode::direct) {
      forwarded_gradient.flows =
          detail::gradient_flows(std::move(kv), detail::sum_width(options.model));
    }
    for (FlowSet* set : {&dispatch, &q, &gradient, &forwarded_gradient}) set->count(nodes);
  }
};

void run_phase(const StepFlows& flows, const Topology& nodes, const StepPrediction& step, bool even,
               PhasePrediction& phase) {
  const StepOptions& options = step.options;
  const auto transfer = [&](const FlowSet& set, FlowWay way, double share = 1) {
    detail::run_transfer(set, way, share, nodes, options, phase);
  };
  switch (phase.phase) {
    case StepPhase::dispatch:
      return transfer(flows.dispatch, FlowWay::forward);
    case StepPhase::output:
    case StepPhase::q_gradient:
      return transfer(flows.q, FlowWay::reverse);
    case StepPhase::output_gradient:
      return transfer(flows.q, FlowWay::forward);
    case StepPhase::kv_gradient:
      return transfer(flows.gradient, FlowWay::reverse, options.costs.pull_share);
    case StepPhase::attention:
    case StepPhase::attention_gradient:
      phase.seconds =
          kernel_seconds(step.work, kernel_pairs_per_second(options, phase.phase), even);
      return detail::run_kernel(phase);
  }
}

double end_of(const PhasePrediction& phase) {
  return *std::max_element(phase.end.begin(), phase.end.end());
}

// Takes dK and dV back as K and V went, where that is sooner than straight.
void try_forwarded_gradient(const StepFlows& flows, const Topology& nodes, StepPrediction& step) {
  if (step.options.transfer == TransferMode::direct) return;
  PhasePrediction forwarded;
  forwarded.phase = StepPhase::kv_gradient;
  forwarded.begin = step.phases.back().begin;
  detail::run_transfer(flows.forwarded_gradient, FlowWay::reverse, step.options.costs.pull_share,
                       nodes, step.options, forwarded);
  if (end_of(forwarded) >= end_of(step.phases.back())) return;
  step.phases.back() = std::move(forwarded);
  step.gradient_transfer = step.options.transfer;
}

// What of a rank keeps others waiting, or itself.
StepResource resource_of(const PhasePrediction& phase, std::int32_t waiter, std::int32_t rank,
                         const StepOptions& options) {
  if (!moves_rows(phase.phase))
    return phase.seconds[rank] > 0 ? StepResource::compute : StepResource::nothing;
  const LinkBytes& links = phase.links[rank];
  const auto nvlink = [&](std::int64_t bytes) {
    return static_cast<double>(bytes) / options.hardware.nvlink_bytes_per_second;
  };
  const auto network = [&](std::int64_t bytes) {
    return static_cast<double>(bytes) / options.hardware.network_bytes_per_second;
  };
  const bool own = waiter == rank;
  return detail::LinkSeconds{.nvlink_in = own ? nvlink(links.nvlink_in) : 0,
                             .nvlink_out = nvlink(links.nvlink_out),
                             .network_in = own ? network(links.network_in) : 0,
                             .network_out = network(links.network_out)}
      .slowest();
}

std::vector<StepCause> path_of(const StepPrediction& step) {
  std::vector<StepCause> path;
  const std::vector<double>& ends = step.phases.back().end;
  auto rank = static_cast<std::int32_t>(std::max_element(ends.begin(), ends.end()) - ends.begin());
  for (auto phase = step.phases.rbegin(); phase != step.phases.rend(); ++phase) {
    const std::int32_t cause = phase->waits_for[rank];
    path.push_back({.phase = phase->phase,
                    .rank = cause,
                    .resource = resource_of(*phase, rank, cause, step.options),
                    .seconds = phase->end[rank] - phase->begin[cause]});
    rank = cause;
  }
  std::reverse(path.begin(), path.end());
  return path;
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

StepPredictor::StepPredictor(const QkvPlan& plan, const RelaySchedule* relay)
    : memory_(std::make_unique<Memory>()) {
  TimedPlan& timed = memory_->timed;
  timed.plan = &plan;
  timed.relay = relay != nullptr && !relay->empty() ? relay : nullptr;
  timed.routing = compute_qkv_routing(plan);
  timed.home = homes_of(plan.rank_shard_offsets);
  if (timed.relay != nullptr) check_relay(timed);
  timed.document.resize(timed.home.size());
  timed.position.resize(timed.home.size());
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    std::int64_t position = 0;
    for (std::int64_t i = plan.doc_shard_offsets[d]; i < plan.doc_shard_offsets[d + 1]; ++i) {
      const std::size_t shard = plan.doc_shards[i];
      timed.document[shard] = static_cast<std::int32_t>(d);
      timed.position[shard] = position;
      position += plan.shard_len[shard];
    }
  }
}

StepPredictor::StepPredictor(const AttentionPlan& plan) : StepPredictor(plan.plan, &plan.relay) {}
StepPredictor::~StepPredictor() = default;
StepPredictor::StepPredictor(StepPredictor&&) noexcept = default;
StepPredictor& StepPredictor::operator=(StepPredictor&&) noexcept = default;

bool StepPredictor::has_relay() const { return memory_->timed.relay != nullptr; }

StepPrediction StepPredictor::predict(const StepOptions& options) const {
  return memory_->predict(options, false);
}

StepPrediction StepPredictor::predict_even(const StepOptions& options) const {
  return memory_->predict(options, true);
}

StepPrediction StepPredictor::Memory::predict(const StepOptions& options, bool even) const {
  options.check(in_predict_step);
  require(options.transfer != TransferMode::relay || timed.relay != nullptr, in_predict_step,
          ": options.transfer = relay, expected direct or once_per_node: the plan has no relay "
          "schedule");
  const MaskKind kind = timed.plan->mask;
  require(!options.mask.is_full() || kind == MaskKind::full, in_predict_step,
          ": mask = full, expected causal, as the plan");
  require(!options.mask.has_window() || kind == MaskKind::causal, in_predict_step,
          ": mask.window = ", options.mask.window, ", expected 0: the plan's mask is full");
  check_bytes(timed, options);
  const Topology nodes{timed.plan->world_size, options.hardware.ranks_per_node};
  const StepFlows flows(timed, nodes, options);
  const std::vector<std::int64_t> shard_pairs =
      detail::work_of_shards(timed, options.mask, options.hardware);

  StepPrediction step;
  step.options = options;
  step.options.mask.kind = kind;
  step.world_size = timed.plan->world_size;
  step.work.assign(step.world_size, 0);
  for (std::size_t n = 0; n < shard_pairs.size(); ++n)
    step.work[timed.plan->q_dst[n]] += shard_pairs[n];
  step.phases.resize(num_step_phases);
  std::vector<double> begin(step.world_size, 0);
  for (int i = 0; i < num_step_phases; ++i) {
    PhasePrediction& phase = step.phases[i];
    phase.phase = static_cast<StepPhase>(i);
    phase.begin = std::move(begin);
    run_phase(flows, nodes, step, even, phase);
    begin = phase.end;
  }
  try_forwarded_gradient(flows, nodes, step);
  step.seconds = end_of(step.phases.back());
  step.forward_seconds = end_of(step.phase(StepPhase::output));
  step.path = path_of(step);
  std::vector<StepCause*> causes;
  for (PhasePrediction& phase : step.phases) causes.push_back(&phase.slowest);
  for (StepCause& cause : step.path) causes.push_back(&cause);
  detail::find_documents(timed, nodes, step, shard_pairs, causes);
  return step;
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

}  // namespace waybill
