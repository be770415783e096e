#include <algorithm>
#include <string>
#include <tuple>

#include "plan_findings.h"
#include "planner/relay_checks.h"
#include "routing/homes.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

/// Rows of a shard that a rank gets.
struct Arrival {
  std::int32_t rank = 0;
  std::int32_t shard = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;

  [[nodiscard]] std::tuple<std::int32_t, std::int32_t, std::int64_t> key() const {
    return {rank, shard, begin};
  }
};

// Whole shards that ranks need from others, each once.
std::vector<Arrival> needed_arrivals(const QkvPlan& plan, const SparseMetadata& kv) {
  std::vector<Arrival> needed;
  for (std::int32_t src = 0; src < kv.world_size; ++src) {
    for (std::int64_t n = kv.rank_offsets[src]; n < kv.rank_offsets[src + 1]; ++n) {
      for (std::int64_t c = kv.destination_begin(n); c < kv.destination_end(n); ++c) {
        const std::int32_t dst = kv.dst_rank[c];
        if (dst != src && plan.shard_len[n] > 0)
          needed.push_back({.rank = dst,
                            .shard = static_cast<std::int32_t>(n),
                            .begin = 0,
                            .end = plan.shard_len[n]});
      }
    }
  }
  const auto order = [](const Arrival& a, const Arrival& b) { return a.key() < b.key(); };
  std::sort(needed.begin(), needed.end(), order);
  needed.erase(std::unique(needed.begin(), needed.end(),
                           [](const Arrival& a, const Arrival& b) { return a.key() == b.key(); }),
               needed.end());
  return needed;
}

std::string hop_text(const RelayHop& hop, std::size_t idx) {
  return concat("hop ", idx, ": ", hop.num_rows, " rows from ", hop.row_begin, ", from rank ",
                hop.src_rank, " to ", hop.dst_rank);
}

// What the hop does not keep, its stage included.
const char* wrong_with(const RelaySchedule& relay, std::size_t idx, const RelayedShards& shards) {
  if (const char* const expected = wrong_with_hop(relay.hops, idx, shards)) return expected;
  const RelayHop& hop = relay.hops[idx];
  if (hop.after < 0) return hop.stage == 0 ? nullptr : "stage 0";
  return hop.stage == std::int64_t{relay.hops[hop.after].stage} + 1
             ? nullptr
             : "one stage more than the hop before";
}

// Joins arrivals that continue each other; what overlaps or leaves gaps stays apart.
void join(std::vector<Arrival>& arrivals) {
  std::sort(arrivals.begin(), arrivals.end(),
            [](const Arrival& a, const Arrival& b) { return a.key() < b.key(); });
  std::size_t num = 0;
  for (const Arrival& arrival : arrivals) {
    Arrival* last = num > 0 ? &arrivals[num - 1] : nullptr;
    if (last != nullptr && last->rank == arrival.rank && last->shard == arrival.shard &&
        last->end == arrival.begin) {
      last->end = arrival.end;
    } else {
      arrivals[num++] = arrival;
    }
  }
  arrivals.resize(num);
}

void compare(const std::vector<Arrival>& got, const std::vector<Arrival>& needed,
             PlanFindings& findings) {
  const auto text = [](const Arrival& a) { return concat("rows ", a.begin, "..", a.end); };
  std::size_t g = 0;
  std::size_t n = 0;
  while ((g < got.size() || n < needed.size()) && !findings.full()) {
    const bool both = g < got.size() && n < needed.size();
    if (both && got[g].key() == needed[n].key() && got[g].end == needed[n].end) {
      ++g;
      ++n;
    } else if (n == needed.size() || (both && got[g].key() <= needed[n].key())) {
      findings.add(FindingKind::coverage, "relay.hops", got[g].rank, got[g].shard, text(got[g]),
                   "the whole shard once, where it is needed");
      if (both && got[g].key() == needed[n].key()) ++n;
      ++g;
    } else {
      findings.add(FindingKind::coverage, "relay.hops", needed[n].rank, needed[n].shard, "nothing",
                   text(needed[n]));
      ++n;
    }
  }
}

}  // namespace

void check_relay(const AttentionPlan& plan, const QkvRouting& routing,
                 const std::vector<LinkBytes>& q_links, PlanFindings& findings) {
  const RelaySchedule& relay = plan.relay;
  const std::vector<std::int32_t> homes = homes_of(plan.plan.rank_shard_offsets);
  const RelayedShards shards{plan.plan.world_size, plan.plan.shard_len, homes};
  std::vector<LinkBytes> links = q_links;
  std::vector<Arrival> arrivals;
  std::int64_t num_stages = 0;
  for (std::size_t i = 0; i < relay.hops.size(); ++i) {
    const RelayHop& hop = relay.hops[i];
    if (const char* expected = wrong_with(relay, i, shards)) {
      findings.add(FindingKind::order, "relay.hops", hop.dst_rank, hop.shard, hop_text(hop, i),
                   expected);
      if (findings.full()) return;
      continue;
    }
    num_stages = std::max(num_stages, std::int64_t{hop.stage} + 1);
    add_link_bytes(links, hop.src_rank, hop.dst_rank,
                   hop.num_rows * plan.options.model.kv_row_bytes(),
                   plan.options.hardware.ranks_per_node);
    arrivals.push_back({.rank = hop.dst_rank,
                        .shard = hop.shard,
                        .begin = hop.row_begin,
                        .end = hop.row_begin + hop.num_rows});
  }
  join(arrivals);
  compare(arrivals, needed_arrivals(plan.plan, routing.fwd_kv), findings);
  findings.compare("relay.links", relay.links, links);
  findings.compare("relay.num_stages", -1, relay.num_stages, num_stages);
}

}  // namespace waybill::detail
