#include "network_phases.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "network_levels.h"

namespace waybill::detail {
namespace {

constexpr std::int64_t first_phase = -1;  ///< in which ranks say that they have come
constexpr std::int64_t last_phase = std::numeric_limits<std::int64_t>::max();
constexpr int part_bits = 32;

/// What goes from one rank to another in one phase.
struct Traffic {
  std::vector<NetworkPut> puts;
  std::vector<std::int32_t> slots;  ///< of the receiver
};
using TrafficByPhase = std::map<std::int64_t, Traffic>;

class PhaseWriter {
 public:
  PhaseWriter(std::span<const SequencePlan* const> plans, const Topology& topology, Rank rank,
              std::int64_t phase_bytes)
      : plans_(plans), topology_(topology), rank_(to_int(rank)) {
    const auto levels = network_levels(plans);
    for (std::size_t r = 0; r < plans.size(); ++r)
      numbers_.push_back(number_steps(plans[r]->network, levels[r], phase_bytes));
  }

  std::vector<NetworkPhase> write() {
    const NetworkProgram& own = plans_[rank_]->network;
    for (std::size_t i = 0; i < own.steps.size(); ++i) {
      auto& waits = phases_[numbers_[rank_][i]].waits;
      const auto first = own.waits.begin() + own.steps[i].first_wait;
      waits.insert(waits.end(), first, first + own.steps[i].num_waits);
    }
    for (std::int32_t peer = 0; peer < topology_.world_size; ++peer) {
      if (topology_.node(Rank{peer}) == topology_.node(Rank{rank_})) continue;
      write_sent(peer);
      write_received(peer);
    }
    std::vector<NetworkPhase> phases;
    for (auto& [number, phase] : phases_) {
      phase.number = number;
      drop_repeated(phase.waits);
      phases.push_back(std::move(phase));
    }
    return phases;
  }

 private:
  [[nodiscard]] bool is_dispatch() const {
    return plans_[rank_]->operation == SequenceOperation::dispatch;
  }

  static std::vector<std::int64_t> number_steps(const NetworkProgram& network,
                                                std::span<const std::int32_t> levels,
                                                std::int64_t phase_bytes) {
    std::map<std::int32_t, std::int64_t> bytes_of_level;
    std::vector<std::int64_t> numbers;
    for (std::size_t i = 0; i < network.steps.size(); ++i) {
      std::int64_t& bytes = bytes_of_level[levels[i]];
      numbers.push_back((std::int64_t{levels[i]} << part_bits) + bytes / phase_bytes);
      const NetworkStep& step = network.steps[i];
      for (std::int32_t p = 0; p < step.num_puts; ++p)
        bytes += network.puts[step.first_put + p].size_bytes;
    }
    return numbers;
  }

  /// Both sides find the same.
  [[nodiscard]] TrafficByPhase traffic(std::int32_t from, std::int32_t to) const {
    const NetworkProgram& network = plans_[from]->network;
    TrafficByPhase result;
    for (std::size_t i = 0; i < network.steps.size(); ++i) {
      const NetworkStep& step = network.steps[i];
      const std::int64_t number = numbers_[from][i];
      for (std::int32_t p = step.first_put; p < step.first_put + step.num_puts; ++p) {
        const NetworkPut& put = network.puts[p];
        if (put.peer == to && put.size_bytes > 0) add(result[number].puts, put);
      }
      for (std::int32_t s = step.first_signal; s < step.first_signal + step.num_signals; ++s) {
        const BatchSlot& slot = network.signals[s];
        if (slot.rank == to) result[number].slots.push_back(slot.slot);
      }
    }
    // Ranks meet also where no rows go.
    if (!is_dispatch()) (void)result[first_phase];
    if (result.empty()) (void)result[last_phase];
    for (auto& [number, one] : result)
      if (one.puts.empty()) one.puts.push_back({});
    return result;
  }

  /// What continues the last put is one with it.
  static void add(std::vector<NetworkPut>& puts, const NetworkPut& put) {
    if (!puts.empty() && puts.back().from_bytes + puts.back().size_bytes == put.from_bytes &&
        puts.back().to_bytes + puts.back().size_bytes == put.to_bytes) {
      puts.back().size_bytes += put.size_bytes;
    } else {
      puts.push_back(put);
    }
  }

  void write_sent(std::int32_t peer) {
    for (const auto& [number, one] : traffic(rank_, peer)) {
      for (const NetworkPut& put : one.puts)
        phases_[number].sent.push_back({put.from_bytes, put.size_bytes, peer});
    }
  }

  void write_received(std::int32_t peer) {
    const TrafficByPhase all = traffic(peer, rank_);
    for (const auto& [number, one] : all) {
      NetworkPhase& phase = phases_[number];
      for (const NetworkPut& put : one.puts)
        phase.received.push_back({put.to_bytes, put.size_bytes, peer});
      phase.slots.insert(phase.slots.end(), one.slots.begin(), one.slots.end());
    }
    const std::int64_t arrival = is_dispatch() ? all.rbegin()->first : first_phase;
    phases_[arrival].arrived.push_back(peer);
  }

  static void drop_repeated(std::vector<BatchSlot>& waits) {
    const auto key = [](const BatchSlot& slot) { return std::tuple(slot.rank, slot.slot); };
    std::ranges::sort(waits, {}, key);
    const auto same = [&](const BatchSlot& a, const BatchSlot& b) { return key(a) == key(b); };
    waits.erase(std::unique(waits.begin(), waits.end(), same), waits.end());
  }

  std::span<const SequencePlan* const> plans_;
  const Topology& topology_;
  std::int32_t rank_;
  std::vector<std::vector<std::int64_t>> numbers_;  ///< [W][steps]
  std::map<std::int64_t, NetworkPhase> phases_;
};

}  // namespace

std::vector<NetworkPhase> network_phases(std::span<const SequencePlan* const> plans,
                                         const Topology& topology, Rank rank,
                                         std::int64_t phase_bytes) {
  return PhaseWriter(plans, topology, rank, phase_bytes).write();
}

}  // namespace waybill::detail
