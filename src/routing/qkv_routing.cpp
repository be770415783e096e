#include "waybill/routing/qkv_routing.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "homes.h"
#include "kv_groups.h"

namespace waybill {
namespace {

using detail::Homes;
using detail::KvGroup;
using detail::KvGroups;

void resize_entries(SparseMetadata& table, std::int32_t world_size, std::int64_t num_entries,
                    std::int64_t num_destinations) {
  table.world_size = world_size;
  table.seq_len.resize(num_entries);
  table.dst_rank.resize(num_destinations);
  table.dst_offset.resize(num_destinations);
}

/// A rank sends in reverse what it received forward, to where it came from.
void count_queries(const QkvPlan& plan, QkvRouting& routing) {
  const SparseMetadata& rev = routing.rev_q;
  detail::RecvCounter counter(plan.world_size, routing.fwd_q.recv);
  for (std::int32_t r = 0; r < plan.world_size; ++r) {
    for (std::int64_t i = rev.rank_offsets[r]; i < rev.rank_offsets[r + 1]; ++i) {
      counter.add(rev.dst_rank[i], rev.seq_len[i]);
    }
    counter.end_rank();
  }
  detail::transpose_counts(routing.fwd_q.recv, routing.rev_q.recv);
}

/// Q forward and reverse, and the Q side of the attention layout: one walk in the global order.
void route_queries(const QkvPlan& plan, const Homes& homes, QkvRouting& routing) {
  const std::int64_t num_shards = plan.num_shards();
  SparseMetadata& fwd = routing.fwd_q;
  SparseMetadata& rev = routing.rev_q;
  SparseAttnLayout& attn = routing.attention;
  resize_entries(fwd, plan.world_size, num_shards, num_shards);
  resize_entries(rev, plan.world_size, num_shards, num_shards);
  fwd.copy_offsets.clear();
  rev.copy_offsets.clear();
  fwd.rank_offsets = plan.rank_shard_offsets;
  detail::offsets_by(plan.q_dst, plan.world_size, rev.rank_offsets);
  attn.rank_offsets = rev.rank_offsets;
  attn.shard.resize(num_shards);
  attn.q_begin.resize(num_shards);
  attn.q_len.resize(num_shards);
  attn.max_seqlen_q.assign(plan.world_size, 0);

  std::vector<std::int64_t> next(rev.rank_offsets.begin(), rev.rank_offsets.end() - 1);
  std::vector<std::int64_t> filled(plan.world_size);
  for (std::int64_t s = 0; s < num_shards; ++s) {
    const std::size_t r = plan.q_dst[s];
    const std::int64_t rows = plan.shard_len[s];
    const std::size_t entry = next[r]++;
    fwd.seq_len[s] = rows;
    fwd.dst_rank[s] = plan.q_dst[s];
    fwd.dst_offset[s] = filled[r];
    rev.seq_len[entry] = rows;
    rev.dst_rank[entry] = homes.rank[s];
    rev.dst_offset[entry] = homes.begin[s];
    attn.shard[entry] = static_cast<std::int32_t>(s);
    attn.q_begin[entry] = filled[r];
    attn.q_len[entry] = rows;
    attn.max_seqlen_q[r] = std::max(attn.max_seqlen_q[r], rows);
    filled[r] += rows;
  }
  count_queries(plan, routing);
}

/// The rows of its rank's KV buffer that each received query shard reads.
void place_contexts(const QkvPlan& plan, const KvGroups& kv, QkvRouting& routing) {
  SparseAttnLayout& attn = routing.attention;
  attn.kv_row.resize(attn.shard.size());
  attn.kv_len.resize(attn.shard.size());
  attn.max_seqlen_kv.assign(plan.world_size, 0);
  for (std::int32_t r = 0; r < plan.world_size; ++r) {
    std::int64_t longest = 0;
    for (std::int64_t i = attn.rank_offsets[r]; i < attn.rank_offsets[r + 1]; ++i) {
      const std::size_t shard = attn.shard[i];
      const KvGroup& group = kv.groups[kv.query_group[shard]];
      const std::int64_t before = kv.window[shard];
      attn.kv_row[i] = group.to_row + before;
      attn.kv_len[i] = kv.range_end[shard] - before;
      longest = std::max(longest, attn.kv_len[i]);
    }
    attn.max_seqlen_kv[r] = longest;
  }
}

void route_keys_and_values(const QkvPlan& plan, const Homes& homes, const KvGroups& kv,
                           int num_threads, detail::KvRows& rows, QkvRouting& routing) {
  SparseMetadata& fwd = routing.fwd_kv;
  SparseMetadata& rev = routing.rev_kv;
  const std::int64_t num_destinations = kv.copy_offsets.back();
  resize_entries(fwd, plan.world_size, plan.num_shards(), num_destinations);
  resize_entries(rev, plan.world_size, num_destinations, num_destinations);
  fwd.rank_offsets = plan.rank_shard_offsets;
  fwd.copy_offsets = kv.copy_offsets;
  rev.copy_offsets.clear();
  std::copy(plan.shard_len.begin(), plan.shard_len.end(), fwd.seq_len.begin());
  rev.rank_offsets.resize(kv.rank_slots.size() + 1);
  rev.rank_offsets[0] = 0;
  std::partial_sum(kv.rank_slots.begin(), kv.rank_slots.end(), rev.rank_offsets.begin() + 1);
  detail::write_kv_tables(plan, homes, kv, num_threads, rows, fwd, rev);
  detail::transpose_counts(fwd.recv, rev.recv);
}

}  // namespace

struct QkvRouter::Memory {
  QkvRouting routing;
  Homes homes;
  KvGroups kv;
  detail::KvRows rows;
};

QkvRouter::QkvRouter() : memory_(std::make_unique<Memory>()) {}
QkvRouter::~QkvRouter() = default;
QkvRouter::QkvRouter(QkvRouter&&) noexcept = default;
QkvRouter& QkvRouter::operator=(QkvRouter&&) noexcept = default;

const QkvRouting& QkvRouter::compute(const QkvPlan& plan, int num_threads) {
  plan.check("compute_qkv_routing");
  auto& [routing, homes, kv, rows] = *memory_;
  detail::find_homes(plan, homes);
  routing.kv_layout = plan.kv_layout;
  route_queries(plan, homes, routing);
  detail::form_kv_groups(plan, kv);
  place_contexts(plan, kv, routing);
  route_keys_and_values(plan, homes, kv, num_threads, rows, routing);
  return routing;
}

QkvRouting QkvRouter::take() { return std::exchange(memory_->routing, {}); }

QkvRouting compute_qkv_routing(const QkvPlan& plan, int num_threads) {
  QkvRouter router;
  router.compute(plan, num_threads);
  return router.take();
}

}  // namespace waybill
