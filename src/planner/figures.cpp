#include "figures.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "balance.h"

namespace waybill::detail {
// KV rows of shards [first, last) go to `dst`. Of the runs between the ends it is only noted that
// they are sent whole, so that this takes no time for each of them.
void FigureCounter::add_rows(std::int32_t first, std::int32_t last, std::int32_t dst,
                             const KvDocument& doc, AttentionPlan& plan) {
  const std::int64_t row_bytes = plan.options.model.kv_row_bytes();
  const std::int32_t doc_first = kv_.runs[doc.first_run].first;
  const auto rows = [&](std::int32_t from, std::int32_t to) {
    return position_[to - doc_first] - position_[from - doc_first];
  };
  plan.kv_tokens[dst] += rows(first, last);
  const auto doc_runs = std::span(kv_.runs).subspan(doc.first_run, doc.last_run - doc.first_run);
  const auto index = [&](auto it) { return static_cast<std::int32_t>(it - doc_runs.begin()); };
  std::int32_t begin = index(std::ranges::upper_bound(doc_runs, first, {}, &RankRange::last));
  std::int32_t end = index(std::ranges::lower_bound(doc_runs, last, {}, &RankRange::first));
  const auto send_part = [&](std::int32_t i) {
    const RankRange& run = doc_runs[i];
    if (run.rank == dst) return;
    add_link(plan.links, run.rank, dst,
             rows(std::max(run.first, first), std::min(run.last, last)) * row_bytes);
  };
  const auto is_cut = [&](std::int32_t i) {
    return doc_runs[i].first < first || doc_runs[i].last > last;
  };
  if (begin < end && is_cut(begin)) send_part(begin++);
  if (begin < end && is_cut(end - 1)) send_part(--end);
  if (begin >= end) return;

  // Runs are in the order of their ranks: those of the node of `dst` lie side by side.
  const std::int32_t node_size = plan.options.hardware.ranks_per_node;
  const std::int64_t node_begin = std::int64_t{kv_.nodes[dst]} * node_size;
  const auto place = [&](std::int64_t rank) {
    const auto rank_of = [](const RankRange& run) { return std::int64_t{run.rank}; };
    return std::clamp(index(std::ranges::lower_bound(doc_runs, rank, {}, rank_of)), begin, end);
  };
  const std::int32_t near = place(node_begin);
  const std::int32_t near_end = place(node_begin + node_size);
  const auto send_whole = [&](std::vector<std::int32_t>& sent, std::int32_t from, std::int32_t to,
                              std::int64_t& bytes_in) {
    if (from >= to) return;
    ++sent[from];
    --sent[to];
    bytes_in += rows(doc_runs[from].first, doc_runs[to - 1].last) * row_bytes;
  };
  LinkBytes& in = plan.links[dst];
  const std::int32_t own = place(dst);
  const std::int32_t own_end = place(std::int64_t{dst} + 1);
  send_whole(sent_far_, begin, near, in.network_in);
  send_whole(sent_near_, near, own, in.nvlink_in);
  send_whole(sent_near_, own_end, near_end, in.nvlink_in);
  send_whole(sent_far_, near_end, end, in.network_in);
}

// Adds the bytes that add_rows noted.
void FigureCounter::send_whole_runs(const KvDocument& doc, AttentionPlan& plan) const {
  const std::int64_t row_bytes = plan.options.model.kv_row_bytes();
  const std::int32_t doc_first = kv_.runs[doc.first_run].first;
  std::int64_t near = 0;
  std::int64_t far = 0;
  for (std::int32_t i = doc.first_run; i < doc.last_run; ++i) {
    near += sent_near_[i - doc.first_run];
    far += sent_far_[i - doc.first_run];
    const RankRange& run = kv_.runs[i];
    const std::int64_t bytes =
        (position_[run.last - doc_first] - position_[run.first - doc_first]) * row_bytes;
    plan.links[run.rank].nvlink_out += near * bytes;
    plan.links[run.rank].network_out += far * bytes;
  }
}

void FigureCounter::count_document(std::int64_t first, std::int64_t last, AttentionPlan& plan) {
  const QkvPlan& qkv = plan.plan;
  KvDocument doc;
  doc.first_need = static_cast<std::int32_t>(kv_.needs.size());
  doc.first_run = static_cast<std::int32_t>(kv_.runs.size());
  position_.assign(1, 0);
  const std::int64_t doc_len =
      std::accumulate(qkv.shard_len.begin() + first, qkv.shard_len.begin() + last, std::int64_t{0});
  // The first shard that shard n needs, and the one after the last.
  const auto key_begin = [&](std::int64_t n) {
    return static_cast<std::int32_t>(first + qkv.first_needed(static_cast<std::int32_t>(n)));
  };
  const auto key_end = [&](std::int64_t n) {
    const auto shard = static_cast<std::int32_t>(n);
    return static_cast<std::int32_t>(
        first + qkv.end_needed(shard, shard - static_cast<std::int32_t>(first)));
  };
  for (std::int64_t n = first; n < last; ++n) {
    const auto shard = static_cast<std::int32_t>(n);
    while (n >= qkv.rank_shard_offsets[home_rank_ + 1]) ++home_rank_;
    if (n == first || kv_.runs.back().rank != home_rank_)
      kv_.runs.push_back({.rank = home_rank_, .first = shard, .last = shard});
    kv_.runs.back().last = shard + 1;
    const std::int64_t begin = position_.back();
    position_.push_back(begin + qkv.shard_len[n]);
    const std::int32_t dst = qkv.q_dst[n];
    plan.work[dst] += kernel_work(mask_, plan.options.hardware, begin, position_.back(), doc_len);
    plan.attention_tokens[dst] += qkv.shard_len[n];
    if (dst != home_rank_)
      add_link(kv_.q_links, home_rank_, dst, qkv.shard_len[n] * plan.options.model.q_row_bytes());
    const std::int32_t key = key_begin(n);
    std::int32_t& need = need_of_rank_[dst];
    if (need < doc.first_need || kv_.needs[need].last < key) {
      need = static_cast<std::int32_t>(kv_.needs.size());
      kv_.needs.push_back({.rank = dst, .first = key, .last = key_end(n)});
    } else {
      kv_.needs[need].last = key_end(n);
    }
  }
  doc.last_need = static_cast<std::int32_t>(kv_.needs.size());
  doc.last_run = static_cast<std::int32_t>(kv_.runs.size());
  sent_near_.assign(doc.last_run - doc.first_run + 1, 0);
  sent_far_.assign(doc.last_run - doc.first_run + 1, 0);
  if (qkv.kv_layout == KvLayout::per_rank) {
    for (std::int32_t i = doc.first_need; i < doc.last_need; ++i)
      add_rows(kv_.needs[i].first, kv_.needs[i].last, kv_.needs[i].rank, doc, plan);
  } else {
    for (std::int64_t n = first; n < last; ++n) {
      add_rows(key_begin(n), key_end(n), qkv.q_dst[n], doc, plan);
    }
  }
  send_whole_runs(doc, plan);
  kv_.documents.push_back(doc);
}

// See AttentionPlan::least_bytes_in. Queries at `begin` or later have more work than all homes of
// the document may do, so that a rank without its keys attends to one of them. And whoever attends
// to the last query has at most one home's rows.
void FigureCounter::bound_bytes_in(const HomeLayout& home, AttentionPlan& plan) const {
  SlabCosts costs(plan.options);
  costs.block_tokens = 1;
  const std::int64_t max_work = *std::max_element(plan.work.begin(), plan.work.end());
  std::int64_t rows = 0;
  for (std::size_t d = 0; d + 1 < home.doc_pieces.size(); ++d) {
    const std::int32_t first = home.doc_pieces[d];
    const std::int32_t last = home.doc_pieces[d + 1];
    const Slab whole = home.pieces[last - 1].part(0, home.pieces[last - 1].end);
    const AttentionMask mask = plan.options.mask.with_prefix(whole.prefix);
    const std::int64_t end = whole.end;
    if (end <= rows || (last - first == 1 && mask.pairs(0, end, end) <= max_work)) continue;
    const std::int64_t num_homes = std::min<std::int64_t>(last - first, home.world_size);
    std::int64_t homes_work = 0;
    if (__builtin_mul_overflow(num_homes, max_work, &homes_work)) continue;
    const std::int64_t begin = costs.slab_down(whole, homes_work).begin;
    if (begin > 0) rows = std::max(rows, mask.keys(begin - 1, begin, end).rows());
    const std::int64_t first_key = mask.keys(end - 1, end, end).begin;
    std::int64_t at_home = 0;
    for (std::int32_t p = first; p < last; ++p) {
      const HomePiece& piece = home.pieces[p];
      at_home = std::max(at_home, piece.end - std::max(piece.begin, first_key));
    }
    rows = std::max(rows, end - first_key - at_home);
  }
  plan.least_bytes_in = rows * plan.options.model.kv_row_bytes();
}

void FigureCounter::count(const HomeLayout& home, AttentionPlan& plan) {
  const std::size_t world_size = home.world_size;
  const QkvPlan& qkv = plan.plan;
  plan.work.assign(world_size, 0);
  plan.home_tokens.assign(home.tokens.begin(), home.tokens.end());
  plan.attention_tokens.assign(world_size, 0);
  plan.kv_tokens.assign(world_size, 0);
  plan.links.assign(world_size, {});
  plan.block_work = 0;
  kv_.q_links.assign(world_size, {});
  need_of_rank_.assign(world_size, -1);
  kv_.nodes.resize(world_size);
  for (std::size_t r = 0; r < world_size; ++r)
    kv_.nodes[r] = static_cast<std::int32_t>(r) / plan.options.hardware.ranks_per_node;
  kv_.needs.clear();
  kv_.runs.clear();
  kv_.documents.clear();
  home_rank_ = 0;
  Slab longest;
  for (std::int64_t d = 0; d < qkv.num_documents(); ++d) {
    const std::int64_t first = qkv.doc_shard_offsets[d];
    const std::int64_t last = qkv.doc_shard_offsets[d + 1];
    const HomePiece& piece = home.pieces[home.doc_pieces[d + 1] - 1];
    if (piece.end > longest.end) longest = piece;
    mask_ = plan.options.mask.with_prefix(piece.prefix);
    while (first >= qkv.rank_shard_offsets[home_rank_ + 1]) ++home_rank_;
    if (last - first > 1 || qkv.q_dst[first] != home_rank_) {
      count_document(first, last, plan);
      continue;
    }
    const std::int64_t len = qkv.shard_len[first];
    plan.work[home_rank_] += kernel_work(mask_, plan.options.hardware, 0, len, len);
    plan.attention_tokens[home_rank_] += len;
    plan.kv_tokens[home_rank_] += len;
  }
  bound_bytes_in(home, plan);
  plan.block_work = kernel_work(
      plan.options.mask.with_prefix(longest.prefix), plan.options.hardware,
      std::max<std::int64_t>(0, longest.end - plan.options.block_tokens), longest.end, longest.end);
  add_links(plan.links, kv_.q_links);
}

}  // namespace waybill::detail
