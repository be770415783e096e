#include <algorithm>

#include "figures.h"
#include "waybill/core/error.h"

namespace waybill::detail {

namespace {

enum : std::uint8_t { not_reserved, reserved_nvlink, reserved_network };

// Parts of a shard no larger than this share of the cap keep the loads even.
constexpr std::int64_t parts_of_cap = 16;

constexpr std::size_t few_holders = 16;

// A document over n ranks has about n * n / 2 hops: without a limit a large world would take all
// memory before anything is said.
constexpr std::int64_t max_relay_hops = std::int64_t{1} << 24;

void check_number_of_hops(std::int64_t num_hops) {
  require(num_hops <= max_relay_hops, "plan_attention: receivers would forward in ", num_hops,
          " hops or more, expected at most ", max_relay_hops,
          "; relay = false plans without them; fewer ranks or more tokens per rank need fewer");
}

}  // namespace

void RelayPlanner::plan(const KvNeeds& kv, std::span<const std::int64_t> num_rows,
                        std::span<const LinkBytes> direct, const PlannerOptions& options,
                        RelaySchedule& relay) {
  std::int64_t arrivals = -std::ssize(num_rows);  // at most all of them are where they are needed
  for (const RankRange& need : kv.needs) arrivals += need.last - need.first;
  check_number_of_hops(arrivals);
  relay_ = &relay;
  num_rows_ = num_rows;
  start(kv, direct, options);
  for (const KvDocument& doc : kv.documents) reserve_first_sends(kv, doc);
  for (const KvDocument& doc : kv.documents) send_document(kv, doc);
}

void RelayPlanner::start(const KvNeeds& kv, std::span<const LinkBytes> direct,
                         const PlannerOptions& options) {
  nodes_ = kv.nodes.data();
  row_bytes_ = options.model.kv_row_bytes();
  turn_ = 0;
  relay_->hops.clear();
  relay_->num_stages = 0;
  relay_->links.assign(kv.q_links.begin(), kv.q_links.end());
  reserved_.assign(num_rows_.size(), not_reserved);
  nvlink_.cap = 1;
  network_.cap = 1;
  for (const LinkBytes& link : direct) {
    nvlink_.cap = std::max(nvlink_.cap, link.in());
    network_.cap = std::max(network_.cap, link.network_in);
  }
  // Inside a node most copies of a row are saved on the network.
  const std::int64_t ranks = std::min<std::int64_t>(options.hardware.ranks_per_node, 4);
  network_.cap = std::max<std::int64_t>(1, network_.cap / ranks);
  part_rows_ = std::max<std::int64_t>(64, nvlink_.cap / parts_of_cap / row_bytes_);
}

std::int64_t& RelayPlanner::bytes_out(std::int32_t rank, const Tier& tier) const {
  LinkBytes& link = relay_->links[rank];
  return tier.network ? link.network_out : link.nvlink_out;
}

// Home sends every shard once, whatever the cap says: these bytes are spoken for.
void RelayPlanner::reserve_first_sends(const KvNeeds& kv, const KvDocument& doc) {
  const std::int32_t base = kv.runs[doc.first_run].first;
  const std::int32_t end = kv.runs[doc.last_run - 1].last;
  in_node_.assign(end - base + 1, 0);
  beyond_.assign(end - base + 1, 0);
  for (std::int32_t i = doc.first_need; i < doc.last_need; ++i) {
    const RankRange& need = kv.needs[i];
    for (std::int32_t j = doc.first_run; j < doc.last_run; ++j) {
      const RankRange& run = kv.runs[j];
      const std::int32_t first = std::max(run.first, need.first);
      const std::int32_t last = std::min(run.last, need.last);
      if (run.rank == need.rank || first >= last) continue;
      auto& counts = nodes_[run.rank] == nodes_[need.rank] ? in_node_ : beyond_;
      ++counts[first - base];
      --counts[last - base];
    }
  }
  std::int32_t near = 0;
  std::int32_t far = 0;
  std::int32_t run = doc.first_run;
  for (std::int32_t n = base; n < end; ++n) {
    near += in_node_[n - base];
    far += beyond_[n - base];
    while (n >= kv.runs[run].last) ++run;
    if (near + far == 0) continue;
    reserved_[n] = near > 0 ? reserved_nvlink : reserved_network;
    bytes_out(kv.runs[run].rank, near > 0 ? nvlink_ : network_) += num_rows_[n] * row_bytes_;
  }
}

void RelayPlanner::send_document(const KvNeeds& kv, const KvDocument& doc) {
  needs_.assign(kv.needs.begin() + doc.first_need, kv.needs.begin() + doc.last_need);
  std::sort(needs_.begin(), needs_.end(),
            [](const RankRange& a, const RankRange& b) { return a.rank < b.rank; });
  const std::int64_t nvlink_cap = nvlink_.cap;
  const std::int64_t network_cap = network_.cap;
  // From the end of the document: few have its last shards, and they must have room to forward.
  for (std::int32_t i = doc.last_run; i-- > doc.first_run;) {
    const RankRange& run = kv.runs[i];
    for (std::int32_t n = run.last; n-- > run.first;) {
      if (reserved_[n] == not_reserved) continue;
      receivers_.clear();
      for (const RankRange& need : needs_) {
        if (need.first <= n && n < need.last && need.rank != run.rank)
          receivers_.push_back(need.rank);
      }
      home_ = run.rank;
      send_shard(n);
    }
  }
  nvlink_.cap = nvlink_cap;  // it may have grown, for this document alone
  network_.cap = network_cap;
}

void RelayPlanner::send_shard(std::int32_t shard) {
  const std::int64_t num_rows = num_rows_[shard];
  const Tier& reserved = reserved_[shard] == reserved_nvlink ? nvlink_ : network_;
  const std::int64_t num_parts = receivers_.size() == 1 ? 1 : (num_rows - 1) / part_rows_ + 1;
  for (std::int64_t i = 0; i < num_parts; ++i) {
    const std::int64_t begin = num_rows * i / num_parts;
    const std::int64_t part_rows = num_rows * (i + 1) / num_parts - begin;
    bytes_out(home_, reserved) -= part_rows * row_bytes_;
    send_part({.shard = shard, .row_begin = begin, .num_rows = part_rows});
    ++turn_;
  }
}

std::size_t RelayPlanner::end_of_node(std::size_t first) const {
  std::size_t last = first;
  while (last < receivers_.size() && nodes_[receivers_[last]] == nodes_[receivers_[first]]) ++last;
  return last;
}

void RelayPlanner::send_part(const RelayHop& part) {
  network_.begin_with(-1);
  std::size_t begin = 0;
  while (begin < receivers_.size() && nodes_[receivers_[begin]] != nodes_[home_])
    begin = end_of_node(begin);
  const std::size_t near = begin;
  const std::size_t near_end = near < receivers_.size() ? end_of_node(near) : near;
  if (near < near_end) {
    spread_in_node(part, near, near_end, -1);
    // Those near home can carry rows over the network as well.
    network_.holders = nvlink_.holders;
  }
  entries_.clear();
  for (std::size_t first = 0; first < receivers_.size();) {
    const std::size_t last = end_of_node(first);
    if (first != near || near == near_end)
      entries_.push_back({.rank = entry_of_node(first, last),
                          .first = static_cast<std::int32_t>(first),
                          .last = static_cast<std::int32_t>(last)});
    first = last;
  }
  order_by_room(entries_, part.num_rows, network_);
  for (const RankRange& entry : entries_) {
    const std::int32_t holder = hop(part, network_, entry.rank);
    spread_in_node(part, entry.first, entry.last, holder);
  }
}

// Those with room to forward come first, so that there is always one among the holders; in each
// group the first place goes round.
void RelayPlanner::order_by_room(std::vector<RankRange>& entries, std::int64_t num_rows,
                                 const Tier& tier) {
  if (entries.size() < 2) return;
  std::rotate(entries.begin(), entries.begin() + turn_ % static_cast<std::int64_t>(entries.size()),
              entries.end());
  std::stable_partition(entries.begin(), entries.end(), [&](const RankRange& entry) {
    return bytes_out(entry.rank, tier) + num_rows * row_bytes_ <= tier.cap;
  });
}

// The receiver in the node with the fewest bytes over the network so far.
std::int32_t RelayPlanner::entry_of_node(std::size_t first, std::size_t last) const {
  std::int32_t best = receivers_[first];
  for (std::size_t i = first + 1; i < last; ++i) {
    if (relay_->links[receivers_[i]].network_in < relay_->links[best].network_in)
      best = receivers_[i];
  }
  return best;
}

void RelayPlanner::spread_in_node(const RelayHop& part, std::size_t first, std::size_t last,
                                  std::int32_t root) {
  nvlink_.begin_with(root);
  in_turn_.clear();
  for (std::size_t i = first; i < last; ++i) {
    if (receivers_[i] != rank_of(root)) in_turn_.push_back({.rank = receivers_[i]});
  }
  order_by_room(in_turn_, part.num_rows, nvlink_);
  for (const RankRange& entry : in_turn_) hop(part, nvlink_, entry.rank);
}

/// @return the hop that brings the rows to `dst`
std::int32_t RelayPlanner::hop(const RelayHop& part, Tier& tier, std::int32_t dst) {
  const std::int64_t num_bytes = part.num_rows * row_bytes_;
  const auto sent_by = [&](std::int32_t holder) { return bytes_out(rank_of(holder), tier); };
  while (sent_by(tier.holders[tier.front]) + num_bytes > tier.cap) {
    if (++tier.front < tier.holders.size()) continue;
    // Nobody has room. Few holders: the one with the fewest bytes, as the others' turn will come.
    if (tier.holders.size() <= few_holders) {
      tier.front = std::ranges::min_element(tier.holders, {}, sent_by) - tier.holders.begin();
      break;
    }
    tier.front = 0;
    tier.cap += tier.cap / 16 + 1;
  }
  RelaySchedule& relay = *relay_;
  RelayHop hop = part;
  hop.after = tier.holders[tier.front];
  hop.src_rank = rank_of(hop.after);
  hop.dst_rank = dst;
  hop.stage = hop.after < 0 ? 0 : relay.hops[hop.after].stage + 1;
  bytes_out(hop.src_rank, tier) += num_bytes;
  LinkBytes& link = relay.links[dst];
  (tier.network ? link.network_in : link.nvlink_in) += num_bytes;
  check_number_of_hops(std::ssize(relay.hops) + 1);
  relay.hops.push_back(hop);
  relay.num_stages = std::max(relay.num_stages, hop.stage + 1);
  tier.holders.push_back(static_cast<std::int32_t>(relay.hops.size()) - 1);
  return tier.holders.back();
}

}  // namespace waybill::detail
