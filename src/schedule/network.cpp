#include "network.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "batch_jobs.h"
#include "batches.h"

namespace waybill::detail {
namespace {

std::int32_t rank_of(std::uint64_t address) {
  return static_cast<std::int32_t>(address >> address_rank_shift);
}
std::int64_t offset_of(std::uint64_t address) {
  return static_cast<std::int64_t>(address & address_offset_mask);
}

class NetworkSplitter {
 public:
  NetworkSplitter(SequencePlan& plan, const Topology& topology, std::int64_t stage_begin,
                  std::int64_t batch_bytes)
      : plan_(plan),
        topology_(topology),
        node_(topology.node(plan.rank)),
        stage_(stage_begin),
        batch_bytes_(batch_bytes),
        segments_(std::exchange(plan.segments, {})),
        addresses_(std::exchange(plan.segment_addresses, {})),
        batches_(std::exchange(plan.batches, {})),
        waits_(std::exchange(plan.waits, {})),
        signals_(std::exchange(plan.signals, {})),
        appender_(plan),
        last_put_(plan.world_size) {
    plan.num_chunks = 0;
    plan.num_addresses = 0;
  }

  void split() {
    std::int64_t leaf_bytes = 0;
    for (const WorkBatch& batch : batches_) {
      if (is_leaf(batch)) leaf_bytes += network_bytes(batch);
    }
    const std::int64_t most = batch_size(leaf_bytes, batch_bytes_);
    for (const WorkBatch& batch : batches_) {
      if (is_leaf(batch)) {
        write_leaves(batch, most);
        continue;
      }
      chosen_.clear();
      for (std::int32_t s = 0; s < batch.num_segments; ++s)
        chosen_.push_back(batch.first_segment + s);
      write(batch);
    }
    for (RowSegment& segment : plan_.local_segments) {
      const auto addresses = addresses_of(segment);
      segment.first_destination = static_cast<std::int32_t>(plan_.segment_addresses.size());
      plan_.segment_addresses.insert(plan_.segment_addresses.end(), addresses.begin(),
                                     addresses.end());
    }
  }

 private:
  [[nodiscard]] bool is_far(std::int32_t rank) const {
    return rank < plan_.world_size && topology_.node(Rank{rank}) != node_;
  }
  [[nodiscard]] std::span<const std::uint64_t> addresses_of(const RowSegment& segment) const {
    return std::span(addresses_).subspan(segment.first_destination, segment.num_destinations);
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
  void write_leaves(const WorkBatch& batch, std::int64_t most_bytes) {
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
      if (bytes < most_bytes) continue;
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
      for (const std::int32_t s : chosen_) appender_.add(segments_[s], addresses_of(segments_[s]));
    }
    for (std::int32_t s = from.first_signal; s < from.first_signal + from.num_signals; ++s) {
      const BatchSlot& slot = signals_[s];
      (is_far(slot.rank) ? plan_.network.signals : plan_.signals).push_back(slot);
    }
    end_step(from);
    end_batch(from);
  }

  void begin(BatchKind kind) {
    appender_.begin(kind);
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
      if (!near_.empty()) appender_.add(segments_[s], near_);
    }
  }

  void put_from_window() {
    for (const std::int32_t s : chosen_) {
      const RowSegment& segment = segments_[s];
      put_far(segment, plan_.window_offsets[segment.tensor] +
                           segment.row * plan_.cuts[segment.tensor].row_bytes);
      keep_near(segment);
      if (!near_.empty()) appender_.add(segment, near_);
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

  /// What continues the last put to the peer is one with it, up to max_put_bytes.
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
      for (std::int32_t w = from.first_wait; w < from.first_wait + from.num_waits; ++w)
        network.waits.push_back(waits_[w]);
    } else if (appender_.has_chunks()) {
      const BatchSlot ready{plan_.world_size, network.num_ready++};
      plan_.signals.push_back(ready);
      network.waits.push_back(ready);
    }
    step_.num_waits = static_cast<std::int32_t>(network.waits.size()) - step_.first_wait;
    network.steps.push_back(step_);
  }

  void end_batch(const WorkBatch& from) {
    if (appender_.is_empty()) return;
    for (std::int32_t w = from.first_wait; w < from.first_wait + from.num_waits; ++w)
      plan_.waits.push_back(waits_[w]);
    appender_.end();
  }

  SequencePlan& plan_;
  const Topology& topology_;
  const Node node_;
  std::int64_t stage_;  ///< the next free byte
  const std::int64_t batch_bytes_;
  // The plan as it was.
  const std::vector<RowSegment> segments_;
  const std::vector<std::uint64_t> addresses_;
  const std::vector<WorkBatch> batches_;
  const std::vector<BatchSlot> waits_;
  const std::vector<BatchSlot> signals_;
  // What is being written.
  std::vector<std::int32_t> chosen_;  ///< segments
  std::vector<std::uint64_t> near_;   ///< addresses of a segment
  BatchAppender appender_;
  NetworkStep step_;
  std::vector<std::int32_t> last_put_;  ///< [W] of the step; -1: none
};

}  // namespace

std::vector<std::int64_t> staged_bytes(std::span<const SequencePart> parts,
                                       std::span<const PartRoutes> routes,
                                       const Topology& topology) {
  std::vector<std::int64_t> bytes(topology.world_size);
  const auto crosses = [&](std::int32_t from, std::int32_t to) {
    return topology.node(Rank{from}) != topology.node(Rank{to});
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
