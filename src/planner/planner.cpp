#include "waybill/planner/planner.h"

#include <algorithm>
#include <array>
#include <utility>

#include "balance.h"
#include "build_plan.h"
#include "figures.h"
#include "relay_planner.h"
#include "waybill/core/at.h"
#include "waybill/core/error.h"

namespace waybill {

using detail::at;

struct Planner::Memory {
  detail::HomeLayout home;
  detail::Balancer balancer;
  detail::PlanWriter writer;
  detail::FigureCounter figures;
  detail::RelayPlanner relay;
  AttentionPlan plan;
  AttentionPlan best;

  void compute(const PlannerOptions& options);
  void compute(const PlannerOptions& options, double target);
  void check_capacity() const;
};

void Planner::Memory::check_capacity() const {
  const std::int64_t limit = plan.options.max_tokens_per_rank;
  if (limit == 0) return;
  for (std::int32_t r = 0; r < plan.options.world_size; ++r) {
    const std::int64_t needed = std::max(plan.attention_tokens[at(r)], plan.kv_tokens[at(r)]);
    require(needed <= limit, "plan_attention: infeasible: rank ", r, " needs ", needed,
            " tokens, max_tokens_per_rank has ", limit);
  }
}

void Planner::Memory::compute(const PlannerOptions& options, double target) {
  balancer.run(home, options, target);
  plan.options = options;
  plan.options.tokens_per_rank = home.tokens_per_rank;
  writer.write(home, balancer.moves(), options, plan.plan);
  figures.count(home, plan);
  check_capacity();
  if (options.relay) {
    relay.plan(figures, plan);
  } else {
    plan.relay = {};
  }
}

void Planner::Memory::compute(const PlannerOptions& options) {
  if (options.byte_weight == 0) return compute(options, options.imbalance_target);
  double least = 0;
  bool any = false;
  for (const double excess : {1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 1e9}) {
    compute(options, 1 + (options.imbalance_target - 1) * excess);
    const double work = static_cast<double>(*std::max_element(plan.work.begin(), plan.work.end()));
    const double seconds = work / options.hardware.pairs_per_second +
                           options.byte_weight * plan.limit_seconds();
    if (any && seconds >= least) continue;
    any = true;
    least = seconds;
    std::swap(plan, best);
  }
  std::swap(plan, best);
}

Planner::Planner() : memory_(std::make_unique<Memory>()) {}
Planner::~Planner() = default;
Planner::Planner(Planner&&) noexcept = default;
Planner& Planner::operator=(Planner&&) noexcept = default;

const AttentionPlan& Planner::plan(std::span<const std::int64_t> doc_lengths,
                                   const PlannerOptions& options) {
  options.check("plan_attention");
  detail::lay_out(doc_lengths, options, memory_->home);
  memory_->compute(options);
  return memory_->plan;
}

const AttentionPlan& Planner::plan(std::span<const std::vector<std::int64_t>> rank_doc_lengths,
                                   const PlannerOptions& options) {
  options.check("plan_attention");
  detail::lay_out(rank_doc_lengths, options, memory_->home);
  memory_->compute(options);
  return memory_->plan;
}

AttentionPlan Planner::take() { return std::exchange(memory_->plan, {}); }

AttentionPlan plan_attention(std::span<const std::int64_t> doc_lengths,
                             const PlannerOptions& options) {
  Planner planner;
  (void)planner.plan(doc_lengths, options);
  return planner.take();
}

AttentionPlan plan_attention(std::span<const std::vector<std::int64_t>> rank_doc_lengths,
                             const PlannerOptions& options) {
  Planner planner;
  (void)planner.plan(rank_doc_lengths, options);
  return planner.take();
}

}  // namespace waybill
