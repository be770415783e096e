#include "expected_layout.h"

#include <algorithm>
#include <span>

namespace waybill::detail {
namespace {

void place_at_home(const QkvPlan& plan, ExpectedLayout& layout) {
  std::int64_t row = 0;
  for (std::int32_t w = 0; w < plan.world_size; ++w) {
    const std::int64_t first_row = row;
    for (std::int64_t s = plan.rank_shard_offsets[w]; s < plan.rank_shard_offsets[w + 1]; ++s) {
      layout.home_begin.push_back(row);
      layout.home_rank.push_back(w);
      row += plan.shard_len[s];
    }
    layout.home_rows.push_back(row - first_row);
  }
}

void place_queries(const QkvPlan& plan, ExpectedLayout& layout) {
  std::vector<std::vector<std::int32_t>> lists(plan.world_size);
  layout.q_rows.assign(plan.world_size, 0);
  for (std::int32_t s = 0; s < plan.num_shards(); ++s) {
    const std::size_t r = plan.q_dst[s];
    layout.q_begin.push_back(layout.q_rows[r]);
    layout.q_rows[r] += plan.shard_len[s];
    lists[r].push_back(s);
  }
  layout.rank_offsets.push_back(0);
  for (const std::vector<std::int32_t>& list : lists) {
    layout.received.insert(layout.received.end(), list.begin(), list.end());
    layout.rank_offsets.push_back(std::ssize(layout.received));
  }
}

/// The KV shards of one document that each rank has so far, as the walk along its queries goes.
class DocumentWalk {
 public:
  DocumentWalk(const QkvPlan& plan, ExpectedLayout& layout)
      : plan_(plan), layout_(layout), next_(plan.world_size), doc_of_rank_(plan.world_size) {
    std::ranges::fill(doc_of_rank_, -1);
  }

  void add_document(std::int64_t doc) {
    const std::size_t first = plan_.doc_shard_offsets[doc];
    const std::size_t last = plan_.doc_shard_offsets[doc + 1];
    const std::span<const std::int32_t> shards(plan_.doc_shards.data() + first, last - first);
    std::vector<std::int64_t> rows_before{0};
    std::vector<std::int64_t> copies(shards.size() + 1);  // differences along the positions
    for (const std::int32_t shard : shards) {
      rows_before.push_back(rows_before.back() + plan_.shard_len[shard]);
    }
    for (std::size_t p = 0; p < shards.size(); ++p) {
      const std::size_t shard = shards[p];
      const std::size_t rank = plan_.q_dst[shard];
      const std::size_t begin = first_needed(plan_, shards[p]);
      if (doc_of_rank_[rank] != doc) next_[rank] = 0;
      doc_of_rank_[rank] = doc;
      // per_rank: what an earlier query of the rank brought is there already.
      const bool shared = plan_.kv_layout == KvLayout::per_rank;
      const std::size_t from = shared ? std::max(begin, next_[rank]) : begin;
      const std::size_t end = plan_.mask == MaskKind::full ? shards.size() : p + 1;
      next_[rank] = end;
      ++copies[from];  // of no shards where from is end
      --copies[end];
      layout_.document[shard] = static_cast<std::int32_t>(doc);
      layout_.position[shard] = static_cast<std::int32_t>(p);
      layout_.kv_len[shard] = rows_before[end] - rows_before[begin];
      layout_.kv_rows[rank] += rows_before[end] - rows_before[from];
      // The rank's rows end with this query's context.
      if (shared) layout_.kv_begin[shard] = layout_.kv_rows[rank] - layout_.kv_len[shard];
    }
    std::int64_t holders = 0;
    for (std::size_t p = 0; p < shards.size(); ++p) {
      holders += copies[p];
      layout_.num_destinations[shards[p]] = holders;
    }
  }

 private:
  const QkvPlan& plan_;
  ExpectedLayout& layout_;
  std::vector<std::size_t> next_;          // by rank: first position it does not have
  std::vector<std::int64_t> doc_of_rank_;  // the document that next_ speaks of
};

}  // namespace

ExpectedLayout expect_layout(const QkvPlan& plan) {
  ExpectedLayout layout;
  const std::size_t num_shards = plan.num_shards();
  place_at_home(plan, layout);
  place_queries(plan, layout);
  layout.document.resize(num_shards);
  layout.position.resize(num_shards);
  layout.kv_begin.resize(num_shards);
  layout.kv_len.resize(num_shards);
  layout.kv_rows.assign(plan.world_size, 0);
  layout.num_destinations.resize(num_shards);
  DocumentWalk walk(plan, layout);
  for (std::int64_t doc = 0; doc < plan.num_documents(); ++doc) walk.add_document(doc);
  if (plan.kv_layout == KvLayout::per_query) {  // one context after the other
    std::vector<std::int64_t> filled(plan.world_size);
    for (std::size_t s = 0; s < num_shards; ++s) {
      const std::size_t rank = plan.q_dst[s];
      layout.kv_begin[s] = filled[rank];
      filled[rank] += layout.kv_len[s];
    }
  }
  layout.num_planes.assign(plan.world_size, 0);
  for (std::size_t s = 0; s < num_shards; ++s) {
    std::int64_t& planes = layout.num_planes[layout.home_rank[s]];
    planes = std::max(planes, layout.num_destinations[s]);
  }
  return layout;
}

}  // namespace waybill::detail
