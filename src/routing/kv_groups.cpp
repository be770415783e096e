#include "kv_groups.h"

#include <algorithm>
#include <ranges>
#include <utility>

namespace waybill::detail {
namespace {

/// Forms the groups of one document after another.
class GroupBuilder {
 public:
  GroupBuilder(const QkvPlan& plan, KvGroups& result)
      : plan_(plan), result_(result), seen_(plan.world_size) {}

  void add_document(std::int64_t doc) {
    shards_ = plan_.doc_shards.data() + plan_.doc_shard_offsets[doc];
    num_shards_ =
        static_cast<std::int32_t>(plan_.doc_shard_offsets[doc + 1] - plan_.doc_shard_offsets[doc]);
    doc_begin_ = static_cast<std::int32_t>(plan_.doc_shard_offsets[doc]);
    first_group_ = result_.groups.size();
    std::int64_t rows = 0;
    for (std::int32_t p = 0; p < num_shards_; ++p) {
      result_.context[shards_[p]] = rows;
      rows += plan_.shard_len[shards_[p]];
      result_.window[shards_[p]] = result_.context[shards_[kv_begin(shards_[p])]];
      result_.range_end[shards_[p]] = rows;
    }
    for (std::int32_t p = 0; p < num_shards_ && !plan_.kv_end.empty(); ++p) {
      const std::size_t last = shards_[kv_last(p)];
      result_.range_end[shards_[p]] = result_.context[last] + plan_.shard_len[last];
    }
    if (plan_.kv_layout == KvLayout::per_query) {
      group_each_query();
    } else if (plan_.kv_begin.empty() && plan_.kv_end.empty()) {
      group_prefixes(doc);
    } else {
      group_ranges(doc);
    }
  }

 private:
  [[nodiscard]] std::int32_t kv_begin(std::int32_t shard) const {
    return plan_.first_needed(shard);
  }

  /// The last position that the query at `position` needs.
  [[nodiscard]] std::int32_t kv_last(std::int32_t position) const {
    return plan_.end_needed(shards_[position], position) - 1;
  }

  [[nodiscard]] std::int64_t rows_between(std::int32_t first, std::int32_t last) const {
    const std::size_t end = shards_[last];
    return result_.context[end] + plan_.shard_len[end] - result_.context[shards_[first]];
  }

  void append_group(std::int32_t rank, std::int32_t first, std::int32_t last) {
    result_.groups.push_back(
        {.rank = rank,
         .first = first,
         .last = last,
         .doc_begin = doc_begin_,
         .number = static_cast<std::int32_t>(result_.groups.size() - first_group_),
         .context = result_.context[shards_[first]],
         .rows = rows_between(first, last),
         .to_row = 0});
  }

  /// per_query: the context of every query is a group of its own.
  void group_each_query() {
    for (std::int32_t p = 0; p < num_shards_; ++p) {
      const std::int32_t shard = shards_[p];
      result_.query_group[shard] = static_cast<std::int32_t>(result_.groups.size());
      append_group(plan_.q_dst[shard], kv_begin(shard), kv_last(p));
    }
    // Shard p serves the queries first .. q of which kv_begin(q) <= p < kv_end(first); ranges never
    // move back.
    std::int32_t first = 0;
    std::int32_t q = 0;
    for (std::int32_t p = 0; p < num_shards_; ++p) {
      while (kv_last(first) < p) ++first;
      while (q + 1 < num_shards_ && kv_begin(shards_[q + 1]) <= p) ++q;
      result_.copy_offsets[shards_[p]] = q - first + 1;
      result_.first_query[shards_[p]] = first;
    }
  }

  /// per_rank without ranges: a rank needs the prefix that ends with its last query. Walking back,
  /// each rank is met at its last query, so the groups end in falling order, and a shard belongs to
  /// exactly the groups met so far.
  void group_prefixes(std::int64_t doc) {
    for (std::int32_t p = num_shards_ - 1; p >= 0; --p) {
      const std::int32_t shard = shards_[p];
      const std::int32_t rank = plan_.q_dst[shard];
      Seen& seen = seen_[rank];
      if (seen.doc != doc) {
        seen = {.doc = doc, .group = static_cast<std::int32_t>(result_.groups.size())};
        append_group(rank, 0, kv_last(p));
      }
      result_.query_group[shard] = seen.group;
      result_.copy_offsets[shard] = static_cast<std::int64_t>(result_.groups.size() - first_group_);
    }
  }

  /// per_rank with ranges: walking back, a query extends its rank's latest group when they touch,
  /// and begins a new one otherwise. Groups are then put into the order of group_prefixes.
  void group_ranges(std::int64_t doc) {
    std::vector<std::int32_t> first_met;  // by group: the order of its rank among the ranks
    std::int32_t num_ranks = 0;
    for (std::int32_t p = num_shards_ - 1; p >= 0; --p) {
      const std::int32_t shard = shards_[p];
      const std::int32_t rank = plan_.q_dst[shard];
      Seen& seen = seen_[rank];
      if (seen.doc != doc) seen = {.doc = doc, .group = -1, .order = num_ranks++};
      const bool touches = seen.group >= 0 && result_.groups[seen.group].first <= kv_last(p) + 1;
      if (touches) {
        KvGroup& group = result_.groups[seen.group];
        group.first = std::min(group.first, kv_begin(shard));
        group.context = result_.context[shards_[group.first]];
        group.rows = rows_between(group.first, group.last);
      } else {
        seen.group = static_cast<std::int32_t>(result_.groups.size());
        append_group(rank, kv_begin(shard), kv_last(p));
        first_met.push_back(seen.order);
      }
      result_.query_group[shard] = seen.group;
    }
    order_ranges(first_met, num_ranks);
    count_copies();
  }

  /// Stable order by rank (last query first), and inside a rank by position.
  void order_ranges(const std::vector<std::int32_t>& first_met, std::int32_t num_ranks) {
    const auto num_groups = static_cast<std::int32_t>(first_met.size());
    std::vector<std::int64_t> next;
    offsets_by(first_met, num_ranks, next);
    std::vector<std::int32_t> place(first_met.size());
    for (std::int32_t g = num_groups - 1; g >= 0; --g)
      place[g] = static_cast<std::int32_t>(next[first_met[g]]++);
    std::vector<KvGroup> ordered(first_met.size());
    for (std::int32_t g = 0; g < num_groups; ++g) {
      ordered[place[g]] = result_.groups[first_group_ + g];
    }
    std::copy(ordered.begin(), ordered.end(),
              result_.groups.begin() + static_cast<std::ptrdiff_t>(first_group_));
    for (std::int32_t p = 0; p < num_shards_; ++p) {
      std::int32_t& group = result_.query_group[shards_[p]];
      group = static_cast<std::int32_t>(first_group_) + place[group - first_group_];
    }
  }

  /// Copies of each shard: groups that hold it, by a running sum of their ends.
  void count_copies() {
    for (std::int32_t p = 0; p < num_shards_; ++p) result_.copy_offsets[shards_[p]] = 0;
    for (std::size_t g = first_group_; g < result_.groups.size(); ++g) {
      const KvGroup& group = result_.groups[g];
      ++result_.copy_offsets[shards_[group.first]];
      if (group.last + 1 < num_shards_) --result_.copy_offsets[shards_[group.last + 1]];
    }
    for (std::int32_t p = 1; p < num_shards_; ++p) {
      result_.copy_offsets[shards_[p]] += result_.copy_offsets[shards_[p - 1]];
    }
  }

  struct Seen {  ///< by rank: the latest group of the current document there
    std::int64_t doc = -1;
    std::int32_t group = -1;
    std::int32_t order = 0;
  };

  const QkvPlan& plan_;
  KvGroups& result_;
  std::vector<Seen> seen_;
  const std::int32_t* shards_ = nullptr;
  std::int32_t num_shards_ = 0;
  std::int32_t doc_begin_ = 0;
  std::size_t first_group_ = 0;
};

/// Lays the groups into the KV buffers of their ranks, in the order in which `for_each` names them.
template <class ForEach>
void place_groups(std::int32_t world_size, ForEach for_each, KvGroups& result) {
  offsets_by(std::views::transform(result.groups, &KvGroup::rank), world_size, result.rank_runs);
  result.runs.resize(result.groups.size());
  result.rank_slots.assign(world_size, 0);
  std::vector<std::int64_t> next(result.rank_runs.begin(), result.rank_runs.end() - 1);
  std::vector<std::int64_t> rank_rows(world_size);
  for_each([&](std::int32_t group_idx) {
    KvGroup& group = result.groups[group_idx];
    const std::size_t r = group.rank;
    const std::int32_t count = group.last - group.first + 1;
    result.runs[next[r]++] = {.begin = group.doc_begin + group.first,
                              .count = count,
                              .number = group.number,
                              .group = group_idx};
    group.to_row = rank_rows[r] - group.context;
    rank_rows[r] += group.rows;
    result.rank_slots[r] += count;
  });
}

}  // namespace

void form_kv_groups(const QkvPlan& plan, KvGroups& result) {
  const std::size_t num_shards = plan.num_shards();
  result.groups.clear();
  result.groups.reserve(num_shards);
  result.doc_offsets.resize(plan.num_documents() + 1);
  result.query_group.resize(num_shards);
  result.context.resize(num_shards);
  result.window.resize(num_shards);
  result.range_end.resize(num_shards);
  result.first_query.resize(plan.kv_layout == KvLayout::per_query ? num_shards : 0);
  result.copy_offsets.resize(num_shards + 1);
  GroupBuilder builder(plan, result);
  result.doc_offsets[0] = 0;
  for (std::int64_t doc = 0; doc < plan.num_documents(); ++doc) {
    builder.add_document(doc);
    result.doc_offsets[doc + 1] = std::ssize(result.groups);
  }
  std::int64_t copies = 0;
  for (std::size_t shard = 0; shard < num_shards; ++shard) {
    copies += std::exchange(result.copy_offsets[shard], copies);
  }
  result.copy_offsets[num_shards] = copies;
  if (plan.kv_layout == KvLayout::per_query) {  // by query, in the global order
    const auto by_query = [&](auto&& body) {
      for (const std::int32_t group : result.query_group) body(group);
    };
    place_groups(plan.world_size, by_query, result);
  } else {
    const auto by_document = [&](auto&& body) {
      for (std::int32_t g = 0; g < std::ssize(result.groups); ++g) body(g);
    };
    place_groups(plan.world_size, by_document, result);
  }
}

}  // namespace waybill::detail
