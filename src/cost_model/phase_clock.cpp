#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "core/batch_bytes.h"
#include "flows.h"
#include "planner/node_routes.h"

namespace waybill::detail {
namespace {

/// Operations of a pair for each element of a row of Q: two products forward, five backward.
constexpr double forward_flops = 4;
constexpr double backward_flops = 10;

/// Seconds of the links of a rank, in the order of link_fields, as if it were alone.
using LinkSeconds = std::array<double, std::size(link_fields)>;

/// The link that takes longest, of equals the last; nothing if none takes any time.
StepResource slowest(const LinkSeconds& seconds) {
  const auto last = std::max_element(seconds.rbegin(), seconds.rend());
  if (*last <= 0) return StepResource::nothing;
  return static_cast<StepResource>(static_cast<int>(StepResource::nvlink_in) +
                                   (seconds.rend() - last) - 1);
}

/// Sets the rank with the most seconds. @param busy its link or kernel
template <class Busy>
void find_slowest(PhasePrediction& phase, const Busy& busy) {
  const auto most = std::ranges::max_element(phase.seconds);
  const auto rank = static_cast<std::int32_t>(most - phase.seconds.begin());
  phase.slowest = {.phase = phase.phase, .rank = rank, .resource = busy(rank), .seconds = *most};
}

/// A time, and the rank whose begin and links decide it.
using Ready = std::pair<double, std::int32_t>;

void wait_for(Ready& ready, const Ready& other) {
  if (other.first > ready.first) ready = other;
}

class TransferClock {
 public:
  TransferClock(const FlowSet& set, bool reverse, double nvlink_share, const Topology& nodes,
                const StepOptions& options)
      : set_(set),
        reverse_(reverse),
        nodes_(nodes),
        costs_(options.costs),
        max_nvlink_speed_(options.hardware.nvlink_bytes_per_second * nvlink_share),
        network_speed_(options.hardware.network_bytes_per_second),
        nvlink_message_(options.hardware.message_seconds) {}

  void run(PhasePrediction& phase) {
    const std::size_t world_size = nodes_.world_size;
    phase.links = set_.links;
    phase.seconds.resize(world_size);
    find_forwarders();
    own_.resize(world_size);
    done_.resize(world_size);
    sent_.resize(world_size);
    for (std::size_t r = 0; r < world_size; ++r) {
      if (reverse_) phase.links[r] = reversed(phase.links[r]);
      own_[r] = link_seconds(phase.links[r], r);
      const auto rank = static_cast<std::int32_t>(r);
      const double longest = std::ranges::max(own_[r]);
      sent_[r] = {phase.begin[r] + seconds_out(own_[r]), rank};
      done_[r] = {phase.begin[r] + longest, rank};
      phase.seconds[r] = longest + costs_.phase_seconds;
    }
    cut_pieces();
    if (reverse_) {
      follow_reverse();
    } else {
      follow_forward();
    }
    phase.end.resize(world_size);
    phase.waits_for.resize(world_size);
    for (std::size_t r = 0; r < world_size; ++r) {
      phase.end[r] = done_[r].first + costs_.phase_seconds;
      phase.waits_for[r] = done_[r].second;
    }
    find_slowest(phase, [&](std::int32_t rank) { return slowest(own_[rank]); });
  }

 private:
  static double seconds_out(const LinkSeconds& seconds) {
    double longest = 0;
    for (std::size_t i = 0; i < seconds.size(); ++i)
      if (link_fields[i].out) longest = std::max(longest, seconds[i]);
    return longest;
  }

  /// Bytes that a rank moves over one kind of link, in so many messages.
  double seconds_over(bool network, std::size_t rank, double bytes, double messages) const {
    return network ? bytes / network_speed_ + messages * costs_.network_message_seconds
                   : bytes / nvlink_speed_[rank] + messages * nvlink_message_;
  }

  void find_forwarders() {
    nvlink_speed_.assign(nodes_.world_size, max_nvlink_speed_);
    for (const Flow& flow : set_.flows) {
      if (flow.after < 0 || !nodes_.share_node(Rank{flow.src}, Rank{flow.dst})) continue;
      nvlink_speed_[flow.src] = max_nvlink_speed_ * costs_.forward_share;
    }
  }

  LinkSeconds link_seconds(const LinkBytes& bytes, std::size_t rank) const {
    const LinkBytes peers = reverse_ ? reversed(set_.peers[rank]) : set_.peers[rank];
    LinkSeconds seconds{};
    for (std::size_t i = 0; i < seconds.size(); ++i) {
      const LinkField& link = link_fields[i];
      seconds[i] = seconds_over(link.network, rank, static_cast<double>(bytes.*link.bytes),
                                static_cast<double>(peers.*link.bytes));
    }
    return seconds;
  }

  // The size of a piece, flow by flow: what its home sends to be forwarded decides.
  void cut_pieces() {
    std::vector<std::int64_t> to_forward(nodes_.world_size, 0);
    home_.resize(set_.flows.size());
    for (std::size_t i = 0; i < set_.flows.size(); ++i) {
      const Flow& flow = set_.flows[i];
      home_[i] = flow.after < 0 ? flow.src : home_[flow.after];
      if (flow.after < 0) to_forward[flow.src] += flow.sum_bytes;
    }
    piece_.resize(to_forward.size());
    for (std::size_t r = 0; r < piece_.size(); ++r) {
      piece_[r] = costs_.forward_chunk_bytes > 0 ? costs_.forward_chunk_bytes
                                                 : detail::usual_batch_bytes(to_forward[r]);
    }
  }

  // One piece of what passes through a rank, over the link by which it leaves.
  double piece_seconds(std::size_t i) const {
    const Flow& flow = set_.flows[i];
    const auto chunk = static_cast<double>(std::min(flow.bytes, piece_[home_[i]]));
    return seconds_over(!nodes_.share_node(Rank{flow.src}, Rank{flow.dst}), flow.src, chunk, 1);
  }

  void follow_forward() {
    std::vector<Ready> arrived(set_.flows.size());
    for (std::size_t i = 0; i < set_.flows.size(); ++i) {
      const Flow& flow = set_.flows[i];
      arrived[i] = sent_[flow.src];
      if (flow.after >= 0) {
        Ready fed = arrived[flow.after];
        fed.first += piece_seconds(i);
        wait_for(arrived[i], fed);
      }
      wait_for(done_[flow.dst], arrived[i]);
    }
  }

  // Forwarded rows come back the same way: a rank that forwarded sums, and passes on.
  void follow_reverse() {
    std::vector<Ready> passed(set_.flows.size());
    for (std::size_t i = set_.flows.size(); i-- > 0;) {
      const Flow& flow = set_.flows[i];
      Ready ready = passed[i];
      wait_for(ready, sent_[flow.dst]);
      wait_for(done_[flow.src], ready);
      if (flow.after < 0) continue;
      ready.first += piece_seconds(flow.after);
      wait_for(passed[flow.after], ready);
    }
  }

  const FlowSet& set_;
  bool reverse_;
  const Topology& nodes_;
  const StepCosts& costs_;
  double max_nvlink_speed_;
  double network_speed_;
  double nvlink_message_;
  std::vector<double> nvlink_speed_;  // [W]
  std::vector<LinkSeconds> own_;
  std::vector<std::int32_t> home_;   // [flows] where its rows come from
  std::vector<std::int64_t> piece_;  // [W] bytes of a piece of a home's rows
  std::vector<Ready> sent_;          // when a rank's last row has left
  std::vector<Ready> done_;          // when its links are done and all rows for it are there
};

// The link or kernel of a rank that keeps others waiting, or itself.
StepResource resource_of(const PhasePrediction& phase, std::int32_t waiter, std::int32_t rank,
                         const StepOptions& options) {
  if (!moves_rows(phase.phase))
    return phase.seconds[rank] > 0 ? StepResource::compute : StepResource::nothing;
  LinkSeconds seconds{};
  for (std::size_t i = 0; i < seconds.size(); ++i) {
    const LinkField& link = link_fields[i];
    if (waiter != rank && !link.out) continue;
    seconds[i] = static_cast<double>(phase.links[rank].*link.bytes) /
                 (link.network ? options.hardware.network_bytes_per_second
                               : options.hardware.nvlink_bytes_per_second);
  }
  return slowest(seconds);
}

/// (query, key) pairs of a rank in a second of this kernel.
double kernel_pairs_per_second(const StepOptions& options, StepPhase phase) {
  const StepCosts& costs = options.costs;
  const double forward = options.hardware.pairs_per_second > 0
                             ? options.hardware.pairs_per_second
                             : costs.forward_flops_per_second /
                                   (forward_flops * static_cast<double>(options.model.q_hidden));
  if (phase == StepPhase::attention) return forward;
  return forward * forward_flops / backward_flops * costs.backward_flops_per_second /
         costs.forward_flops_per_second;
}

/// Pairs that stay are attended to while rows travel, in the phase before: that time is out of the
/// kernel's.
void run_kernel(const StepPrediction& step, bool even, std::span<const std::int64_t> staying,
                PhasePrediction& phase) {
  const double rate = kernel_pairs_per_second(step.options, phase.phase);
  const PhasePrediction& travel = step.phases[static_cast<std::size_t>(phase.phase) - 1];
  const std::size_t world_size = step.work.size();
  const double mean = std::accumulate(step.work.begin(), step.work.end(), 0.0) /
                      static_cast<double>(std::max<std::size_t>(1, world_size));
  phase.waits_for.resize(world_size);
  std::iota(phase.waits_for.begin(), phase.waits_for.end(), 0);
  for (std::size_t r = 0; r < world_size; ++r) {
    double seconds = (even ? mean : static_cast<double>(step.work[r])) / rate;
    if (!staying.empty()) {
      const double at_home = std::min(seconds, static_cast<double>(staying[r]) / rate);
      seconds -= std::min(at_home, travel.end[r] - travel.begin[r]);
    }
    phase.seconds.push_back(seconds);
    phase.end.push_back(phase.begin[r] + seconds);
  }
  find_slowest(phase, [&](std::int32_t rank) {
    return phase.seconds[rank] > 0 ? StepResource::compute : StepResource::nothing;
  });
}

}  // namespace

void run_transfer(const FlowSet& set, bool reverse, double nvlink_share, const Topology& nodes,
                  const StepOptions& options, PhasePrediction& phase) {
  TransferClock(set, reverse, nvlink_share, nodes, options).run(phase);
}

void run_phases(const StepFlows& flows, const Topology& nodes, double gradient_share, bool even,
                std::span<const std::int64_t> staying, StepPrediction& step) {
  step.phases.resize(num_step_phases);
  std::vector<double> begin(step.world_size, 0);
  for (int i = 0; i < num_step_phases; ++i) {
    PhasePrediction& phase = step.phases[i];
    phase.phase = static_cast<StepPhase>(i);
    phase.begin = std::move(begin);
    if (!moves_rows(phase.phase)) {
      run_kernel(step, even, staying, phase);
    } else {
      const bool is_gradient = phase.phase == StepPhase::kv_gradient;
      const FlowSet& set = phase.phase == StepPhase::dispatch ? flows.dispatch
                           : is_gradient                      ? flows.gradient
                                                              : flows.q;
      run_transfer(set, is_reverse(phase.phase), is_gradient ? gradient_share : 1, nodes,
                   step.options, phase);
    }
    begin = phase.end;
  }
}

double end_of(const PhasePrediction& phase) { return std::ranges::max(phase.end); }

void sum_up(StepPrediction& step) {
  step.seconds = end_of(step.phases.back());
  step.forward_seconds = end_of(step.phase(StepPhase::output));
  const std::vector<double>& ends = step.phases.back().end;
  auto rank = static_cast<std::int32_t>(std::max_element(ends.begin(), ends.end()) - ends.begin());
  for (auto phase = step.phases.rbegin(); phase != step.phases.rend(); ++phase) {
    const std::int32_t cause = phase->waits_for[rank];
    step.path.push_back({.phase = phase->phase,
                         .rank = cause,
                         .resource = resource_of(*phase, rank, cause, step.options),
                         .seconds = phase->end[rank] - phase->begin[cause]});
    rank = cause;
  }
  std::ranges::reverse(step.path);
}

}  // namespace waybill::detail
