#include "waybill/planner/planner.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "balance.h"
#include "figures.h"
#include "waybill/core/error.h"
#include "waybill/core/topology.h"
#include "waybill/planner/attention_plan.h"
#include "waybill/planner/planner_options.h"
#include "waybill/planner/relay.h"

namespace waybill {
namespace {

constexpr std::int64_t max_tokens = std::int64_t{1} << 40;
constexpr std::int64_t max_hidden = std::int64_t{1} << 24;

void check_range(const char* who, const char* field, std::int64_t got, std::int64_t low,
                 std::int64_t high) {
  require(low <= got && got <= high, who, ": ", field, " = ", got, ", expected ", low, "..", high);
}

void check_positive(const char* who, const char* field, double got, bool zero_too = false) {
  require(std::isfinite(got) && (zero_too ? got >= 0 : got > 0), who, ": ", field, " = ", got,
          ", expected a number ", zero_too ? ">= 0" : "> 0");
}

void check_speed(const char* who, const char* field, double got) {
  require(LinkSpeeds::makes_sense(got), who, ": ", field, " = ", got, ", expected ",
          LinkSpeeds::least, " to ", LinkSpeeds::most, " bytes per second");
}

}  // namespace

std::string to_string(const AttentionMask& mask) {
  if (mask.has_window()) return concat(to_string(mask.kind), ", window ", mask.window);
  return std::string(to_string(mask.kind));
}

void PlannerOptions::check(const char* who) const {
  check_range(who, "world_size", world_size, 1, max_world_size);
  check_range(who, "tokens_per_rank", tokens_per_rank, 0, max_tokens / world_size);
  check_range(who, "model.q_hidden", model.q_hidden, 1, max_hidden);
  check_range(who, "model.kv_hidden", model.kv_hidden, 1, max_hidden);
  check_range(who, "mask.window", mask.window, 0, max_tokens);
  require(!mask.is_full() || mask.window == 0, who, ": mask.window = ", mask.window,
          ", expected 0: the mask is full");
  check_range(who, "max_tokens_per_rank", max_tokens_per_rank, 0, max_tokens);
  check_range(who, "block_tokens", block_tokens, 1, std::int64_t{1} << 20);
  require(std::isfinite(imbalance_target) && imbalance_target > 1, who,
          ": imbalance_target = ", imbalance_target, ", expected a number > 1");
  check_positive(who, "byte_weight", byte_weight, true);
  check_speed(who, "hardware.nvlink_bytes_per_second", hardware.nvlink_bytes_per_second);
  check_speed(who, "hardware.network_bytes_per_second", hardware.network_bytes_per_second);
  check_positive(who, "hardware.message_seconds", hardware.message_seconds, true);
  check_positive(who, "hardware.pairs_per_second", hardware.pairs_per_second, true);
  check_range(who, "hardware.row_pairs", hardware.row_pairs, 0, std::int64_t{1} << 20);
  check_range(who, "hardware.shard_pairs", hardware.shard_pairs, 0, std::int64_t{1} << 40);
  require(byte_weight == 0 || hardware.pairs_per_second > 0, who, ": byte_weight = ", byte_weight,
          " needs hardware.pairs_per_second, got 0");
  require(hardware.ranks_per_node >= 1, who,
          ": hardware.ranks_per_node = ", hardware.ranks_per_node, ", expected >= 1");
}

struct Planner::Memory {
  detail::HomeLayout home;
  detail::Balancer balancer;
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
  detail::write_plan(home, balancer.moves(), options, next.plan);
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

QkvPlan plan_pieces(std::span<const std::vector<DocumentRange>> rank_pieces,
                    const PlannerOptions& options) {
  options.check("plan_pieces");
  require(options.max_tokens_per_rank == 0 && options.byte_weight == 0,
          "plan_pieces: max_tokens_per_rank = ", options.max_tokens_per_rank,
          ", byte_weight = ", options.byte_weight, ", expected 0: plans of pieces have no figures");
  detail::HomeLayout home;
  detail::lay_out(rank_pieces, options, home);
  detail::Balancer balancer;
  balancer.run(home, options, options.imbalance_target);
  QkvPlan plan;
  detail::write_plan(home, balancer.moves(), options, plan);
  return plan;
}

}  // namespace waybill
