#include "kv_tables.h"

#include <algorithm>

#include "recv_counts.h"
#include "waybill/core/parallel_for.h"

namespace waybill::detail {
namespace {

std::size_t at(std::int64_t idx) { return static_cast<std::size_t>(idx); }

/// The shards in document order, so that a group reads them in one run. [N] each.
struct DocumentRows {
  UninitializedVector<std::int64_t> len;
  UninitializedVector<std::int64_t> end;    ///< document rows up to the shard, itself included
  UninitializedVector<std::int64_t> begin;  ///< first row at home
  UninitializedVector<std::int64_t> plane;  ///< rows of the home rank: copies lie that far apart
  UninitializedVector<std::int32_t> home;
  UninitializedVector<std::int32_t> run_end;  ///< first later shard with another home

  DocumentRows(const QkvPlan& plan, const Homes& homes, const KvGroups& kv) {
    const std::size_t count = plan.doc_shards.size();
    for (auto* column : {&len, &end, &begin, &plane}) column->resize(count);
    for (auto* column : {&home, &run_end}) column->resize(count);
    for (std::size_t k = 0; k < count; ++k) {
      const auto shard = at(plan.doc_shards[k]);
      len[k] = plan.shard_len[shard];
      end[k] = kv.context[shard] + plan.shard_len[shard];
      begin[k] = homes.begin[shard];
      plane[k] = homes.rank_rows[at(homes.rank[shard])];
      home[k] = homes.rank[shard];
    }
    for (std::size_t k = count; k-- > 0;) {
      const bool run = k + 1 < count && home[k + 1] == home[k];
      run_end[k] = run ? run_end[k + 1] : static_cast<std::int32_t>(k + 1);
    }
  }
};

/// Copy numbers by reverse line, where they follow no formula (windows, one KV copy a rank).
using CopyNumbers = UninitializedVector<std::int32_t>;

bool has_formula(const QkvPlan& plan) {
  return plan.kv_layout == KvLayout::per_query || plan.kv_begin.empty();
}

/// Forward, shard by shard: copy c of position p lies in the document's group c (one KV copy a
/// rank, causal), or in that of its query p + c.
void write_forward(const QkvPlan& plan, const KvGroups& kv, std::int64_t doc_begin,
                   std::int64_t doc_end, SparseMetadata& fwd) {
  const std::int64_t step = plan.kv_layout == KvLayout::per_query ? 1 : 0;
  for (std::int64_t doc = doc_begin; doc < doc_end; ++doc) {
    const KvGroup* groups = kv.groups.data() + kv.doc_offsets[at(doc)];
    const std::int64_t first = plan.doc_shard_offsets[at(doc)];
    for (std::int64_t k = first; k < plan.doc_shard_offsets[at(doc + 1)]; ++k) {
      const auto shard = at(plan.doc_shards[at(k)]);
      const KvGroup* group = groups + step * (k - first);
      const std::int64_t context = kv.context[shard];
      for (std::int64_t copy = kv.copy_offsets[shard]; copy < kv.copy_offsets[shard + 1]; ++copy) {
        fwd.dst_rank[at(copy)] = group->rank;
        fwd.dst_offset[at(copy)] = group->row + context - group->context;
        ++group;
      }
    }
  }
}

/// Forward where copies follow no formula: group by group, counting the copies of each shard.
void number_copies(const QkvPlan& plan, const KvGroups& kv, const SparseMetadata& rev,
                   SparseMetadata& fwd, CopyNumbers& numbers) {
  std::vector<std::int64_t> first_line(kv.groups.size());
  for (std::size_t r = 0; r + 1 < kv.rank_groups.size(); ++r) {
    std::int64_t line = rev.rank_offsets[r];
    for (std::int64_t i = kv.rank_groups[r]; i < kv.rank_groups[r + 1]; ++i) {
      const auto g = at(kv.by_rank[at(i)]);
      first_line[g] = line;
      line += kv.groups[g].last - kv.groups[g].first + 1;
    }
  }
  numbers.resize(fwd.dst_rank.size());
  std::vector<std::int32_t> copies(plan.doc_shards.size());  // so far, in document order
  for (std::size_t g = 0; g < kv.groups.size(); ++g) {
    const KvGroup& group = kv.groups[g];
    std::int64_t line = first_line[g];
    for (std::int64_t k = group.doc_begin + group.first; k <= group.doc_begin + group.last; ++k) {
      const auto shard = at(plan.doc_shards[at(k)]);
      const auto copy = at(kv.copy_offsets[shard] + copies[at(k)]);
      fwd.dst_rank[copy] = group.rank;
      fwd.dst_offset[copy] = group.row + kv.context[shard] - group.context;
      numbers[at(line++)] = copies[at(k)]++;
    }
  }
}

/// Reverse of one group, from `line` on. copy_of(position, line) numbers the copy that it holds.
template <class CopyOf>
void write_group(const KvGroup& group, const DocumentRows& rows, std::int64_t line, CopyOf copy_of,
                 SparseMetadata& rev) {
  const std::int64_t count = group.last - group.first + 1;
  const auto first = at(group.doc_begin + group.first);
  // The tables never overlap: __restrict lets the loops be vectorised.
  const std::int64_t* __restrict len = rows.len.data() + first;
  const std::int64_t* __restrict begin = rows.begin.data() + first;
  const std::int64_t* __restrict plane = rows.plane.data() + first;
  const std::int32_t* __restrict home = rows.home.data() + first;
  std::int64_t* __restrict to_len = rev.seq_len.data() + line;
  std::int64_t* __restrict to_offset = rev.dst_offset.data() + line;
  std::int32_t* __restrict to_rank = rev.dst_rank.data() + line;
  for (std::int64_t i = 0; i < count; ++i) to_len[i] = len[i];
  for (std::int64_t i = 0; i < count; ++i) to_rank[i] = home[i];
  for (std::int64_t i = 0; i < count; ++i) {
    to_offset[i] = copy_of(group.first + i, line + i) * plane[i] + begin[i];
  }
}

/// Reverse of ranks [begin, end): the groups of a rank one after another, in its KV order.
void write_reverse(const QkvPlan& plan, const KvGroups& kv, const DocumentRows& rows,
                   const CopyNumbers& numbers, std::int64_t begin, std::int64_t end,
                   SparseMetadata& rev) {
  for (std::int64_t r = begin; r < end; ++r) {
    std::int64_t line = rev.rank_offsets[at(r)];
    for (std::int64_t i = kv.rank_groups[at(r)]; i < kv.rank_groups[at(r + 1)]; ++i) {
      const std::int32_t g = kv.by_rank[at(i)];
      const KvGroup& group = kv.groups[at(g)];
      if (plan.kv_layout == KvLayout::per_query) {
        const std::int64_t query = group.last;
        const auto copy_of = [=](std::int64_t p, std::int64_t) { return query - p; };
        write_group(group, rows, line, copy_of, rev);
      } else if (has_formula(plan)) {
        const std::int64_t copy = g - group.doc_group;
        const auto copy_of = [=](std::int64_t, std::int64_t) { return copy; };
        write_group(group, rows, line, copy_of, rev);
      } else {
        const std::int32_t* by_line = numbers.data();
        const auto copy_of = [=](std::int64_t, std::int64_t l) { return std::int64_t{by_line[l]}; };
        write_group(group, rows, line, copy_of, rev);
      }
      line += group.last - group.first + 1;
    }
  }
}

/// Rows by sending rank, run by run of shards from one home.
void count_received(const KvGroups& kv, const DocumentRows& rows, SparseMetadata& fwd) {
  RecvCounter counter(fwd.world_size, fwd.recv);
  for (std::int64_t r = 0; r < fwd.world_size; ++r) {
    for (std::int64_t i = kv.rank_groups[at(r)]; i < kv.rank_groups[at(r + 1)]; ++i) {
      const KvGroup& group = kv.groups[at(kv.by_rank[at(i)])];
      const std::int64_t group_end = group.doc_begin + group.last + 1;
      std::int64_t counted = group.context;
      for (std::int64_t k = group.doc_begin + group.first; k < group_end;) {
        const std::int64_t run_end = std::min<std::int64_t>(rows.run_end[at(k)], group_end);
        counter.add(rows.home[at(k)], rows.end[at(run_end - 1)] - counted);
        counted = rows.end[at(run_end - 1)];
        k = run_end;
      }
    }
    counter.end_rank();
  }
}

}  // namespace

void write_kv_tables(const QkvPlan& plan, const Homes& homes, const KvGroups& kv, int num_threads,
                     SparseMetadata& fwd, SparseMetadata& rev) {
  constexpr std::int64_t docs_per_chunk = 512;
  constexpr std::int64_t ranks_per_chunk = 16;
  const DocumentRows rows(plan, homes, kv);
  CopyNumbers numbers;
  if (has_formula(plan)) {
    parallel_for(
        plan.num_documents(), docs_per_chunk, num_threads,
        [&](std::int64_t begin, std::int64_t end) { write_forward(plan, kv, begin, end, fwd); });
  } else {
    number_copies(plan, kv, rev, fwd, numbers);
  }
  parallel_for(plan.world_size, ranks_per_chunk, num_threads,
               [&](std::int64_t begin, std::int64_t end) {
                 write_reverse(plan, kv, rows, numbers, begin, end, rev);
               });
  count_received(kv, rows, fwd);
}

}  // namespace waybill::detail
