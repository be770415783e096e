#include "flows.h"

#include <algorithm>
#include <ranges>
#include <tuple>

#include "routing/homes.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::detail {
namespace {

void visit_relay(const TimedPlan& timed, const std::function<void(const KvMove&)>& visit) {
  const auto& hops = timed.relay->hops;
  std::vector<std::uint8_t> fed(hops.size(), 0);
  for (const RelayHop& hop : hops) {
    if (hop.after >= 0) fed[hop.after] = 1;
  }
  for (std::size_t i = 0; i < hops.size(); ++i) {
    const RelayHop& hop = hops[i];
    visit({.shard = hop.shard,
           .src = hop.src_rank,
           .dst = hop.dst_rank,
           .via = hop.after < 0 ? -1 : hops[hop.after].src_rank,
           .rows = hop.num_rows,
           .is_fed_on = fed[i] != 0});
  }
}

}  // namespace

std::int64_t sum_width(const ModelShape& model) {
  const std::int64_t element = dtype_bytes(model.dtype);
  return element >= 4 ? 1 : 4 / element;
}

void visit_kv_moves(const TimedPlan& timed, const Topology& nodes, TransferMode transfer,
                    const std::function<void(const KvMove&)>& visit) {
  if (transfer == TransferMode::relay) {
    visit_relay(timed, visit);
    return;
  }
  const SparseMetadata& kv = timed.routing.fwd_kv;
  std::vector<std::int32_t> ranks;
  for (std::int64_t n = 0; n < timed.plan->num_shards(); ++n) {
    KvMove move{.shard = static_cast<std::int32_t>(n),
                .src = timed.home[n],
                .rows = timed.plan->shard_len[n]};
    if (move.rows == 0) continue;
    ranks.assign(kv.dst_rank.begin() + kv.destination_begin(n),
                 kv.dst_rank.begin() + kv.destination_end(n));
    if (transfer == TransferMode::once_per_node) {
      std::sort(ranks.begin(), ranks.end());
      const std::int32_t home = move.src;
      route_once_per_node(
          nodes, home, ranks,
          [&](std::int32_t src, std::int32_t dst, bool is_forwarded, bool forwards) {
            move.src = src;
            move.dst = dst;
            move.via = is_forwarded ? home : -1;
            move.is_fed_on = forwards;
            visit(move);
          });
      continue;
    }
    for (const std::int32_t rank : ranks) {
      move.dst = rank;
      if (move.dst != move.src) visit(move);
    }
  }
}

std::vector<std::int64_t> work_of_shards(const TimedPlan& timed, const AttentionMask& mask,
                                         const HardwareFacts& facts) {
  std::vector<std::int64_t> work = shard_work(*timed.plan);
  std::vector<std::int64_t> doc_len(timed.plan->num_documents());
  for (std::size_t n = 0; n < work.size(); ++n)
    doc_len[timed.document[n]] += timed.plan->shard_len[n];
  for (std::size_t n = 0; n < work.size(); ++n) {
    const std::int64_t len = timed.plan->shard_len[n];
    const std::int64_t begin = timed.position[n];
    work[n] = std::min(work[n], mask.pairs(begin, begin + len, doc_len[timed.document[n]]));
    work[n] += facts.row_pairs * len + (len > 0 ? facts.shard_pairs : 0);
  }
  return work;
}

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
  std::vector<std::int64_t> first;  // flows by source, as peers count once
  offsets_by(std::views::transform(flows, &Flow::src), nodes.world_size, first);
  std::vector<std::int32_t> dst_of(flows.size());
  for (const Flow& flow : flows) {
    add_hop(links, nodes, flow.src, flow.dst, flow.bytes);
    dst_of[first[flow.src]++] = flow.dst;
  }
  std::vector<std::int32_t> seen(world_size, -1);
  std::int64_t i = 0;
  for (std::int32_t src = 0; src < nodes.world_size; ++src) {
    for (; i < first[src]; ++i) {  // `first` has moved on to the end of src's flows
      const std::int32_t dst = dst_of[i];
      if (seen[dst] == src) continue;
      seen[dst] = src;
      add_hop(peers, nodes, src, dst, 1);
    }
  }
}

}  // namespace waybill::detail
