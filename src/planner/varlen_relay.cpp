#include "waybill/planner/varlen_relay.h"

#include <algorithm>
#include <span>
#include <vector>

#include "figures.h"
#include "routing/homes.h"

namespace waybill {
namespace {

using detail::KvDocument;
using detail::KvNeeds;

/// Finds the rows of KV that cross. Shards are numbered as they stand in plan.doc_shards, so that
/// those of a document are consecutive.
class NeedFinder {
 public:
  NeedFinder(const QkvPlan& plan, const VarlenRouting& routing, const PlannerOptions& options)
      : plan_(plan),
        routing_(routing),
        model_(options.model),
        home_(detail::homes_of(plan.rank_shard_offsets)),
        seen_(plan.world_size, -1),
        need_of_rank_(plan.world_size, -1) {
    once_.assign(plan.world_size, {});
    copied_.assign(plan.world_size, {});
    kv_.nodes.resize(plan.world_size);
    for (std::int32_t r = 0; r < plan.world_size; ++r)
      kv_.nodes[r] = r / options.hardware.ranks_per_node;
  }

  void find() {
    count_queries();
    for (std::int64_t d = 0; d < plan_.num_documents(); ++d) find_document(d);
    detail::add_links(once_, kv_.q_links);
    detail::add_links(copied_, kv_.q_links);
  }

  [[nodiscard]] const KvNeeds& crossing() const { return kv_; }
  [[nodiscard]] std::span<const std::int64_t> num_rows() const { return num_rows_; }
  /// [W] bytes when a rank gets every row once.
  [[nodiscard]] std::span<const LinkBytes> once() const { return once_; }
  /// [W] bytes when every copy comes from home.
  [[nodiscard]] std::span<const LinkBytes> copied() const { return copied_; }

 private:
  void add(std::vector<LinkBytes>& links, std::int32_t src, std::int32_t dst,
           std::int64_t bytes) const {
    detail::add_bytes(links, kv_.nodes[src] == kv_.nodes[dst], src, dst, bytes);
  }

  void count_queries() {
    kv_.q_links.assign(plan_.world_size, {});
    const SparseMetadata& q = routing_.fwd_q;
    for (std::int64_t n = 0; n < q.num_entries(); ++n) {
      for (auto c = q.destination_begin(n); c < q.destination_end(n); ++c) {
        if (q.dst_rank[c] != home_[n])
          add(kv_.q_links, home_[n], q.dst_rank[c], q.seq_len[n] * model_.q_row_bytes());
      }
    }
  }

  void find_document(std::int64_t d) {
    KvDocument doc{.first_need = static_cast<std::int32_t>(kv_.needs.size()),
                   .first_run = static_cast<std::int32_t>(kv_.runs.size())};
    for (auto i = plan_.doc_shard_offsets[d]; i < plan_.doc_shard_offsets[d + 1]; ++i) {
      const std::size_t shard = plan_.doc_shards[i];
      const auto place = static_cast<std::int32_t>(i);
      num_rows_.push_back(plan_.shard_len[shard]);
      if (i == plan_.doc_shard_offsets[d] || kv_.runs.back().rank != home_[shard])
        kv_.runs.push_back({.rank = home_[shard], .first = place, .last = place});
      kv_.runs.back().last = place + 1;
      if (plan_.shard_len[shard] > 0) find_receivers(doc, place, shard);
    }
    doc.last_need = static_cast<std::int32_t>(kv_.needs.size());
    doc.last_run = static_cast<std::int32_t>(kv_.runs.size());
    if (doc.first_need == doc.last_need) {
      kv_.runs.resize(doc.first_run);
    } else {
      kv_.documents.push_back(doc);
    }
  }

  void find_receivers(const KvDocument& doc, std::int32_t place, std::size_t shard) {
    const SparseMetadata& kv = routing_.fwd_kv;
    const std::int64_t bytes = plan_.shard_len[shard] * model_.kv_row_bytes();
    const auto entry = static_cast<std::int64_t>(shard);
    for (auto c = kv.destination_begin(entry); c < kv.destination_end(entry); ++c) {
      const std::int32_t dst = kv.dst_rank[c];
      if (dst == home_[shard]) continue;
      add(copied_, home_[shard], dst, bytes);
      if (seen_[dst] == place) continue;  // another context of the rank
      seen_[dst] = place;
      add(once_, home_[shard], dst, bytes);
      std::int32_t& need = need_of_rank_[dst];
      if (need < doc.first_need || kv_.needs[need].last != place) {
        need = static_cast<std::int32_t>(kv_.needs.size());
        kv_.needs.push_back({.rank = dst, .first = place, .last = place});
      }
      kv_.needs[need].last = place + 1;
    }
  }

  const QkvPlan& plan_;
  const VarlenRouting& routing_;
  const ModelShape& model_;
  std::vector<std::int32_t> home_;  ///< [N]
  std::vector<std::int32_t> seen_;  ///< [W] the shard at hand, once the rank gets it
  std::vector<std::int32_t> need_of_rank_;
  std::vector<std::int64_t> num_rows_;  ///< [N]
  std::vector<LinkBytes> once_;
  std::vector<LinkBytes> copied_;
  KvNeeds kv_;
};

double limit_of(std::span<const LinkBytes> links, const HardwareFacts& hardware) {
  return limit_seconds(links, hardware.nvlink_bytes_per_second, hardware.network_bytes_per_second);
}

/// The least that any schedule leaves: what ranks must receive, over both links together.
double min_limit(std::span<const LinkBytes> once, const HardwareFacts& hardware) {
  std::int64_t most = 0;
  for (const LinkBytes& link : once) most = std::max(most, link.in());
  return static_cast<double>(most) /
         (hardware.nvlink_bytes_per_second + hardware.network_bytes_per_second);
}

}  // namespace

RelaySchedule plan_varlen_relay(const QkvPlan& plan, const VarlenRouting& routing,
                                const PlannerOptions& options, VarlenRelayUse use) {
  NeedFinder found(plan, routing, options);
  found.find();
  if (found.crossing().documents.empty()) return {};
  const double direct = limit_of(found.copied(), options.hardware);
  const bool always = use == VarlenRelayUse::always;
  if (!always && !detail::relay_pays(min_limit(found.once(), options.hardware), direct)) return {};
  RelaySchedule relay;
  detail::RelayPlanner().plan(found.crossing(), found.num_rows(), found.once(), options, relay);
  if (!always && !detail::relay_pays(limit_of(relay.links, options.hardware), direct)) return {};
  for (RelayHop& hop : relay.hops) hop.shard = plan.doc_shards[hop.shard];
  return relay;
}

RelaySchedule relay_of_sums(const VarlenRouting& routing, RelaySchedule relay) {
  const SparseMetadata& all = routing.fwd_kv;
  std::vector<std::int32_t> entry_of(all.num_entries(), -1);
  std::int32_t next = 0;
  for (std::int64_t n = 0; n < all.num_entries(); ++n) {
    if (all.destination_end(n) > all.destination_begin(n)) entry_of[n] = next++;
  }
  for (RelayHop& hop : relay.hops) hop.shard = entry_of[hop.shard];
  return relay;
}

}  // namespace waybill
