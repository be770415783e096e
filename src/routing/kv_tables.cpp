#include <algorithm>

#include "core/parallel_for.h"
#include "homes.h"
#include "kv_groups.h"

namespace waybill::detail {
namespace {

void load_rows(const QkvPlan& plan, const Homes& homes, const KvGroups& kv, KvRows& rows) {
  rows.resize(plan.doc_shards.size());
  std::int32_t next_home = -1;
  std::int32_t run_end = 0;
  for (std::size_t k = rows.size(); k-- > 0;) {
    const std::size_t shard = plan.doc_shards[k];
    const std::int32_t home = homes.rank[shard];
    if (home != next_home) run_end = static_cast<std::int32_t>(k + 1);
    next_home = home;
    rows[k] = {.len = plan.shard_len[shard],
               .end = kv.context[shard] + plan.shard_len[shard],
               .begin = homes.begin[shard],
               .plane = homes.rank_rows[home],
               .home = home,
               .run_end = run_end};
  }
}

/// Copy numbers by reverse entry, where they follow no formula (ranges, one KV copy per rank).
using CopyNumbers = UninitializedVector<std::int32_t>;

bool has_formula(const QkvPlan& plan) {
  return plan.kv_layout == KvLayout::per_query || (plan.kv_begin.empty() && plan.kv_end.empty());
}

/// Forward, shard by shard: copy c of a shard lies in the document's group c (one KV copy per
/// rank), or in that of its query c.
void write_forward(const QkvPlan& plan, const KvGroups& kv, std::int64_t doc_begin,
                   std::int64_t doc_end, SparseMetadata& fwd) {
  const bool by_query = plan.kv_layout == KvLayout::per_query;
  for (std::int64_t doc = doc_begin; doc < doc_end; ++doc) {
    const KvGroup* groups = kv.groups.data() + kv.doc_offsets[doc];
    const std::int64_t first = plan.doc_shard_offsets[doc];
    for (std::int64_t k = first; k < plan.doc_shard_offsets[doc + 1]; ++k) {
      const std::size_t shard = plan.doc_shards[k];
      const KvGroup* group = groups + (by_query ? kv.first_query[shard] : 0);
      const std::int64_t context = kv.context[shard];
      for (std::int64_t copy = kv.copy_offsets[shard]; copy < kv.copy_offsets[shard + 1]; ++copy) {
        fwd.dst_rank[copy] = group->rank;
        fwd.dst_offset[copy] = group->to_row + context;
        ++group;
      }
    }
  }
}

/// Forward where copies follow no formula: group by group, counting the copies of each shard.
void number_copies(const QkvPlan& plan, const KvGroups& kv, SparseMetadata& fwd,
                   CopyNumbers& numbers) {
  std::vector<std::int64_t> first_entry(kv.groups.size());
  std::int64_t next_entry = 0;
  for (const KvRun& run : kv.runs) {
    first_entry[run.group] = next_entry;
    next_entry += run.count;
  }
  numbers.resize(fwd.dst_rank.size());
  std::vector<std::int32_t> copies(plan.doc_shards.size());  // so far, in document order
  for (std::size_t g = 0; g < kv.groups.size(); ++g) {
    const KvGroup& group = kv.groups[g];
    std::int64_t entry = first_entry[g];
    for (std::int64_t k = group.doc_begin + group.first; k <= group.doc_begin + group.last; ++k) {
      const std::size_t shard = plan.doc_shards[k];
      const std::size_t copy = kv.copy_offsets[shard] + copies[k];
      fwd.dst_rank[copy] = group.rank;
      fwd.dst_offset[copy] = group.to_row + kv.context[shard];
      numbers[entry++] = copies[k]++;
    }
  }
}

/// Runs are read in the order of ranks, their shards lie in the order of documents: the shards of
/// a run are fetched this many runs before.
constexpr std::int64_t runs_before = 8;

void prefetch_run(const KvGroups& kv, const KvRows& rows, std::int64_t run_idx) {
  if (run_idx + runs_before >= std::ssize(kv.runs)) return;
  __builtin_prefetch(&rows[kv.runs[run_idx + runs_before].begin]);
}

/// Reverse of one run, from `entry` on. copy_of(i, entry) numbers the copy of its shard i.
template <class CopyOf>
void write_run(const KvRun& run, const KvRows& rows, std::int64_t entry, CopyOf copy_of,
               SparseMetadata& rev) {
  // The tables never overlap: __restrict saves reading them again after every store.
  const KvRow* __restrict row = rows.data() + run.begin;
  std::int64_t* __restrict to_len = rev.seq_len.data() + entry;
  std::int64_t* __restrict to_offset = rev.dst_offset.data() + entry;
  std::int32_t* __restrict to_rank = rev.dst_rank.data() + entry;
  for (std::int64_t i = 0; i < run.count; ++i) {
    to_len[i] = row[i].len;
    to_rank[i] = row[i].home;
    to_offset[i] = copy_of(i, entry + i) * row[i].plane + row[i].begin;
  }
}

/// Reverse of ranks [begin, end): the groups of a rank one after another, in its KV order.
void write_reverse(const QkvPlan& plan, const KvGroups& kv, const KvRows& rows,
                   const CopyNumbers& numbers, std::int64_t begin, std::int64_t end,
                   SparseMetadata& rev) {
  std::int64_t entry = rev.rank_offsets[begin];
  const bool formula = has_formula(plan);
  const bool per_query = plan.kv_layout == KvLayout::per_query;
  const std::int32_t* by_entry = numbers.data();
  for (std::int64_t i = kv.rank_runs[begin]; i < kv.rank_runs[end]; ++i) {
    const KvRun run = kv.runs[i];
    prefetch_run(kv, rows, i);
    if (per_query && plan.kv_end.empty()) {
      // The run ends with the query itself, copy 0.
      const auto copy_of = [&](std::int64_t k, std::int64_t) { return run.count - 1 - k; };
      write_run(run, rows, entry, copy_of, rev);
    } else if (per_query) {  // a group is number `number` among the queries of the document
      const auto copy_of = [&](std::int64_t k, std::int64_t) {
        return std::int64_t{run.number - kv.first_query[plan.doc_shards[run.begin + k]]};
      };
      write_run(run, rows, entry, copy_of, rev);
    } else if (formula) {
      const auto copy_of = [&](std::int64_t, std::int64_t) { return std::int64_t{run.number}; };
      write_run(run, rows, entry, copy_of, rev);
    } else {
      const auto copy_of = [&](std::int64_t, std::int64_t l) { return std::int64_t{by_entry[l]}; };
      write_run(run, rows, entry, copy_of, rev);
    }
    entry += run.count;
  }
}

/// Rows by sending rank: in a run, shards from one home are counted together.
void count_received(const KvGroups& kv, const KvRows& rows, SparseMetadata& fwd) {
  RecvCounter counter(fwd.world_size, fwd.recv);
  for (std::size_t r = 0; r + 1 < kv.rank_runs.size(); ++r) {
    for (std::int64_t i = kv.rank_runs[r]; i < kv.rank_runs[r + 1]; ++i) {
      const KvRun run = kv.runs[i];
      prefetch_run(kv, rows, i);
      const std::int32_t run_end = run.begin + run.count;
      std::int64_t counted = rows[run.begin].end - rows[run.begin].len;
      for (std::int32_t k = run.begin; k < run_end;) {
        const std::int32_t same_until = std::min(rows[k].run_end, run_end);
        const std::int64_t end = rows[same_until - 1].end;
        counter.add(rows[k].home, end - counted);
        counted = end;
        k = same_until;
      }
    }
    counter.end_rank();
  }
}

}  // namespace

void write_kv_tables(const QkvPlan& plan, const Homes& homes, const KvGroups& kv, int num_threads,
                     KvRows& rows, SparseMetadata& fwd, SparseMetadata& rev) {
  constexpr std::int64_t docs_per_chunk = 512;
  constexpr std::int64_t ranks_per_chunk = 16;
  load_rows(plan, homes, kv, rows);
  CopyNumbers numbers;
  if (has_formula(plan)) {
    parallel_for(
        plan.num_documents(), docs_per_chunk, num_threads,
        [&](std::int64_t begin, std::int64_t end) { write_forward(plan, kv, begin, end, fwd); });
  } else {
    number_copies(plan, kv, fwd, numbers);
  }
  parallel_for(plan.world_size, ranks_per_chunk, num_threads,
               [&](std::int64_t begin, std::int64_t end) {
                 write_reverse(plan, kv, rows, numbers, begin, end, rev);
               });
  count_received(kv, rows, fwd);
}

}  // namespace waybill::detail
