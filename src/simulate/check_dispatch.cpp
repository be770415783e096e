#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "core/checks.h"
#include "core/parallel_for.h"
#include "routing/homes.h"
#include "routing/validate/findings.h"
#include "waybill/core/error.h"
#include "waybill/core/host_tensor.h"
#include "waybill/simulate/check.h"
#include "waybill/simulate/orchestrate.h"

namespace waybill {
namespace {

using validation::Findings;

// Numbers of rows that are not one of those written.
constexpr std::int64_t damaged_row = -1;
constexpr std::int64_t untouched_row = -2;

constexpr std::int64_t word_bytes = 8;
constexpr std::int64_t work_item_bytes = std::int64_t{1} << 20;
constexpr std::uint64_t word_step = 0x9E3779B97F4A7C15U;  // odd: all words of a row differ

// The finalizer of MurmurHash3 (Appleby, public domain): a bijection that maps 0 to 0.
constexpr std::uint64_t factor_1 = 0xFF51AFD7ED558CCDU;
constexpr std::uint64_t factor_2 = 0xC4CEB9FE1A85EC53U;

constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 33)) * factor_1;
  x = (x ^ (x >> 33)) * factor_2;
  return x ^ (x >> 33);
}

/// The inverse of an odd number modulo 2^64, by Newton's iteration.
constexpr std::uint64_t inverse(std::uint64_t odd) {
  std::uint64_t x = odd;
  for (int i = 0; i < 6; ++i) x *= 2 - odd * x;
  return x;
}

constexpr std::uint64_t unmix(std::uint64_t x) {
  x = (x ^ (x >> 33)) * inverse(factor_2);
  x = (x ^ (x >> 33)) * inverse(factor_1);
  return x ^ (x >> 33);
}
static_assert(mix(0) == 0 && unmix(mix(0x0123456789ABCDEFU)) == 0x0123456789ABCDEFU);

/// First word of row `id`; never 0.
std::uint64_t key_of(std::int64_t id) { return mix(static_cast<std::uint64_t>(id) + 1); }

void write_row(std::byte* row, std::int64_t row_bytes, std::int64_t id) {
  std::uint64_t word = key_of(id);
  std::int64_t at = 0;
  for (; at + word_bytes <= row_bytes; at += word_bytes, word += word_step) {
    std::memcpy(row + at, &word, sizeof(word));
  }
  std::memcpy(row + at, &word, row_bytes - at);
}

bool holds_pattern(const std::byte* row, std::int64_t row_bytes, std::uint64_t key) {
  std::uint64_t word = key;
  std::uint64_t differing = 0;
  std::int64_t at = 0;
  for (; at + word_bytes <= row_bytes; at += word_bytes, word += word_step) {
    std::uint64_t got = 0;
    std::memcpy(&got, row + at, sizeof(got));
    differing |= got ^ word;
  }
  return differing == 0 && std::memcmp(row + at, &word, row_bytes - at) == 0;
}

bool all_zero(const std::byte* row, std::int64_t row_bytes) {
  return row[0] == std::byte{0} && std::memcmp(row, row + 1, row_bytes - 1) == 0;
}

std::int64_t identify_row(const std::byte* row, std::int64_t row_bytes, std::int64_t num_ids) {
  std::uint64_t key = 0;
  std::memcpy(&key, row, sizeof(key));
  if (key == 0) return all_zero(row, row_bytes) ? untouched_row : damaged_row;
  const std::uint64_t id = unmix(key) - 1;
  if (id >= static_cast<std::uint64_t>(num_ids)) return damaged_row;
  return holds_pattern(row, row_bytes, key) ? static_cast<std::int64_t>(id) : damaged_row;
}

/// Rows of bytes, one tensor per rank, numbered in the order of the ranks. Zeros at first.
class RankBuffers {
 public:
  /// @param rows [W]
  RankBuffers(const std::vector<std::int64_t>& rows, std::int64_t row_bytes, int num_threads)
      : row_bytes_(row_bytes), num_threads_(num_threads), first_row_{0} {
    for (const std::int64_t num_rows : rows) {
      first_row_.push_back(first_row_.back() + num_rows);
      tensors_.emplace_back(DType::uint8, Shape{num_rows, row_bytes});
    }
  }

  [[nodiscard]] std::int64_t num_rows() const { return first_row_.back(); }
  [[nodiscard]] std::int64_t row_bytes() const { return row_bytes_; }
  [[nodiscard]] std::int64_t num_bytes() const { return num_rows() * row_bytes_; }
  /// [W + 1]: the number of a rank's first row.
  [[nodiscard]] const std::vector<std::int64_t>& first_row() const { return first_row_; }

  [[nodiscard]] std::vector<ConstTensorView> sources() const {
    std::vector<ConstTensorView> views;
    for (const HostTensor& tensor : tensors_) views.push_back(tensor.view());
    return views;
  }
  [[nodiscard]] std::vector<TensorView> outputs() {
    std::vector<TensorView> views;
    for (HostTensor& tensor : tensors_) views.push_back(tensor.view());
    return views;
  }

  /// Gives every row a pattern that names its number.
  void write_identities() {
    for_each_row([&](std::int64_t rank, std::int64_t row, std::int64_t id) {
      write_row(tensors_[rank].bytes().data() + row * row_bytes_, row_bytes_, id);
    });
  }

  /// Reads every byte: the number in each row's pattern if it is intact and below `num_ids`, else
  /// damaged_row; untouched_row when all bytes are 0.
  [[nodiscard]] std::vector<std::int64_t> identify_rows(std::int64_t num_ids) const {
    std::vector<std::int64_t> ids(num_rows());
    for_each_row([&](std::int64_t rank, std::int64_t row, std::int64_t i) {
      ids[i] = identify_row(tensors_[rank].bytes().data() + row * row_bytes_, row_bytes_, num_ids);
    });
    return ids;
  }

 private:
  /// Calls body(rank, row in the rank, number of the row) for every row.
  template <class Body>
  void for_each_row(const Body& body) const {
    const std::int64_t grain = std::max<std::int64_t>(1, work_item_bytes / row_bytes_);
    parallel_for(num_rows(), grain, num_threads_, [&](std::int64_t begin, std::int64_t end) {
      auto rank = std::ranges::upper_bound(first_row_, begin) - first_row_.begin() - 1;
      for (std::int64_t i = begin; i < end; ++i) {
        while (i >= first_row_[rank + 1]) ++rank;
        body(rank, i - first_row_[rank], i);
      }
    });
  }

  std::int64_t row_bytes_;
  int num_threads_;
  std::vector<std::int64_t> first_row_;
  std::vector<HostTensor> tensors_;
};

/// Where rows must lie, derived from a plan alone and by other means than routing and validate.
/// N = shards, W = ranks. Tokens.
struct ExpectedLayout {
  std::vector<std::int64_t> home_rows;     ///< [W]: rows in the MLP layout
  std::vector<std::int64_t> home_begin;    ///< [N]: row, all ranks one after another
  std::vector<std::int64_t> first_kv;      ///< [N]: the context is doc_shards[first..end)
  std::vector<std::int64_t> end_kv;        ///< [N]
  std::vector<std::int64_t> rank_offsets;  ///< [W + 1]: into received
  std::vector<std::int32_t> received;      ///< [N]: query shards by attention rank
  std::vector<std::int64_t> q_rows;        ///< [W]
  std::vector<std::int64_t> kv_rows;       ///< [W]
  std::vector<std::int64_t> num_planes;    ///< [W]: most destinations of a KV shard
};

void place_rows(const QkvPlan& plan, ExpectedLayout& layout) {
  std::int64_t row = 0;
  layout.q_rows.assign(plan.world_size, 0);
  std::vector<std::vector<std::int32_t>> lists(plan.world_size);
  for (std::int32_t w = 0; w < plan.world_size; ++w) {
    const std::int64_t first_row = row;
    for (auto s = plan.rank_shard_offsets[w]; s < plan.rank_shard_offsets[w + 1]; ++s) {
      layout.home_begin.push_back(row);
      row += plan.shard_len[s];
      layout.q_rows[plan.q_dst[s]] += plan.shard_len[s];
      lists[plan.q_dst[s]].push_back(static_cast<std::int32_t>(s));
    }
    layout.home_rows.push_back(row - first_row);
  }
  layout.rank_offsets.push_back(0);
  for (const std::vector<std::int32_t>& list : lists) {
    layout.received.insert(layout.received.end(), list.begin(), list.end());
    layout.rank_offsets.push_back(std::ssize(layout.received));
  }
}

/// Walks along the queries of each document: what its ranks have so far, and what each query adds.
void place_contexts(const QkvPlan& plan, ExpectedLayout& layout) {
  std::vector<std::int64_t> next(plan.world_size);          // by rank: first place that it lacks
  std::vector<std::int64_t> copies(plan.num_shards() + 1);  // by place: differences
  std::vector<std::int64_t> rows_before{0};                 // by place
  for (const std::int32_t shard : plan.doc_shards)
    rows_before.push_back(rows_before.back() + plan.shard_len[shard]);
  for (std::int64_t doc = 0; doc < plan.num_documents(); ++doc) {
    const std::int64_t first = plan.doc_shard_offsets[doc];
    const std::int64_t last = plan.doc_shard_offsets[doc + 1];
    for (std::int64_t p = first; p < last; ++p) {
      const std::int32_t shard = plan.doc_shards[p];
      const std::int64_t begin = first + plan.first_needed(shard);
      const std::int64_t end = first + plan.end_needed(shard, static_cast<std::int32_t>(p - first));
      layout.first_kv[shard] = begin;
      layout.end_kv[shard] = end;
      // per_rank: what an earlier query of the rank brought is there already.
      const std::int32_t rank = plan.q_dst[shard];
      const bool is_shared = plan.kv_layout == KvLayout::per_rank;
      const std::int64_t from = is_shared ? std::max(begin, next[rank]) : begin;
      next[rank] = end;
      layout.kv_rows[rank] += rows_before[end] - rows_before[from];
      ++copies[from];  // nothing where from is end
      --copies[end];
    }
  }
  std::partial_sum(copies.begin(), copies.end(), copies.begin());
  std::vector<std::int64_t> destinations(plan.num_shards());
  for (std::int64_t p = 0; p < plan.num_shards(); ++p) destinations[plan.doc_shards[p]] = copies[p];
  for (std::int32_t w = 0; w < plan.world_size; ++w) {
    for (auto s = plan.rank_shard_offsets[w]; s < plan.rank_shard_offsets[w + 1]; ++s)
      layout.num_planes[w] = std::max(layout.num_planes[w], destinations[s]);
  }
}

/// @param plan one that passes QkvPlan::check
ExpectedLayout expect_layout(const QkvPlan& plan) {
  ExpectedLayout layout;
  place_rows(plan, layout);
  layout.first_kv.resize(plan.num_shards());
  layout.end_kv.resize(plan.num_shards());
  layout.kv_rows.assign(plan.world_size, 0);
  layout.num_planes.assign(plan.world_size, 0);
  place_contexts(plan, layout);
  return layout;
}

/// Numbers of rows, of all ranks one after another.
using RowIds = std::vector<std::int64_t>;

/// Compares the rows [0, count) of one thing; reports the first wrong one and how many there are.
class RowCheck {
 public:
  RowCheck(Findings& findings, const RankBuffers& origin, Finding place)
      : findings_(findings), origin_(origin), place_(std::move(place)) {}

  void expect(std::int64_t row, std::int64_t got, std::int64_t expected) {
    if (got == expected) return;
    if (num_wrong_++ > 0) return;
    place_.kind = got == untouched_row        ? FindingKind::coverage
                  : got == damaged_row        ? FindingKind::identity
                  : expected == untouched_row ? FindingKind::bounds
                                              : FindingKind::order;
    place_.got = concat("row ", row, " holds ", text(got));
    place_.expected = text(expected);
  }

  void finish() {
    if (num_wrong_ == 0) return;
    if (num_wrong_ > 1) place_.got += concat(" (and ", num_wrong_ - 1, " more rows are wrong)");
    findings_.add(std::move(place_));
  }

 private:
  [[nodiscard]] std::string text(std::int64_t id) const {
    if (id == untouched_row) return "nothing";
    if (id == damaged_row) return "bytes of no row";
    const std::vector<std::int64_t>& first = origin_.first_row();
    const auto rank = std::ranges::upper_bound(first, id) - first.begin() - 1;
    return concat("row ", id - first[rank], " of rank ", rank);
  }

  Findings& findings_;
  const RankBuffers& origin_;
  Finding place_;
  std::int64_t num_wrong_ = 0;
};

/// The rows of one thing, numbered from `row`, are those from `first` on.
void expect_rows(Findings& findings, const RankBuffers& origin, Finding place, std::int64_t row,
                 std::span<const std::int64_t> ids, std::int64_t first) {
  RowCheck rows(findings, origin, std::move(place));
  for (const std::int64_t id : ids) rows.expect(row++, id, first++);
  rows.finish();
}

class DispatchChecker {
 public:
  DispatchChecker(const QkvPlan& plan, const QkvRouting& routing, const CheckOptions& options)
      : plan_(plan),
        routing_(routing),
        options_(options),
        expected_(expect_layout(plan)),
        findings_(options.max_findings) {}

  DispatchCheck run() {
    check_queries();
    check_keys_and_values();
    begin_phase("tables");
    findings_.append(validate(plan_, routing_, {.max_findings = options_.max_findings}));
    end_phase(0);
    if (options_.progress) options_.progress("done", num_phases, num_phases);
    for (const std::int64_t rows : expected_.q_rows) result_.q_rows += rows;
    for (const std::int64_t rows : expected_.home_rows) result_.kv_rows += rows;
    for (const std::int64_t rows : expected_.kv_rows) result_.kv_rows_attention += rows;
    result_.findings = std::move(findings_).take();
    return std::move(result_);
  }

 private:
  static constexpr int num_phases = 9;
  using Clock = std::chrono::steady_clock;

  void begin_phase(const char* name) {
    result_.phases.push_back({name, 0, 0});
    if (options_.progress)
      options_.progress(name, std::min(phases_done_++, num_phases), num_phases);
    phase_start_ = Clock::now();
  }

  void end_phase(std::int64_t bytes) {
    CheckPhase& phase = result_.phases.back();
    phase.seconds = std::chrono::duration<double>(Clock::now() - phase_start_).count();
    phase.bytes = bytes;
  }

  /// Carries a table out. False when it cannot be done.
  bool dispatch(const char* table, const char* phase, const SparseMetadata& metadata,
                const RankBuffers& source, RankBuffers& output) {
    begin_phase(phase);
    try {
      const auto sources = source.sources();
      const auto outputs = output.outputs();
      simulate_dispatch(sources, outputs, metadata, {Overlap::reject, options_.num_threads});
    } catch (const InvalidArgument& error) {
      findings_.add({FindingKind::bounds, table, "dispatch", -1, -1, -1, error.what(),
                     "a dispatch that can be carried out"});
      end_phase(0);
      return false;
    }
    std::int64_t rows = 0;
    std::int64_t wire_rows = 0;  // that leave their rank
    detail::for_each_entry(metadata, [&](std::int32_t src, std::int64_t, std::int64_t entry) {
      for (auto c = metadata.destination_begin(entry); c < metadata.destination_end(entry); ++c) {
        rows += metadata.seq_len[entry];
        if (metadata.dst_rank[c] != src) wire_rows += metadata.seq_len[entry];
      }
    });
    end_phase(rows * source.row_bytes());
    result_.bytes_moved += rows * source.row_bytes();
    result_.wire_bytes += wire_rows * source.row_bytes();
    return true;
  }

  RowIds identify(const RankBuffers& buffers, std::int64_t num_ids) {
    result_.rows_checked += buffers.num_rows();
    result_.bytes_checked += buffers.num_bytes();
    return buffers.identify_rows(num_ids);
  }

  /// Calls check(rank, findings) for all ranks in parallel; findings come in the order of ranks.
  template <class Check>
  void check_ranks(const Check& check) {
    std::vector<Findings> lists(plan_.world_size, Findings(options_.max_findings));
    parallel_for(plan_.world_size, 1, options_.num_threads,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t r = begin; r < end; ++r) check(r, lists[r]);
                 });
    for (Findings& list : lists) findings_.append(std::move(list).take());
  }

  [[nodiscard]] RankBuffers make_buffers(const std::vector<std::int64_t>& rows,
                                         std::int64_t row_bytes) const {
    return {rows, row_bytes, options_.num_threads};
  }

  void check_queries() {
    RankBuffers home = make_buffers(expected_.home_rows, options_.q_row_bytes);
    RankBuffers attention = make_buffers(expected_.q_rows, options_.q_row_bytes);
    home.write_identities();
    const bool forward = dispatch("fwd_q", "Q forward", routing_.fwd_q, home, attention);
    begin_phase("Q in the attention layout");
    if (forward) check_queries_arrived(home, attention);
    end_phase(attention.num_bytes());
    RankBuffers back = make_buffers(expected_.home_rows, options_.q_row_bytes);
    const bool reverse = forward && dispatch("rev_q", "Q reverse", routing_.rev_q, attention, back);
    if (!reverse) return;
    begin_phase("Q back at home");
    check_queries_back(home, back);
    end_phase(back.num_bytes());
  }

  void check_queries_arrived(const RankBuffers& home, const RankBuffers& attention) {
    const RowIds ids = identify(attention, home.num_rows());
    check_ranks([&](std::int64_t r, Findings& findings) {
      std::int64_t row = 0;
      for (std::int64_t i = expected_.rank_offsets[r]; i < expected_.rank_offsets[r + 1]; ++i) {
        const std::int32_t shard = expected_.received[i];
        const std::int64_t len = plan_.shard_len[shard];
        expect_rows(findings, home, {{}, "fwd_q", "rows", r, shard, -1, "", ""}, row,
                    std::span(ids).subspan(attention.first_row()[r] + row, len),
                    expected_.home_begin[shard]);
        row += len;
      }
    });
  }

  void check_queries_back(const RankBuffers& home, const RankBuffers& back) {
    const RowIds ids = identify(back, home.num_rows());
    check_ranks([&](std::int64_t w, Findings& findings) {
      for (std::int64_t s = plan_.rank_shard_offsets[w]; s < plan_.rank_shard_offsets[w + 1]; ++s) {
        const std::int64_t begin = expected_.home_begin[s];
        expect_rows(findings, home, {{}, "rev_q", "rows", w, s, -1, "", ""},
                    begin - home.first_row()[w], std::span(ids).subspan(begin, plan_.shard_len[s]),
                    begin);
      }
    });
  }

  /// Whether the contexts in the attention layout can be followed.
  [[nodiscard]] bool is_readable(const SparseAttnLayout& attention) const {
    return attention.rank_offsets == expected_.rank_offsets &&
           std::ssize(attention.kv_row) == plan_.num_shards() &&
           std::ssize(attention.kv_len) == plan_.num_shards();
  }

  void check_keys_and_values() {
    RankBuffers attention = make_buffers(expected_.kv_rows, options_.kv_row_bytes);
    {
      RankBuffers home = make_buffers(expected_.home_rows, options_.kv_row_bytes);
      home.write_identities();
      if (!dispatch("fwd_kv", "KV forward", routing_.fwd_kv, home, attention)) return;
      begin_phase("KV contexts");
      const RowIds ids = identify(attention, home.num_rows());
      if (is_readable(routing_.attention)) check_contexts(home, attention, ids);
      end_phase(attention.num_bytes());
    }
    if (routing_.fwd_kv.rank_offsets != plan_.rank_shard_offsets) return;
    // Gradients are new rows: each names the place in the attention layout that it comes from.
    attention.write_identities();
    std::vector<std::int64_t> plane_rows;
    for (std::size_t w = 0; w < expected_.home_rows.size(); ++w) {
      plane_rows.push_back(expected_.num_planes[w] * expected_.home_rows[w]);
    }
    RankBuffers planes = make_buffers(plane_rows, options_.kv_row_bytes);
    if (!dispatch("rev_kv", "KV reverse", routing_.rev_kv, attention, planes)) return;
    begin_phase("KV planes");
    check_planes(attention, planes);
    end_phase(planes.num_bytes());
  }

  void check_contexts(const RankBuffers& home, const RankBuffers& attention, const RowIds& ids) {
    std::vector<std::int64_t> context_rows(plan_.world_size);
    check_ranks([&](std::int64_t r, Findings& findings) {
      std::vector<std::int64_t> readers(expected_.kv_rows[r] + 1);  // differences
      const std::span<const std::int64_t> rank_ids(ids.data() + attention.first_row()[r],
                                                   expected_.kv_rows[r]);
      for (std::int64_t i = expected_.rank_offsets[r]; i < expected_.rank_offsets[r + 1]; ++i) {
        const std::int32_t shard = expected_.received[i];
        const std::int64_t begin = routing_.attention.kv_row[i];
        const std::int64_t rows = routing_.attention.kv_len[i];
        const std::int64_t limit = std::ssize(rank_ids);
        if (begin < 0 || rows < 0 || rows > limit || begin > limit - rows) {
          findings.add({FindingKind::bounds, "attention", "kv_row", r, shard, -1,
                        concat("rows from ", begin, ", ", rows, " of them"),
                        concat("rows within 0..", limit)});
          continue;
        }
        ++readers[begin];
        --readers[begin + rows];
        check_context(findings, home, r, shard, rank_ids.subspan(begin, rows));
        context_rows[r] += rows;
      }
      check_readers(findings, r, readers);
    });
    for (const std::int64_t rows : context_rows) result_.context_rows_checked += rows;
    result_.queries_checked += plan_.num_shards();
  }

  /// The context of one query shard is its document's rows, from the first it needs to the
  /// last.
  void check_context(Findings& findings, const RankBuffers& home, std::int64_t rank,
                     std::int32_t shard, std::span<const std::int64_t> ids) const {
    RowCheck rows(findings, home, {{}, "fwd_kv", "context", rank, shard, -1, "", ""});
    std::int64_t row = 0;
    for (std::int64_t p = expected_.first_kv[shard]; p < expected_.end_kv[shard]; ++p) {
      const std::int32_t kv_shard = plan_.doc_shards[p];
      for (std::int64_t k = 0; k < plan_.shard_len[kv_shard] && row < std::ssize(ids); ++k, ++row)
        rows.expect(row, ids[row], expected_.home_begin[kv_shard] + k);
    }
    rows.finish();
  }

  /// Every KV row is there for somebody; per_query for exactly one query.
  void check_readers(Findings& findings, std::int64_t rank,
                     const std::vector<std::int64_t>& differences) const {
    std::int64_t readers = 0;
    for (std::size_t row = 0; row + 1 < differences.size(); ++row) {
      readers += differences[row];
      if (readers >= 1 && (readers == 1 || plan_.kv_layout == KvLayout::per_rank)) continue;
      findings.add({readers == 0 ? FindingKind::coverage : FindingKind::overlap, "attention",
                    "kv_row", rank, -1, -1,
                    concat("row ", row, " is in the context of ", readers, " queries"),
                    plan_.kv_layout == KvLayout::per_rank ? "at least 1" : "1"});
      return;
    }
  }

  /// Plane c holds, for every shard with a copy c, the rows from where forward put that copy.
  void check_planes(const RankBuffers& attention, const RankBuffers& planes) {
    const RowIds ids = identify(planes, attention.num_rows());
    const SparseMetadata& forward = routing_.fwd_kv;
    check_ranks([&](std::int64_t w, Findings& findings) {
      const std::int64_t num_rows = expected_.home_rows[w];
      std::int64_t shard_row = 0;
      for (std::int64_t s = plan_.rank_shard_offsets[w]; s < plan_.rank_shard_offsets[w + 1]; ++s) {
        const std::int64_t copies = forward.destination_end(s) - forward.destination_begin(s);
        for (std::int64_t c = 0; c < expected_.num_planes[w]; ++c) {
          RowCheck rows(findings, attention, {{}, "rev_kv", "planes", w, s, c, "", ""});
          std::int64_t from = untouched_row;
          if (c < copies) {
            const std::int64_t copy = forward.destination_begin(s) + c;
            from = attention.first_row()[forward.dst_rank[copy]] + forward.dst_offset[copy];
          }
          for (std::int64_t k = 0; k < plan_.shard_len[s]; ++k) {
            const std::int64_t row = c * num_rows + shard_row + k;
            rows.expect(row, ids[planes.first_row()[w] + row], c < copies ? from + k : from);
          }
          rows.finish();
        }
        shard_row += plan_.shard_len[s];
      }
    });
  }

  const QkvPlan& plan_;
  const QkvRouting& routing_;
  const CheckOptions& options_;
  const ExpectedLayout expected_;
  Findings findings_;
  DispatchCheck result_;
  Clock::time_point phase_start_;
  int phases_done_ = 0;
};

}  // namespace

DispatchCheck check_dispatch(const QkvPlan& plan, const QkvRouting& routing,
                             const CheckOptions& options) {
  const char* who = "check_dispatch";
  constexpr std::int64_t max_row_bytes = std::int64_t{1} << 30;
  detail::check_range(who, "options.q_row_bytes", options.q_row_bytes, 8, max_row_bytes);
  detail::check_range(who, "options.kv_row_bytes", options.kv_row_bytes, 8, max_row_bytes);
  detail::check_at_least(who, "options.num_threads", options.num_threads, 0);
  detail::check_at_least(who, "options.max_findings", options.max_findings, 1);
  plan.check(who);
  return DispatchChecker(plan, routing, options).run();
}

QkvDispatchTest test_qkv_dispatch(const QkvDispatch& dispatch,
                                  const QkvDispatchTestOptions& options) {
  const char* who = "test_qkv_dispatch";
  require(options.hidden_q >= 1 && options.hidden_k >= 1, who,
          ": options.hidden_q = ", options.hidden_q, ", hidden_k = ", options.hidden_k,
          ", expected >= 1");
  detail::check_at_least(who, "options.num_threads", options.num_threads, 0);
  detail::check_at_least(who, "options.max_findings", options.max_findings, 1);
  dispatch.plan.check(who);
  QkvDispatchTest result;
  result.findings =
      validate(dispatch.plan, dispatch.metadata, {.max_findings = options.max_findings});
  if (!result.passed()) return result;
  constexpr std::int64_t element_bytes = 4;
  const auto row_bytes = [](std::int64_t hidden) {
    return std::max<std::int64_t>(8, hidden * element_bytes);
  };
  const QkvRouting routing = to_sparse(dispatch.plan, dispatch.metadata);
  DispatchCheck check = check_dispatch(dispatch.plan, routing,
                                       {.q_row_bytes = row_bytes(options.hidden_q),
                                        .kv_row_bytes = row_bytes(options.hidden_k),
                                        .num_threads = options.num_threads,
                                        .max_findings = options.max_findings});
  result.findings = std::move(check.findings);
  result.elements_compared = check.bytes_checked / element_bytes;
  return result;
}

QkvDispatchTest test_qkv_dispatch(const QkvDispatchTestOptions& options) {
  return test_qkv_dispatch(
      create_qkv_dispatch(options.world_size, options.total_seq_len, options.num_seqs,
                          options.max_cp_degree, options.seed),
      options);
}

}  // namespace waybill
