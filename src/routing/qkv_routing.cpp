#include "waybill/routing/qkv_routing.h"

#include <algorithm>
#include <utility>

#include "homes.h"
#include "kv_groups.h"
#include "kv_tables.h"
#include "recv_counts.h"
#include "waybill/core/at.h"

namespace waybill {
namespace {

using detail::at;
using detail::Homes;
using detail::KvGroup;
using detail::KvGroups;

/// Offsets of items counted by rank.
void offsets_from_counts(const std::vector<std::int64_t>& counts,
                         std::vector<std::int64_t>& offsets) {
  offsets.resize(counts.size() + 1);
  offsets[0] = 0;
  for (std::size_t r = 0; r < counts.size(); ++r) offsets[r + 1] = offsets[r] + counts[r];
}

void resize_lines(SparseMetadata& table, std::int32_t world_size, std::int64_t num_lines,
                  std::int64_t num_copies) {
  table.world_size = world_size;
  table.seq_len.resize(at(num_lines));
  table.dst_rank.resize(at(num_copies));
  table.dst_offset.resize(at(num_copies));
}

/// What a rank receives forward it sends in reverse, to where it came from.
void count_queries(const QkvPlan& plan, QkvRouting& routing) {
  const SparseMetadata& rev = routing.rev_q;
  detail::RecvCounter counter(plan.world_size, routing.fwd_q.recv);
  for (std::int32_t r = 0; r < plan.world_size; ++r) {
    for (std::int64_t i = rev.rank_offsets[at(r)]; i < rev.rank_offsets[at(r) + 1]; ++i) {
      counter.add(rev.dst_rank[at(i)], rev.seq_len[at(i)]);
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
  resize_lines(fwd, plan.world_size, num_shards, num_shards);
  resize_lines(rev, plan.world_size, num_shards, num_shards);
  fwd.copy_offsets.clear();
  rev.copy_offsets.clear();
  fwd.rank_offsets = plan.rank_shard_offsets;
  std::vector<std::int64_t> received(at(plan.world_size));
  for (const std::int32_t dst : plan.q_dst) ++received[at(dst)];
  offsets_from_counts(received, rev.rank_offsets);
  attn.rank_offsets = rev.rank_offsets;
  attn.shard.resize(at(num_shards));
  attn.q_begin.resize(at(num_shards));
  attn.q_len.resize(at(num_shards));
  attn.max_seqlen_q.assign(at(plan.world_size), 0);

  std::vector<std::int64_t> next(rev.rank_offsets.begin(), rev.rank_offsets.end() - 1);
  std::vector<std::int64_t> filled(at(plan.world_size));
  for (std::int64_t s = 0; s < num_shards; ++s) {
    const auto r = at(plan.q_dst[at(s)]);
    const std::int64_t rows = plan.shard_len[at(s)];
    const auto line = at(next[r]++);
    fwd.seq_len[at(s)] = rows;
    fwd.dst_rank[at(s)] = plan.q_dst[at(s)];
    fwd.dst_offset[at(s)] = filled[r];
    rev.seq_len[line] = rows;
    rev.dst_rank[line] = homes.rank[at(s)];
    rev.dst_offset[line] = homes.begin[at(s)];
    attn.shard[line] = static_cast<std::int32_t>(s);
    attn.q_begin[line] = filled[r];
    attn.q_len[line] = rows;
    attn.max_seqlen_q[r] = std::max(attn.max_seqlen_q[r], rows);
    filled[r] += rows;
  }
  count_queries(plan, routing);
}

/// The rows of its rank's KV buffer that each received query shard reads.
void place_contexts(const QkvPlan& plan, const KvGroups& kv, QkvRouting& routing) {
  SparseAttnLayout& attn = routing.attention;
  attn.kv_begin.resize(attn.shard.size());
  attn.kv_len.resize(attn.shard.size());
  attn.max_seqlen_kv.assign(at(plan.world_size), 0);
  for (std::int32_t r = 0; r < plan.world_size; ++r) {
    std::int64_t longest = 0;
    for (std::int64_t i = attn.rank_offsets[at(r)]; i < attn.rank_offsets[at(r + 1)]; ++i) {
      const auto shard = at(attn.shard[at(i)]);
      const KvGroup& group = kv.groups[at(kv.query_group[shard])];
      const std::int64_t before = kv.window[shard];
      attn.kv_begin[at(i)] = group.to_row + before;
      attn.kv_len[at(i)] = plan.mask == MaskKind::full
                               ? group.rows
                               : kv.context[shard] + plan.shard_len[shard] - before;
      longest = std::max(longest, attn.kv_len[at(i)]);
    }
    attn.max_seqlen_kv[at(r)] = longest;
  }
}

void route_keys_and_values(const QkvPlan& plan, const Homes& homes, const KvGroups& kv,
                           int num_threads, detail::KvRows& rows, QkvRouting& routing) {
  SparseMetadata& fwd = routing.fwd_kv;
  SparseMetadata& rev = routing.rev_kv;
  const std::int64_t num_copies = kv.copy_offsets.back();
  resize_lines(fwd, plan.world_size, plan.num_shards(), num_copies);
  resize_lines(rev, plan.world_size, num_copies, num_copies);
  fwd.rank_offsets = plan.rank_shard_offsets;
  fwd.copy_offsets = kv.copy_offsets;
  rev.copy_offsets.clear();
  std::copy(plan.shard_len.begin(), plan.shard_len.end(), fwd.seq_len.begin());
  offsets_from_counts(kv.rank_slots, rev.rank_offsets);
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
