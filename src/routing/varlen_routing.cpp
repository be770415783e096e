#include <algorithm>
#include <span>

#include "homes.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

using detail::Homes;

/// Positions [first, last] of a document whose queries one rank attends to together; its context
/// are positions [kv_first, kv_last].
struct QueryRun {
  std::int64_t doc_begin = 0;  ///< into plan.doc_shards
  std::int32_t first = 0;
  std::int32_t last = 0;
  std::int32_t kv_first = 0;
  std::int32_t kv_last = 0;
  std::int32_t rank = 0;
  std::int64_t q_row = 0;  ///< at home, or in the window
  std::int64_t q_rows = 0;
  std::int64_t kv_row = 0;
  std::int64_t kv_rows = 0;
  bool is_whole = false;

  [[nodiscard]] VarlenSequence sequence(std::int64_t q, std::int64_t kv) const {
    return {q, q_rows, kv, kv_rows, is_whole};
  }
};

class RunFinder {
 public:
  RunFinder(const QkvPlan& plan, const Homes& homes, bool in_place)
      : plan_(plan), homes_(homes), in_place_(in_place) {}

  void find(std::vector<QueryRun>& staying, std::vector<QueryRun>& dispatched) {
    for (std::int64_t doc = 0; doc < plan_.num_documents(); ++doc) {
      doc_begin_ = plan_.doc_shard_offsets[doc];
      num_ = static_cast<std::int32_t>(plan_.doc_shard_offsets[doc + 1] - doc_begin_);
      taken_.assign(num_, 0);
      if (in_place_) keep_in_place(staying);
      split(dispatched);
    }
  }

 private:
  [[nodiscard]] std::size_t shard(std::int32_t position) const {
    return plan_.doc_shards[doc_begin_ + position];
  }
  [[nodiscard]] std::int32_t kv_first(std::int32_t position) const {
    return plan_.first_needed(static_cast<std::int32_t>(shard(position)));
  }

  [[nodiscard]] std::int32_t kv_last(std::int32_t position) const {
    return plan_.end_needed(static_cast<std::int32_t>(shard(position)), position) - 1;
  }

  [[nodiscard]] bool is_whole(std::int32_t position) const {
    return !plan_.is_causal(static_cast<std::int32_t>(shard(position)));
  }

  /// Whether the queries at this position begin a sequence, as they need no key before themselves,
  /// or see others of their range than those before.
  [[nodiscard]] bool begins_anew(std::int32_t position) const {
    if (is_whole(position) != is_whole(position - 1)) return true;
    if (plan_.kv_begin.empty()) return false;
    std::int64_t keys_before = 0;
    for (std::int32_t p = kv_first(position); p < position && keys_before == 0; ++p)
      keys_before = plan_.shard_len[shard(p)];
    return keys_before == 0;
  }

  [[nodiscard]] QueryRun run_of(std::int32_t first, std::int32_t last) const {
    QueryRun run{.doc_begin = doc_begin_,
                 .first = first,
                 .last = last,
                 .kv_first = kv_first(first),
                 .kv_last = kv_last(last),
                 .rank = plan_.q_dst[shard(first)],
                 .is_whole = is_whole(first)};
    for (std::int32_t p = first; p <= last; ++p) run.q_rows += plan_.shard_len[shard(p)];
    for (std::int32_t p = run.kv_first; p <= run.kv_last; ++p)
      run.kv_rows += plan_.shard_len[shard(p)];
    return run;
  }

  /// Keeps the heaviest of the runs that could stay, as long as their contexts do not overlap.
  void keep_in_place(std::vector<QueryRun>& staying) {
    find_blocks();
    candidates_.clear();
    const auto can_stay = [&](std::int32_t p) {
      if (plan_.q_dst[shard(p)] != homes_.rank[shard(p)]) return false;
      return kv_first(p) >= block_[p] && block_[kv_last(p)] == block_[p];
    };
    for (std::int32_t p = 0; p < num_; ++p) {
      if (!can_stay(p)) continue;
      std::int32_t last = p;
      while (last + 1 < num_ && block_[last + 1] == block_[p] && !begins_anew(last + 1) &&
             can_stay(last + 1))
        ++last;
      candidates_.push_back(run_of(p, last));
      p = last;
    }
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](const QueryRun& a, const QueryRun& b) {
                       return static_cast<double>(a.q_rows) * static_cast<double>(a.kv_rows) >
                              static_cast<double>(b.q_rows) * static_cast<double>(b.kv_rows);
                     });
    const std::size_t before = staying.size();
    for (QueryRun& run : candidates_) {
      const bool overlaps = std::any_of(staying.begin() + static_cast<std::ptrdiff_t>(before),
                                        staying.end(), [&](const QueryRun& other) {
                                          return run.is_whole == other.is_whole &&
                                                 run.kv_first <= other.kv_last &&
                                                 other.kv_first <= run.kv_last;
                                        });
      if (overlaps) continue;
      run.q_row = homes_.begin[shard(run.first)];
      run.kv_row = homes_.begin[shard(run.kv_first)];
      std::fill(taken_.begin() + run.first, taken_.begin() + run.last + 1, 1);
      staying.push_back(run);
    }
  }

  /// Where the rows begin that lie one after another on one rank, up to each position.
  void find_blocks() {
    block_.assign(num_, 0);
    for (std::int32_t p = 1; p < num_; ++p) {
      const std::size_t before = shard(p - 1);
      const bool adjacent =
          homes_.rank[before] == homes_.rank[shard(p)] &&
          homes_.begin[before] + plan_.shard_len[before] == homes_.begin[shard(p)];
      block_[p] = adjacent ? block_[p - 1] : p;
    }
  }

  /// The rest of the document, cut where the destination changes.
  void split(std::vector<QueryRun>& dispatched) {
    for (std::int32_t p = 0; p < num_; ++p) {
      if (taken_[p] != 0) continue;
      std::int32_t last = p;
      while (last + 1 < num_ && taken_[last + 1] == 0 && !begins_anew(last + 1) &&
             plan_.q_dst[shard(last + 1)] == plan_.q_dst[shard(p)])
        ++last;
      const QueryRun run = run_of(p, last);
      if (run.q_rows > 0) dispatched.push_back(run);
      p = last;
    }
  }

  const QkvPlan& plan_;
  const Homes& homes_;
  bool in_place_;
  std::int64_t doc_begin_ = 0;
  std::int32_t num_ = 0;
  std::vector<std::int32_t> block_;
  std::vector<std::uint8_t> taken_;
  std::vector<QueryRun> candidates_;
};

/// Writes the tables of what is dispatched.
class TableWriter {
 public:
  TableWriter(const QkvPlan& plan, const Homes& homes, std::span<const QueryRun> runs,
              VarlenRouting& routing)
      : plan_(plan), homes_(homes), runs_(runs), routing_(routing) {}

  void write() {
    count();
    number_rows();
    write_entries();
    write_destinations();
    write_sums();
  }

 private:
  [[nodiscard]] std::size_t shard(const QueryRun& run, std::int32_t position) const {
    return plan_.doc_shards[run.doc_begin + position];
  }

  void count() {
    travels_.assign(plan_.num_shards(), 0);
    copies_.assign(plan_.num_shards(), 0);
    for (const QueryRun& run : runs_) {
      for (std::int32_t p = run.first; p <= run.last; ++p) travels_[shard(run, p)] = 1;
      for (std::int32_t p = run.kv_first; p <= run.kv_last; ++p) ++copies_[shard(run, p)];
    }
  }

  /// Own rows of each rank that travel, and where they stand among those.
  void number_rows() {
    return_row_.assign(plan_.num_shards(), 0);
    for (std::int32_t w = 0; w < plan_.world_size; ++w) {
      VarlenRank& rank = routing_.ranks[w];
      std::int64_t returned = 0;
      for (std::int64_t n = plan_.rank_shard_offsets[w]; n < plan_.rank_shard_offsets[w + 1]; ++n) {
        const RowRange rows{homes_.begin[n], plan_.shard_len[n]};
        if (copies_[n] > 0) append(rank.kv_rows, rows);
        if (travels_[n] == 0) continue;
        append(rank.q_rows, rows);
        return_row_[n] = returned;
        returned += rows.rows;
      }
    }
  }

  static void append(std::vector<RowRange>& ranges, RowRange rows) {
    if (rows.rows == 0) return;
    if (!ranges.empty() && ranges.back().begin + ranges.back().rows == rows.begin) {
      ranges.back().rows += rows.rows;
    } else {
      ranges.push_back(rows);
    }
  }

  void write_entries() {
    for (SparseMetadata* table : {&routing_.fwd_q, &routing_.fwd_kv}) {
      const auto& counts = table == &routing_.fwd_q ? travels_ : copies_;
      table->world_size = plan_.world_size;
      table->rank_offsets = plan_.rank_shard_offsets;
      table->seq_len.resize(plan_.shard_len.size());
      std::copy(plan_.shard_len.begin(), plan_.shard_len.end(), table->seq_len.begin());
      table->copy_offsets.resize(counts.size() + 1);
      table->copy_offsets[0] = 0;
      for (std::size_t n = 0; n < counts.size(); ++n)
        table->copy_offsets[n + 1] = table->copy_offsets[n] + counts[n];
      table->dst_rank.resize(table->copy_offsets[counts.size()]);
      table->dst_offset.resize(table->dst_rank.size());
    }
  }

  /// Rank by rank, in the order in which sequences lie there.
  void write_destinations() {
    SparseMetadata& rev = routing_.rev_q;
    rev.world_size = plan_.world_size;
    rev.rank_offsets.assign(1, 0);
    next_copy_.assign(routing_.fwd_kv.copy_offsets.begin(), routing_.fwd_kv.copy_offsets.end() - 1);
    detail::RecvCounter q_counts(plan_.world_size, routing_.fwd_q.recv);
    detail::RecvCounter kv_counts(plan_.world_size, routing_.fwd_kv.recv);
    std::vector<QueryRun> by_rank(runs_.begin(), runs_.end());
    std::stable_sort(by_rank.begin(), by_rank.end(), [](const QueryRun& a, const QueryRun& b) {
      return a.rank != b.rank ? a.rank < b.rank : a.is_whole > b.is_whole;
    });
    auto run = by_rank.begin();
    for (std::int32_t r = 0; r < plan_.world_size; ++r) {
      std::int64_t q_row = 0;
      std::int64_t kv_row = 0;
      for (; run != by_rank.end() && run->rank == r; ++run) {
        routing_.ranks[r].dispatched.push_back(run->sequence(q_row, kv_row));
        send_queries(*run, q_row, q_counts);
        send_context(*run, kv_row, kv_counts);
        q_row += run->q_rows;
        kv_row += run->kv_rows;
      }
      q_counts.end_rank();
      kv_counts.end_rank();
      rev.rank_offsets.push_back(std::ssize(rev.seq_len));
    }
    detail::transpose_counts(routing_.fwd_q.recv, rev.recv);
  }

  void send_queries(const QueryRun& run, std::int64_t row, detail::RecvCounter& counts) {
    SparseMetadata& fwd = routing_.fwd_q;
    SparseMetadata& rev = routing_.rev_q;
    for (std::int32_t p = run.first; p <= run.last; ++p) {
      const std::size_t n = shard(run, p);
      const std::int64_t rows = plan_.shard_len[n];
      fwd.dst_rank[fwd.copy_offsets[n]] = run.rank;
      fwd.dst_offset[fwd.copy_offsets[n]] = row;
      rev.seq_len.push_back(rows);
      rev.dst_rank.push_back(homes_.rank[n]);
      rev.dst_offset.push_back(return_row_[n]);
      counts.add(homes_.rank[n], rows);
      row += rows;
    }
  }

  void send_context(const QueryRun& run, std::int64_t row, detail::RecvCounter& counts) {
    SparseMetadata& fwd = routing_.fwd_kv;
    for (std::int32_t p = run.kv_first; p <= run.kv_last; ++p) {
      const std::size_t n = shard(run, p);
      const std::size_t copy = next_copy_[n]++;
      fwd.dst_rank[copy] = run.rank;
      fwd.dst_offset[copy] = row;
      counts.add(homes_.rank[n], plan_.shard_len[n]);
      row += plan_.shard_len[n];
    }
  }

  void write_sums() {
    const SparseMetadata& all = routing_.fwd_kv;
    SparseMetadata& sums = routing_.sum_kv;
    sums.world_size = all.world_size;
    sums.dst_rank = all.dst_rank;
    sums.dst_offset = all.dst_offset;
    sums.recv = all.recv;
    sums.rank_offsets.assign(1, 0);
    sums.copy_offsets.push_back(0);
    for (std::int32_t w = 0; w < plan_.world_size; ++w) {
      for (std::int64_t n = all.rank_offsets[w]; n < all.rank_offsets[w + 1]; ++n) {
        if (copies_[n] == 0) continue;
        sums.seq_len.push_back(all.seq_len[n]);
        sums.copy_offsets.push_back(all.destination_end(n));
      }
      sums.rank_offsets.push_back(std::ssize(sums.seq_len));
    }
  }

  const QkvPlan& plan_;
  const Homes& homes_;
  std::span<const QueryRun> runs_;
  VarlenRouting& routing_;
  std::vector<std::int64_t> travels_;     ///< [N]: 1, or 0 in place
  std::vector<std::int64_t> copies_;      ///< [N]: contexts that hold the shard
  std::vector<std::int64_t> return_row_;  ///< [N]
  std::vector<std::int64_t> next_copy_;   ///< [N]
};

}  // namespace

VarlenRouting compute_varlen_routing(const QkvPlan& plan, bool in_place) {
  plan.check("compute_varlen_routing");
  Homes homes;
  detail::find_homes(plan, homes);
  std::vector<QueryRun> staying;
  std::vector<QueryRun> dispatched;
  RunFinder(plan, homes, in_place).find(staying, dispatched);
  VarlenRouting routing;
  routing.ranks.resize(plan.world_size);
  std::sort(staying.begin(), staying.end(),
            [](const QueryRun& a, const QueryRun& b) { return a.q_row < b.q_row; });
  for (const QueryRun& run : staying) {
    if (run.q_rows == 0) continue;
    routing.ranks[run.rank].in_place.push_back(run.sequence(run.q_row, run.kv_row));
  }
  TableWriter(plan, homes, dispatched, routing).write();
  return routing;
}

double in_place_share(const VarlenRouting& routing) {
  const auto pairs = [](const std::vector<VarlenSequence>& sequences) {
    double sum = 0;
    for (const VarlenSequence& s : sequences) {
      const auto q = static_cast<double>(s.q_len);
      sum += q * (static_cast<double>(s.kv_len) - (s.is_whole ? 0 : q / 2));
    }
    return sum;
  };
  double in_place = 0;
  double all = 0;
  for (const VarlenRank& rank : routing.ranks) {
    in_place += pairs(rank.in_place);
    all += pairs(rank.in_place) + pairs(rank.dispatched);
  }
  return all > 0 ? in_place / all : 1;
}

}  // namespace waybill
