#include "flows.h"

#include <algorithm>
#include <tuple>

namespace waybill::detail {
namespace {

std::vector<Flow> flows_of_pairs(const RecvCounts& recv, std::int64_t row_bytes) {
  std::vector<Flow> flows;
  for (std::size_t dst = 0; dst + 1 < recv.offsets.size(); ++dst) {
    for (std::int64_t i = recv.offsets[dst]; i < recv.offsets[dst + 1]; ++i) {
      const auto rank = static_cast<std::int32_t>(dst);
      if (recv.src_rank[i] == rank) continue;
      flows.push_back({.src = recv.src_rank[i], .dst = rank, .bytes = recv.tokens[i] * row_bytes});
    }
  }
  return flows;
}

std::vector<Flow> flows_of_hops(const std::vector<RelayHop>& hops, std::int64_t row_bytes) {
  std::vector<Flow> flows;
  flows.reserve(hops.size());
  for (const RelayHop& hop : hops)
    flows.push_back({hop.src_rank, hop.dst_rank, hop.after, hop.num_rows * row_bytes});
  for (const RelayHop& hop : hops) {
    if (hop.after >= 0) flows[hop.after].sum_bytes = flows[hop.after].bytes;
  }
  return flows;
}

// Adds up moves with the same way; those from home first, so that feeders stand before.
std::vector<Flow> flows_of_moves(std::vector<KvMove> moves, std::int64_t row_bytes) {
  const auto way = [](const KvMove& m) { return std::tuple(m.via >= 0, m.via, m.src, m.dst); };
  std::sort(moves.begin(), moves.end(),
            [&](const KvMove& a, const KvMove& b) { return way(a) < way(b); });
  std::vector<Flow> flows;
  std::size_t from_home = 0;
  for (std::size_t i = 0; i < moves.size(); ++i) {
    const KvMove& move = moves[i];
    if (i == 0 || way(moves[i - 1]) != way(move)) {
      Flow flow{.src = move.src, .dst = move.dst};
      if (move.via >= 0) {
        const auto feeder = std::lower_bound(
            flows.begin(), flows.begin() + static_cast<std::ptrdiff_t>(from_home),
            std::pair(move.via, move.src),
            [](const Flow& f, const auto& key) { return std::pair(f.src, f.dst) < key; });
        flow.after = static_cast<std::int32_t>(feeder - flows.begin());
      }
      flows.push_back(flow);
    }
    flows.back().bytes += move.rows * row_bytes;
    if (move.is_fed_on) flows.back().sum_bytes += move.rows * row_bytes;
    if (move.via < 0) from_home = flows.size();
  }
  return flows;
}

}  // namespace

std::vector<Flow> gradient_flows(std::vector<Flow> flows, std::int64_t width) {
  for (Flow& flow : flows) flow.bytes += flow.sum_bytes * (width - 1);
  return flows;
}

std::vector<Flow> q_flows(const TimedPlan& timed, std::int64_t row_bytes) {
  return flows_of_pairs(timed.routing.fwd_q.recv, row_bytes);
}

std::vector<Flow> kv_flows(const TimedPlan& timed, const Topology& nodes, TransferMode transfer,
                           std::int64_t row_bytes) {
  if (transfer == TransferMode::direct) return flows_of_pairs(timed.routing.fwd_kv.recv, row_bytes);
  if (transfer == TransferMode::relay) return flows_of_hops(timed.relay->hops, row_bytes);
  std::vector<KvMove> moves;
  visit_kv_moves(timed, nodes, transfer, [&](const KvMove& move) { moves.push_back(move); });
  return flows_of_moves(std::move(moves), row_bytes);
}

void FlowSet::count(const Topology& nodes) {
  const std::size_t world_size = nodes.world_size;
  links.assign(world_size, {});
  peers.assign(world_size, {});
  std::vector<std::int64_t> first(world_size + 1, 0);  // flows by source, as peers count once
  for (const Flow& flow : flows) ++first[flow.src + 1];
  for (std::size_t r = 0; r < world_size; ++r) first[r + 1] += first[r];
  std::vector<std::int32_t> dst_of(flows.size());
  for (const Flow& flow : flows) {
    LinkBytes& src = links[flow.src];
    LinkBytes& dst = links[flow.dst];
    const bool same = nodes.share_node(Rank{flow.src}, Rank{flow.dst});
    (same ? src.nvlink_out : src.network_out) += flow.bytes;
    (same ? dst.nvlink_in : dst.network_in) += flow.bytes;
    dst_of[first[flow.src]++] = flow.dst;
  }
  std::vector<std::int32_t> seen(world_size, -1);
  std::int64_t i = 0;
  for (std::int32_t src = 0; src < nodes.world_size; ++src) {
    for (; i < first[src]; ++i) {  // `first` has moved on to the end of src's flows
      const std::int32_t dst = dst_of[i];
      if (seen[dst] == src) continue;
      seen[dst] = src;
      const bool same = nodes.share_node(Rank{src}, Rank{dst});
      ++(same ? peers[src].nvlink_out : peers[src].network_out);
      ++(same ? peers[dst].nvlink_in : peers[dst].network_in);
    }
  }
}

}  // namespace waybill::detail
