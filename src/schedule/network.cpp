#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "compile.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr std::int32_t unknown = -1;
constexpr std::int64_t first_phase = -1;  ///< in which ranks say that they have come
constexpr std::int64_t last_phase = std::numeric_limits<std::int64_t>::max();
constexpr int part_bits = 32;

std::int32_t rank_of(std::uint64_t address) {
  return static_cast<std::int32_t>(address >> address_rank_shift);
}
std::int64_t offset_of(std::uint64_t address) {
  return static_cast<std::int64_t>(address & address_offset_mask);
}

template <class Value>
void append(std::vector<Value>& to, std::span<const Value> values) {
  to.insert(to.end(), values.begin(), values.end());
}

/// Takes the rows for other nodes out of the batches of a plan.
class NetworkSplitter {
 public:
  NetworkSplitter(SequencePlan& plan, const Topology& topology, std::int64_t stage_begin,
                  std::int64_t batch_bytes)
      : plan_(plan),
        topology_(topology),
        stage_(stage_begin),
        batch_bytes_(batch_bytes),
        segments_(std::exchange(plan.segments, {})),
        addresses_(std::exchange(plan.segment_addresses, {})),
        batches_(std::exchange(plan.batches, {})),
        waits_(std::exchange(plan.waits, {})),
        signals_(std::exchange(plan.signals, {})),
        last_put_(plan.world_size) {
    plan.num_chunks = 0;
    plan.num_addresses = 0;
  }

  void split() {
    std::int64_t leaf_bytes = 0;
    for (const WorkBatch& batch : batches_) {
      if (is_leaf(batch)) leaf_bytes += network_bytes(batch);
    }
    const std::int64_t max_bytes = batch_size(leaf_bytes, batch_bytes_);
    for (const WorkBatch& batch : batches_) {
      if (is_leaf(batch)) {
        write_leaves(batch, max_bytes);
        continue;
      }
      chosen_.resize(batch.num_segments);
      std::iota(chosen_.begin(), chosen_.end(), batch.first_segment);
      write(batch);
    }
    for (RowSegment& segment : plan_.local_segments) {
      const auto addresses = addresses_of(segment);
      segment.first_destination = static_cast<std::int32_t>(plan_.segment_addresses.size());
      append(plan_.segment_addresses, addresses);
    }
  }

 private:
  [[nodiscard]] bool is_far(std::int32_t rank) const {
    return rank < plan_.world_size && !topology_.share_node(Rank{rank}, plan_.rank);
  }
  [[nodiscard]] std::span<const std::uint64_t> addresses_of(const RowSegment& segment) const {
    return std::span(addresses_).subspan(segment.first_destination, segment.num_destinations);
  }
  [[nodiscard]] std::span<const BatchSlot> waits_of(const WorkBatch& batch) const {
    return std::span(waits_).subspan(batch.first_wait, batch.num_waits);
  }
  [[nodiscard]] std::int64_t bytes_of(const RowSegment& segment) const {
    return segment.rows * plan_.cuts[segment.tensor].row_bytes;
  }
  [[nodiscard]] std::int64_t network_bytes(const RowSegment& segment) const {
    const auto far = std::ranges::count_if(
        addresses_of(segment), [&](std::uint64_t address) { return is_far(rank_of(address)); });
    return far * bytes_of(segment);
  }
  [[nodiscard]] std::int64_t network_bytes(const WorkBatch& batch) const {
    std::int64_t bytes = 0;
    for (std::int32_t s = 0; s < batch.num_segments; ++s)
      bytes += network_bytes(segments_[batch.first_segment + s]);
    return bytes;
  }
  static bool is_leaf(const WorkBatch& batch) {
    return batch.kind == BatchKind::send && batch.num_waits == 0 && batch.num_signals == 0;
  }

  /// In batches that the network can take one by one, then the rest.
  void write_leaves(const WorkBatch& batch, std::int64_t max_bytes) {
    std::vector<std::int32_t> rest;
    std::int64_t bytes = 0;
    chosen_.clear();
    for (std::int32_t s = batch.first_segment; s < batch.first_segment + batch.num_segments; ++s) {
      const std::int64_t more = network_bytes(segments_[s]);
      if (more == 0) {
        rest.push_back(s);
        continue;
      }
      chosen_.push_back(s);
      bytes += more;
      if (bytes < max_bytes) continue;
      write(batch);
      chosen_.clear();
      bytes = 0;
    }
    if (!chosen_.empty()) write(batch);
    chosen_ = std::move(rest);
    if (!chosen_.empty()) write(batch);
  }

  /// The chosen segments of a batch, with its waits and signals.
  void write(const WorkBatch& from) {
    begin(from.kind);
    if (from.kind == BatchKind::send) {
      stage();
    } else if (from.kind == BatchKind::forward) {
      put_from_window();
    } else {
      for (const std::int32_t s : chosen_) add(segments_[s], addresses_of(segments_[s]));
    }
    for (std::int32_t s = from.first_signal; s < from.first_signal + from.num_signals; ++s) {
      const BatchSlot& slot = signals_[s];
      (is_far(slot.rank) ? plan_.network.signals : plan_.signals).push_back(slot);
    }
    end_step(from);
    finish_batch(from);
  }

  void add(const RowSegment& segment, std::span<const std::uint64_t> addresses) {
    add_segment(plan_, segment.tensor, segment.row, segment.rows, addresses);
  }

  void begin(BatchKind kind) {
    begin_batch(plan_, kind);
    const NetworkProgram& network = plan_.network;
    step_ = {.first_wait = static_cast<std::int32_t>(network.waits.size()),
             .first_put = static_cast<std::int32_t>(network.puts.size()),
             .first_signal = static_cast<std::int32_t>(network.signals.size())};
    std::ranges::fill(last_put_, -1);
  }

  /// Own rows: one address in the stage instead of those on other nodes, from which they are put.
  void stage() {
    const auto first_far = [&](std::int32_t s) {
      const auto addresses = addresses_of(segments_[s]);
      const auto far = std::ranges::find_if(
          addresses, [&](std::uint64_t address) { return is_far(rank_of(address)); });
      return far == addresses.end() ? ~std::uint64_t{0} : *far;
    };
    std::vector<std::int32_t> order = chosen_;
    std::ranges::stable_sort(order, {}, first_far);
    std::vector<std::pair<std::int32_t, std::int64_t>> staged;  // segment, where
    for (const std::int32_t s : order) {
      const RowSegment& segment = segments_[s];
      if (network_bytes(segment) == 0) continue;
      staged.emplace_back(s, stage_);
      put_far(segment, stage_);
      stage_ += bytes_of(segment);
    }
    std::ranges::sort(staged);
    for (const std::int32_t s : chosen_) {
      const auto where = std::ranges::lower_bound(staged, std::pair(s, std::int64_t{0}));
      keep_near(segments_[s]);
      if (where != staged.end() && where->first == s) {
        near_.push_back(static_cast<std::uint64_t>(to_int(plan_.rank)) << address_rank_shift |
                        static_cast<std::uint64_t>(where->second));
      }
      if (!near_.empty()) add(segments_[s], near_);
    }
  }

  void put_from_window() {
    for (const std::int32_t s : chosen_) {
      const RowSegment& segment = segments_[s];
      put_far(segment, plan_.window_offsets[segment.tensor] +
                           segment.row * plan_.cuts[segment.tensor].row_bytes);
      keep_near(segment);
      if (!near_.empty()) add(segment, near_);
    }
  }

  void keep_near(const RowSegment& segment) {
    near_.clear();
    for (const std::uint64_t address : addresses_of(segment)) {
      if (!is_far(rank_of(address))) near_.push_back(address);
    }
  }

  void put_far(const RowSegment& segment, std::int64_t from) {
    for (const std::uint64_t address : addresses_of(segment)) {
      if (is_far(rank_of(address)))
        add_put(rank_of(address), from, offset_of(address), bytes_of(segment));
    }
  }

  /// A put that continues the last one to the peer is one with it, up to max_put_bytes.
  void add_put(std::int32_t peer, std::int64_t from, std::int64_t to, std::int64_t bytes) {
    std::vector<NetworkPut>& puts = plan_.network.puts;
    std::int32_t& last = last_put_[peer];
    while (bytes > 0) {
      const bool continues = last >= 0 && puts[last].from_bytes + puts[last].size_bytes == from &&
                             puts[last].to_bytes + puts[last].size_bytes == to &&
                             puts[last].size_bytes < max_put_bytes;
      if (!continues) {
        last = static_cast<std::int32_t>(puts.size());
        puts.push_back({.from_bytes = from, .to_bytes = to, .peer = peer, .step = num_steps()});
      }
      NetworkPut& put = puts[last];
      const std::int64_t size = std::min(bytes, max_put_bytes - put.size_bytes);
      put.size_bytes += size;
      from += size;
      to += size;
      bytes -= size;
    }
  }

  [[nodiscard]] std::int32_t num_steps() const {
    return static_cast<std::int32_t>(plan_.network.steps.size());
  }

  void end_step(const WorkBatch& from) {
    NetworkProgram& network = plan_.network;
    step_.num_signals = static_cast<std::int32_t>(network.signals.size()) - step_.first_signal;
    if (std::ssize(network.puts) == step_.first_put) {
      if (step_.num_signals == 0) return;
      network.puts.push_back({.peer = network.signals.back().rank, .step = num_steps()});
    }
    step_.num_puts = static_cast<std::int32_t>(network.puts.size()) - step_.first_put;
    if (from.kind != BatchKind::send) {
      append(network.waits, waits_of(from));
    } else if (plan_.num_chunks > plan_.batches.back().first_chunk) {
      const BatchSlot ready{plan_.world_size, network.num_ready++};
      plan_.signals.push_back(ready);
      network.waits.push_back(ready);
    }
    step_.num_waits = static_cast<std::int32_t>(network.waits.size()) - step_.first_wait;
    network.steps.push_back(step_);
  }

  void finish_batch(const WorkBatch& from) {
    if (!is_batch_empty(plan_)) append(plan_.waits, waits_of(from));
    end_batch(plan_);
  }

  SequencePlan& plan_;
  const Topology& topology_;
  std::int64_t stage_;  ///< the next free byte
  const std::int64_t batch_bytes_;
  // The plan as it was.
  const std::vector<RowSegment> segments_;
  const std::vector<std::uint64_t> addresses_;
  const std::vector<WorkBatch> batches_;
  const std::vector<BatchSlot> waits_;
  const std::vector<BatchSlot> signals_;
  // The batch and the step that are being written.
  std::vector<std::int32_t> chosen_;  ///< segments
  std::vector<std::uint64_t> near_;   ///< addresses of a segment
  NetworkStep step_;
  std::vector<std::int32_t> last_put_;  ///< [W] of the step; -1: none
};

/// For each slot of a rank's pad, and after these each of its counters (num_ready): the place where
/// the level is written at which the batch or step that raises it ends; null: nobody raises it.
using Raisers = std::vector<const std::int32_t*>;
using Levels = std::vector<std::vector<std::int32_t>>;  ///< [W][batches or steps]

std::size_t raiser_of(const SequencePlan& plan, const BatchSlot& slot) {
  const bool ready = slot.rank == plan.world_size;
  return slot.slot + (ready ? plan.num_slots * plan.world_size : 0);
}

std::vector<Raisers> find_raisers(std::span<const SequencePlan* const> plans,
                                  const Levels& batch_ends, const Levels& step_ends) {
  std::vector<Raisers> raisers;
  for (const SequencePlan* plan : plans)
    raisers.emplace_back(plan->num_slots * plan->world_size + plan->network.num_ready);
  for (std::size_t r = 0; r < plans.size(); ++r) {
    const SequencePlan& plan = *plans[r];
    const auto note = [&](const BatchSlot& slot, const std::int32_t& end) {
      const std::size_t rank = slot.rank == plan.world_size ? r : slot.rank;
      raisers[rank].at(raiser_of(plan, slot)) = &end;
    };
    for (std::size_t b = 0; b < plan.batches.size(); ++b) {
      const WorkBatch& batch = plan.batches[b];
      for (std::int32_t s = 0; s < batch.num_signals; ++s)
        note(plan.signals[batch.first_signal + s], batch_ends[r][b]);
    }
    for (std::size_t i = 0; i < plan.network.steps.size(); ++i) {
      const NetworkStep& step = plan.network.steps[i];
      for (std::int32_t s = 0; s < step.num_signals; ++s)
        note(plan.network.signals[step.first_signal + s], step_ends[r][i]);
    }
  }
  return raisers;
}

/// The highest of `level` and the ends of the waits of a rank; unknown: so far.
std::int32_t end_of(const SequencePlan& plan, const Raisers& raisers,
                    std::span<const BatchSlot> waits, std::int32_t level) {
  for (const BatchSlot& slot : waits) {
    const std::int32_t* const end = raisers.at(raiser_of(plan, slot));
    if (end == nullptr) {
      throw InternalError(
          concat("network_levels: nobody raises slot ", slot.slot, " of rank ", plan.rank));
    }
    if (*end == unknown) return unknown;
    level = std::max(level, *end);
  }
  return level;
}

/// For each step of each rank's network program how many crossings come before it, see
/// network_phases. Any order in which every rank goes on that can finds them all.
/// @throws InternalError when something waits for a slot that nobody raises, or for itself
Levels network_levels(std::span<const SequencePlan* const> plans) {
  Levels batches;
  Levels steps;  // where steps end: one above the level
  for (const SequencePlan* plan : plans) {
    batches.emplace_back(plan->batches.size(), unknown);
    steps.emplace_back(plan->network.steps.size(), unknown);
  }
  const std::vector<Raisers> raisers = find_raisers(plans, batches, steps);
  std::vector<std::size_t> next_batch(plans.size());
  std::vector<std::size_t> next_step(plans.size());
  for (bool moves = true; moves;) {
    moves = false;
    for (std::size_t r = 0; r < plans.size(); ++r) {
      const SequencePlan& plan = *plans[r];
      for (std::size_t& b = next_batch[r]; b < batches[r].size(); ++b, moves = true) {
        const WorkBatch& batch = plan.batches[b];
        const auto waits = std::span(plan.waits).subspan(batch.first_wait, batch.num_waits);
        batches[r][b] = end_of(plan, raisers[r], waits, b == 0 ? 0 : batches[r][b - 1]);
        if (batches[r][b] == unknown) break;
      }
      for (std::size_t& i = next_step[r]; i < steps[r].size(); ++i, moves = true) {
        const NetworkStep& step = plan.network.steps[i];
        const auto waits = std::span(plan.network.waits).subspan(step.first_wait, step.num_waits);
        const std::int32_t level = end_of(plan, raisers[r], waits, 0);
        if (level == unknown) break;
        steps[r][i] = level + 1;
      }
    }
  }
  for (std::size_t r = 0; r < plans.size(); ++r) {
    if (next_batch[r] < batches[r].size() || next_step[r] < steps[r].size())
      throw InternalError(concat("network_levels: rank ", r, " waits for itself"));
    for (std::int32_t& step : steps[r]) --step;
  }
  return steps;
}

/// The phase of each step of a rank.
std::vector<std::int64_t> number_steps(const NetworkProgram& network,
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

using Phases = std::map<std::int64_t, NetworkPhase>;  ///< by number

/// A put that continues the last one is one with it.
void add_put(NetworkPhase& phase, std::int32_t from, const NetworkPut& put) {
  auto& [number, waits, sent, received, slots, arrived] = phase;
  if (!sent.empty() && sent.back().offset_bytes + sent.back().size_bytes == put.from_bytes &&
      received.back().offset_bytes + received.back().size_bytes == put.to_bytes) {
    sent.back().size_bytes += put.size_bytes;
    received.back().size_bytes += put.size_bytes;
  } else {
    sent.push_back({put.from_bytes, put.size_bytes, put.peer});
    received.push_back({put.to_bytes, put.size_bytes, from});
  }
}

/// The traffic from the plan's rank to `to`, as its sender and its receiver see it; slots are those
/// of the receiver. Both sides find the same.
/// @param numbers [steps] phases
Phases traffic(const SequencePlan& plan, std::span<const std::int64_t> numbers, std::int32_t to) {
  const NetworkProgram& network = plan.network;
  Phases result;
  for (std::size_t i = 0; i < network.steps.size(); ++i) {
    const NetworkStep& step = network.steps[i];
    for (std::int32_t p = step.first_put; p < step.first_put + step.num_puts; ++p) {
      const NetworkPut& put = network.puts[p];
      if (put.peer == to && put.size_bytes > 0) add_put(result[numbers[i]], to_int(plan.rank), put);
    }
    for (std::int32_t s = step.first_signal; s < step.first_signal + step.num_signals; ++s) {
      const BatchSlot& slot = network.signals[s];
      if (slot.rank == to) result[numbers[i]].slots.push_back(slot.slot);
    }
  }
  // Ranks send a message also where no rows go.
  if (plan.operation == SequenceOperation::kv_gradient) (void)result[first_phase];
  if (result.empty()) (void)result[last_phase];
  for (auto& [number, phase] : result) {
    if (phase.sent.empty()) add_put(phase, to_int(plan.rank), {.peer = to});
  }
  return result;
}

void drop_repeated(std::vector<BatchSlot>& waits) {
  const auto key = [](const BatchSlot& slot) { return std::tuple(slot.rank, slot.slot); };
  std::ranges::sort(waits, {}, key);
  const auto same = [&](const BatchSlot& a, const BatchSlot& b) { return key(a) == key(b); };
  waits.erase(std::unique(waits.begin(), waits.end(), same), waits.end());
}

}  // namespace

std::vector<NetworkPhase> network_phases(std::span<const SequencePlan* const> plans,
                                         const Topology& topology, Rank rank,
                                         std::int64_t phase_bytes) {
  const Levels levels = network_levels(plans);
  std::vector<std::vector<std::int64_t>> numbers;  // [W][steps]
  for (std::size_t r = 0; r < plans.size(); ++r)
    numbers.push_back(number_steps(plans[r]->network, levels[r], phase_bytes));
  const std::size_t me = to_int(rank);
  const NetworkProgram& own = plans[me]->network;
  Phases phases;
  for (std::size_t i = 0; i < own.steps.size(); ++i) {
    const NetworkStep& step = own.steps[i];
    append(phases[numbers[me][i]].waits,
           std::span(own.waits).subspan(step.first_wait, step.num_waits));
  }
  const bool sends = plans[me]->operation == SequenceOperation::dispatch;
  for (std::int32_t peer = 0; peer < topology.world_size; ++peer) {
    if (topology.share_node(Rank{peer}, rank)) continue;
    for (const auto& [number, phase] : traffic(*plans[me], numbers[me], peer))
      append(phases[number].sent, std::span(phase.sent));
    const Phases coming = traffic(*plans[peer], numbers[peer], to_int(rank));
    for (const auto& [number, phase] : coming) {
      append(phases[number].received, std::span(phase.received));
      append(phases[number].slots, std::span(phase.slots));
    }
    phases[sends ? coming.rbegin()->first : first_phase].arrived.push_back(peer);
  }
  std::vector<NetworkPhase> result;
  for (auto& [number, phase] : phases) {
    phase.number = number;
    drop_repeated(phase.waits);
    result.push_back(std::move(phase));
  }
  return result;
}

std::vector<std::int64_t> staged_bytes(std::span<const SequencePart> parts,
                                       std::span<const PartRoutes> routes,
                                       const Topology& topology) {
  std::vector<std::int64_t> bytes(topology.world_size);
  const auto crosses = [&](std::int32_t from, std::int32_t to) {
    return !topology.share_node(Rank{from}, Rank{to});
  };
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const std::int64_t row_bytes = row_bytes_of(parts[p]);
    const SparseMetadata& metadata = *parts[p].metadata;
    for (const RelayHop& hop : routes[p].hops) {
      if (hop.after < 0 && crosses(hop.src_rank, hop.dst_rank))
        bytes[hop.src_rank] += hop.num_rows * row_bytes;
    }
    for (std::int64_t entry = 0; entry < metadata.num_entries(); ++entry) {
      if (routes[p].has_hops[entry] != 0) continue;
      const std::int32_t home = routes[p].home[entry];
      for (auto c = metadata.destination_begin(entry); c < metadata.destination_end(entry); ++c) {
        if (crosses(home, metadata.dst_rank[c])) bytes[home] += metadata.seq_len[entry] * row_bytes;
      }
    }
  }
  return bytes;
}

void split_network(SequencePlan& plan, const Topology& topology, std::int64_t stage_begin,
                   std::int64_t batch_bytes) {
  NetworkSplitter(plan, topology, stage_begin, batch_bytes).split();
}

}  // namespace waybill::detail
