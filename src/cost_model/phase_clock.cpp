#include <algorithm>
#include <utility>

#include "core/batch_bytes.h"
#include "flows.h"
#include "planner/node_routes.h"

namespace waybill::detail {
namespace {

/// Operations of a pair for each element of a row of Q: two products forward, five backward.
constexpr double forward_flops = 4;
constexpr double backward_flops = 10;

/// A time, and the rank whose begin and links decide it.
using Ready = std::pair<double, std::int32_t>;

void wait_for(Ready& ready, const Ready& other) {
  if (other.first > ready.first) ready = other;
}

double forward_pairs_per_second(const StepOptions& options) {
  if (options.hardware.pairs_per_second > 0) return options.hardware.pairs_per_second;
  return options.costs.forward_flops_per_second /
         (forward_flops * static_cast<double>(options.model.q_hidden));
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
      sent_[r] = {phase.begin[r] + own_[r].out(), rank};
      done_[r] = {phase.begin[r] + own_[r].longest(), rank};
      phase.seconds[r] = own_[r].longest() + costs_.phase_seconds;
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
    find_slowest(phase);
  }

 private:
  void find_forwarders() {
    nvlink_speed_.assign(nodes_.world_size, max_nvlink_speed_);
    for (const Flow& flow : set_.flows) {
      if (flow.after < 0 || !nodes_.share_node(Rank{flow.src}, Rank{flow.dst})) continue;
      nvlink_speed_[flow.src] = max_nvlink_speed_ * costs_.forward_share;
    }
  }

  LinkSeconds link_seconds(const LinkBytes& bytes, std::size_t rank) const {
    const auto nvlink = [&](std::int64_t num_bytes, std::int64_t num_peers) {
      return static_cast<double>(num_bytes) / nvlink_speed_[rank] +
             static_cast<double>(num_peers) * nvlink_message_;
    };
    const auto network = [&](std::int64_t num_bytes, std::int64_t num_peers) {
      return static_cast<double>(num_bytes) / network_speed_ +
             static_cast<double>(num_peers) * costs_.network_message_seconds;
    };
    const LinkBytes peers = reverse_ ? reversed(set_.peers[rank]) : set_.peers[rank];
    return {.nvlink_in = nvlink(bytes.nvlink_in, peers.nvlink_in),
            .nvlink_out = nvlink(bytes.nvlink_out, peers.nvlink_out),
            .network_in = network(bytes.network_in, peers.network_in),
            .network_out = network(bytes.network_out, peers.network_out)};
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
    return nodes_.share_node(Rank{flow.src}, Rank{flow.dst})
               ? chunk / nvlink_speed_[flow.src] + nvlink_message_
               : chunk / network_speed_ + costs_.network_message_seconds;
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

  void find_slowest(PhasePrediction& phase) const {
    const auto most = std::max_element(phase.seconds.begin(), phase.seconds.end());
    const auto rank = static_cast<std::int32_t>(most - phase.seconds.begin());
    phase.slowest.phase = phase.phase;
    phase.slowest.rank = rank;
    phase.slowest.seconds = *most;
    phase.slowest.resource = own_[rank].slowest();
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
  const LinkBytes& links = phase.links[rank];
  const auto nvlink = [&](std::int64_t bytes) {
    return static_cast<double>(bytes) / options.hardware.nvlink_bytes_per_second;
  };
  const auto network = [&](std::int64_t bytes) {
    return static_cast<double>(bytes) / options.hardware.network_bytes_per_second;
  };
  const bool own = waiter == rank;
  return LinkSeconds{.nvlink_in = own ? nvlink(links.nvlink_in) : 0,
                     .nvlink_out = nvlink(links.nvlink_out),
                     .network_in = own ? network(links.network_in) : 0,
                     .network_out = network(links.network_out)}
      .slowest();
}

}  // namespace

StepResource LinkSeconds::slowest() const {
  const double seconds = longest();
  if (seconds <= 0) return StepResource::nothing;
  if (seconds == network_out) return StepResource::network_out;
  if (seconds == network_in) return StepResource::network_in;
  return seconds == nvlink_out ? StepResource::nvlink_out : StepResource::nvlink_in;
}

void run_transfer(const FlowSet& set, bool reverse, double nvlink_share, const Topology& nodes,
                  const StepOptions& options, PhasePrediction& phase) {
  TransferClock(set, reverse, nvlink_share, nodes, options).run(phase);
}

void run_kernel(PhasePrediction& phase) {
  const std::size_t world_size = phase.begin.size();
  phase.end.resize(world_size);
  phase.waits_for.resize(world_size);
  for (std::size_t r = 0; r < world_size; ++r) {
    phase.end[r] = phase.begin[r] + phase.seconds[r];
    phase.waits_for[r] = static_cast<std::int32_t>(r);
  }
  const auto most = std::max_element(phase.seconds.begin(), phase.seconds.end());
  phase.slowest = {.phase = phase.phase,
                   .rank = static_cast<std::int32_t>(most - phase.seconds.begin()),
                   .resource = *most > 0 ? StepResource::compute : StepResource::nothing,
                   .seconds = *most};
}

double kernel_pairs_per_second(const StepOptions& options, StepPhase phase) {
  const double forward = forward_pairs_per_second(options);
  if (phase == StepPhase::attention) return forward;
  return forward * forward_flops / backward_flops * options.costs.backward_flops_per_second /
         options.costs.forward_flops_per_second;
}

double end_of(const PhasePrediction& phase) {
  return *std::max_element(phase.end.begin(), phase.end.end());
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

}  // namespace waybill::detail
