#include "waybill/planner/planner.h"

#include <algorithm>
#include <utility>

#include "balance.h"
#include "build_plan.h"
#include "figures.h"
#include "relay_planner.h"
#include "waybill/core/error.h"

namespace waybill {

struct Planner::Memory {
  detail::HomeLayout home;
  detail::Balancer balancer;
  detail::PlanWriter writer;
  detail::FigureCounter figures;
  detail::RelayPlanner relay;
  AttentionPlan plan;  ///< the latest result
  AttentionPlan next;  ///< in the making
  AttentionPlan best;

  void compute(const PlannerOptions& options);
  void compute_next(const PlannerOptions& options, double target);
  void write_next(const PlannerOptions& options);
  [[nodiscard]] std::int32_t rank_over_capacity() const;
};

// The first rank whose buffers are too small; -1: none.
std::int32_t Planner::Memory::rank_over_capacity() const {
  const std::int64_t limit = next.options.max_tokens_per_rank;
  if (limit == 0) return -1;
  for (std::int32_t r = 0; r < next.options.world_size; ++r) {
    if (std::max(next.attention_tokens[r], next.kv_tokens[r]) > limit) return r;
  }
  return -1;
}

void Planner::Memory::write_next(const PlannerOptions& options) {
  next.options = options;
  next.options.tokens_per_rank = home.tokens_per_rank;
  writer.write(home, balancer.moves(), options, next.plan);
  figures.count(home, next);
}

void Planner::Memory::compute_next(const PlannerOptions& options, double target) {
  balancer.run(home, options, target);
  write_next(options);
  if (rank_over_capacity() >= 0) {  // per_query: a document cut in two needs its keys twice
    balancer.run(home, options, detail::Balancer::no_target);
    write_next(options);
  }
  const std::int32_t over = rank_over_capacity();
  require(over < 0, "plan_attention: infeasible: rank ", over, " needs ",
          over < 0 ? 0 : std::max(next.attention_tokens[over], next.kv_tokens[over]),
          " tokens, max_tokens_per_rank has ", options.max_tokens_per_rank);
  if (options.relay) {
    relay.plan(figures, next);
  } else {
    next.relay = {};
  }
}

void Planner::Memory::compute(const PlannerOptions& options) {
  if (options.byte_weight == 0) {
    compute_next(options, options.imbalance_target);
    return std::swap(plan, next);
  }
  double least = 0;
  bool any = false;
  for (const double excess : {1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 1e9}) {
    compute_next(options, 1 + (options.imbalance_target - 1) * excess);
    const double work = static_cast<double>(*std::max_element(next.work.begin(), next.work.end()));
    const double seconds =
        work / options.hardware.pairs_per_second + options.byte_weight * next.limit_seconds();
    if (any && seconds >= least) continue;
    any = true;
    least = seconds;
    std::swap(next, best);
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
