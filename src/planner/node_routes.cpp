#include "waybill/planner/node_routes.h"

#include <algorithm>

#include "waybill/core/error.h"
#include "waybill/core/to_size.h"

namespace waybill {
namespace {

using detail::to_size;

void check(const char* who, const SparseMetadata& metadata, const Topology& topology) {
  topology.check();
  require(metadata.world_size == topology.world_size, who,
          ": metadata have world_size = ", metadata.world_size, ", expected the topology's ",
          topology.world_size);
}

/// Calls visit(home, entry) for every entry with rows.
template <class Visit>
void for_each_entry(const SparseMetadata& metadata, Visit&& visit) {
  for (std::int32_t home = 0; home < metadata.world_size; ++home) {
    for (auto j = metadata.rank_offsets[to_size(home)];
         j < metadata.rank_offsets[to_size(home + 1)]; ++j) {
      if (metadata.seq_len[to_size(j)] > 0) visit(home, j);
    }
  }
}

class NodeRouter {
 public:
  NodeRouter(const SparseMetadata& metadata, const Topology& topology, std::int64_t row_bytes,
             bool once)
      : metadata_(metadata), topology_(topology), row_bytes_(row_bytes), once_(once) {
    schedule_.links.assign(to_size(topology.world_size), {});
  }

  RelaySchedule route() {
    for_each_entry(metadata_, [&](std::int32_t home, std::int64_t entry) { add(home, entry); });
    return std::move(schedule_);
  }

 private:
  [[nodiscard]] std::int32_t node(std::int32_t rank) const {
    return rank / topology_.ranks_per_node;
  }

  void add(std::int32_t home, std::int64_t entry) {
    receivers_.clear();
    bool leaves_node = false;
    for (auto c = metadata_.destination_begin(entry); c < metadata_.destination_end(entry); ++c) {
      const std::int32_t dst = metadata_.dst_rank[to_size(c)];
      if (dst == home) continue;
      receivers_.push_back(dst);
      leaves_node = leaves_node || node(dst) != node(home);
    }
    if (!leaves_node) {
      for (const std::int32_t dst : receivers_)
        add_hop(schedule_.links, topology_, home, dst,
                metadata_.seq_len[to_size(entry)] * row_bytes_);
      return;
    }
    std::ranges::sort(receivers_);
    receivers_.erase(std::unique(receivers_.begin(), receivers_.end()), receivers_.end());
    // Farther nodes come in the order from the home's on, so that homes begin with different ones.
    const auto farther = std::ranges::partition_point(
        receivers_, [&](std::int32_t rank) { return node(rank) <= node(home); });
    std::rotate(receivers_.begin(), farther, receivers_.end());
    for (std::size_t first = 0; first < receivers_.size();) {
      std::size_t last = first;
      while (last < receivers_.size() && node(receivers_[last]) == node(receivers_[first])) ++last;
      enter_node(home, entry, std::span(receivers_).subspan(first, last - first));
      first = last;
    }
  }

  void enter_node(std::int32_t home, std::int64_t entry, std::span<const std::int32_t> ranks) {
    if (!once_ || ranks.size() == 1 || node(ranks[0]) == node(home)) {
      for (const std::int32_t dst : ranks) hop(home, dst, entry, -1);
      return;
    }
    const std::int32_t entry_rank =
        node(ranks[0]) * topology_.ranks_per_node + home % topology_.ranks_per_node;
    const std::int32_t feed = hop(home, entry_rank, entry, -1);
    for (const std::int32_t dst : ranks) {
      if (dst != entry_rank) hop(entry_rank, dst, entry, feed);
    }
  }

  std::int32_t hop(std::int32_t src, std::int32_t dst, std::int64_t entry, std::int32_t after) {
    const std::int64_t rows = metadata_.seq_len[to_size(entry)];
    const std::int32_t stage = after < 0 ? 0 : 1;
    schedule_.hops.push_back({.src_rank = src,
                              .dst_rank = dst,
                              .shard = static_cast<std::int32_t>(entry),
                              .stage = stage,
                              .row_begin = 0,
                              .num_rows = rows,
                              .after = after});
    schedule_.num_stages = std::max(schedule_.num_stages, stage + 1);
    add_hop(schedule_.links, topology_, src, dst, rows * row_bytes_);
    return static_cast<std::int32_t>(schedule_.hops.size()) - 1;
  }

  const SparseMetadata& metadata_;
  const Topology topology_;
  const std::int64_t row_bytes_;
  const bool once_;
  RelaySchedule schedule_;
  std::vector<std::int32_t> receivers_;
};

}  // namespace

RelaySchedule route_over_nodes(const SparseMetadata& metadata, const Topology& topology,
                               std::int64_t row_bytes, bool once) {
  check("route_over_nodes", metadata, topology);
  return NodeRouter(metadata, topology, row_bytes, once).route();
}

std::vector<LinkBytes> direct_links(const SparseMetadata& metadata, const Topology& topology,
                                    std::int64_t row_bytes) {
  check("direct_links", metadata, topology);
  std::vector<LinkBytes> links(to_size(topology.world_size));
  for_each_entry(metadata, [&](std::int32_t home, std::int64_t entry) {
    for (auto c = metadata.destination_begin(entry); c < metadata.destination_end(entry); ++c) {
      const std::int32_t dst = metadata.dst_rank[to_size(c)];
      if (dst != home)
        add_hop(links, topology, home, dst, metadata.seq_len[to_size(entry)] * row_bytes);
    }
  });
  return links;
}

void add_hop(std::span<LinkBytes> links, const Topology& topology, std::int32_t src_rank,
             std::int32_t dst_rank, std::int64_t num_bytes) {
  LinkBytes& src = links[to_size(src_rank)];
  LinkBytes& dst = links[to_size(dst_rank)];
  if (topology.node(Rank{src_rank}) == topology.node(Rank{dst_rank})) {
    src.nvlink_out += num_bytes;
    dst.nvlink_in += num_bytes;
  } else {
    src.network_out += num_bytes;
    dst.network_in += num_bytes;
  }
}

double limit_seconds(std::span<const LinkBytes> links, double nvlink_bytes_per_second,
                     double network_bytes_per_second) {
  std::int64_t nvlink = 0;
  std::int64_t network = 0;
  for (const LinkBytes& link : links) {
    nvlink = std::max({nvlink, link.nvlink_in, link.nvlink_out});
    network = std::max({network, link.network_in, link.network_out});
  }
  return std::max(static_cast<double>(nvlink) / nvlink_bytes_per_second,
                  static_cast<double>(network) / network_bytes_per_second);
}

}  // namespace waybill
