#include "moves.h"

#include <algorithm>

#include "planner/node_routes.h"
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
      route_once_per_node(nodes, home, ranks, [&](const NodeHop& hop) {
        move.src = hop.src;
        move.dst = hop.dst;
        move.via = hop.is_forwarded ? home : -1;
        move.is_fed_on = hop.forwards;
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
  std::vector<std::int64_t> work(timed.plan->num_shards());
  if (!mask.has_window()) work = shard_work(*timed.plan);
  for (std::size_t n = 0; n < work.size(); ++n) {
    const std::int64_t len = timed.plan->shard_len[n];
    if (mask.has_window()) work[n] = mask.pairs(timed.position[n], timed.position[n] + len, 0);
    work[n] += facts.row_pairs * len + (len > 0 ? facts.shard_pairs : 0);
  }
  return work;
}

}  // namespace waybill::detail
