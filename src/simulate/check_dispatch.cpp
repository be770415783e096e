#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "check_tables.h"
#include "expected_layout.h"
#include "finding_list.h"
#include "identity_rows.h"
#include "waybill/core/error.h"
#include "waybill/simulate/check.h"
#include "waybill/simulate/orchestrate.h"

namespace waybill {
namespace {

using detail::ExpectedLayout;
using detail::FindingList;
using detail::RankBuffers;

/// Numbers of rows, of all ranks one after another.
using RowIds = std::vector<std::int64_t>;

/// Compares the rows [0, count) of one thing; reports the first wrong one and how many there are.
class RowCheck {
 public:
  RowCheck(FindingList& findings, const RankBuffers& origin, Finding place)
      : findings_(findings), origin_(origin), place_(std::move(place)) {}

  void expect(std::int64_t row, std::int64_t got, std::int64_t expected) {
    if (got == expected) return;
    if (num_wrong_++ > 0) return;
    place_.kind = got == detail::untouched_row        ? FindingKind::coverage
                  : got == detail::damaged_row        ? FindingKind::identity
                  : expected == detail::untouched_row ? FindingKind::bounds
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
    if (id == detail::untouched_row) return "nothing";
    if (id == detail::damaged_row) return "bytes of no row";
    const std::vector<std::int64_t>& first = origin_.first_row();
    const auto rank = std::ranges::upper_bound(first, id) - first.begin() - 1;
    return concat("row ", id - first[rank], " of rank ", rank);
  }

  FindingList& findings_;
  const RankBuffers& origin_;
  Finding place_;
  std::int64_t num_wrong_ = 0;
};

class DispatchChecker {
 public:
  DispatchChecker(const QkvPlan& plan, const QkvRouting& routing, const CheckOptions& options)
      : plan_(plan),
        routing_(routing),
        options_(options),
        expected_(detail::expect_layout(plan)),
        findings_(options.max_findings) {}

  DispatchCheck run() {
    begin_phase("tables");
    const bool readable = detail::check_attention(plan_, expected_, routing_.attention, findings_);
    end_phase(0);
    check_queries();
    check_keys_and_values(readable);
    if (options_.progress) options_.progress("done", num_phases, num_phases);
    for (const std::int64_t rows : expected_.q_rows) result_.q_rows += rows;
    for (const std::int64_t rows : expected_.home_rows) result_.kv_rows += rows;
    for (const std::int64_t rows : expected_.kv_rows) result_.kv_rows_attention += rows;
    result_.findings = findings_.take();
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

  /// Carries a table out, then checks its counts. False when it cannot be done.
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
    for (std::int64_t entry = 0; entry < metadata.num_entries(); ++entry) {
      rows += metadata.seq_len[entry] *
              (metadata.destination_end(entry) - metadata.destination_begin(entry));
    }
    const std::int64_t row_bytes = source.row_bytes();
    end_phase(rows * row_bytes);
    result_.bytes_moved += rows * row_bytes;
    result_.wire_bytes += detail::rows_over_the_wire(metadata) * row_bytes;
    detail::check_counts(table, metadata, findings_);
    return true;
  }

  RowIds identify(const RankBuffers& buffers, std::int64_t num_ids) {
    RowIds ids = detail::identify_rows(buffers, num_ids, options_.num_threads);
    result_.rows_checked += buffers.num_rows();
    result_.bytes_checked += buffers.num_rows() * buffers.row_bytes();
    return ids;
  }

  template <class Check>
  void check_ranks(const Check& check) {
    detail::check_ranks(plan_.world_size, options_.num_threads, findings_, check);
  }

  void check_queries() {
    RankBuffers home(expected_.home_rows, options_.q_row_bytes);
    RankBuffers attention(expected_.q_rows, options_.q_row_bytes);
    detail::write_identities(home, options_.num_threads);
    const bool forward = dispatch("fwd_q", "Q forward", routing_.fwd_q, home, attention);
    begin_phase("Q in the attention layout");
    if (forward) check_queries_arrived(home, attention);
    end_phase(attention.num_rows() * attention.row_bytes());
    RankBuffers back(expected_.home_rows, options_.q_row_bytes);
    const bool reverse = forward && dispatch("rev_q", "Q reverse", routing_.rev_q, attention, back);
    if (!reverse) return;
    begin_phase("Q back at home");
    check_queries_back(home, back);
    end_phase(back.num_rows() * back.row_bytes());
  }

  void check_queries_arrived(const RankBuffers& home, const RankBuffers& attention) {
    const RowIds ids = identify(attention, home.num_rows());
    check_ranks([&](std::int64_t r, FindingList& findings) {
      std::int64_t row = 0;
      for (std::int64_t i = expected_.rank_offsets[r]; i < expected_.rank_offsets[r + 1]; ++i) {
        const std::int32_t shard = expected_.received[i];
        RowCheck rows(findings, home, {{}, "fwd_q", "rows", r, shard, -1, "", ""});
        const std::int64_t first = attention.first_row()[r];
        for (std::int64_t k = 0; k < plan_.shard_len[shard]; ++k, ++row) {
          rows.expect(row, ids[first + row], expected_.home_begin[shard] + k);
        }
        rows.finish();
      }
    });
  }

  void check_queries_back(const RankBuffers& home, const RankBuffers& back) {
    const RowIds ids = identify(back, home.num_rows());
    check_ranks([&](std::int64_t w, FindingList& findings) {
      for (std::int64_t s = plan_.rank_shard_offsets[w]; s < plan_.rank_shard_offsets[w + 1]; ++s) {
        RowCheck rows(findings, home, {{}, "rev_q", "rows", w, s, -1, "", ""});
        const std::int64_t begin = expected_.home_begin[s];
        for (std::int64_t k = 0; k < plan_.shard_len[s]; ++k) {
          rows.expect(begin + k - home.first_row()[w], ids[begin + k], begin + k);
        }
        rows.finish();
      }
    });
  }

  void check_keys_and_values(bool attention_readable) {
    RankBuffers attention(expected_.kv_rows, options_.kv_row_bytes);
    {
      RankBuffers home(expected_.home_rows, options_.kv_row_bytes);
      detail::write_identities(home, options_.num_threads);
      if (!dispatch("fwd_kv", "KV forward", routing_.fwd_kv, home, attention)) return;
      begin_phase("KV contexts");
      const RowIds ids = identify(attention, home.num_rows());
      if (attention_readable) check_contexts(home, attention, ids);
      end_phase(attention.num_rows() * attention.row_bytes());
    }
    if (!detail::check_copies(plan_, expected_, routing_.fwd_kv, findings_)) return;
    // Gradients are new rows: each names the place in the attention layout that it comes from.
    detail::write_identities(attention, options_.num_threads);
    std::vector<std::int64_t> plane_rows;
    for (std::size_t w = 0; w < expected_.home_rows.size(); ++w) {
      plane_rows.push_back(expected_.num_planes[w] * expected_.home_rows[w]);
    }
    RankBuffers planes(plane_rows, options_.kv_row_bytes);
    if (!dispatch("rev_kv", "KV reverse", routing_.rev_kv, attention, planes)) return;
    begin_phase("KV planes");
    check_planes(attention, planes);
    end_phase(planes.num_rows() * planes.row_bytes());
  }

  void check_contexts(const RankBuffers& home, const RankBuffers& attention, const RowIds& ids) {
    std::vector<std::int64_t> context_rows(plan_.world_size);
    check_ranks([&](std::int64_t r, FindingList& findings) {
      std::vector<std::int64_t> readers(expected_.kv_rows[r] + 1);  // differences
      const std::span<const std::int64_t> rank_ids(ids.data() + attention.first_row()[r],
                                                   expected_.kv_rows[r]);
      for (std::int64_t i = expected_.rank_offsets[r]; i < expected_.rank_offsets[r + 1]; ++i) {
        const std::int32_t shard = expected_.received[i];
        const std::int64_t begin = routing_.attention.kv_begin[i];
        const std::int64_t rows = routing_.attention.kv_len[i];
        const std::int64_t limit = std::ssize(rank_ids);
        // A wrong length is a finding of check_attention already; here it must only be readable.
        if (begin < 0 || rows < 0 || rows > limit || begin > limit - rows) {
          findings.add({FindingKind::bounds, "attention", "kv_begin", r, shard, -1,
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
  void check_context(FindingList& findings, const RankBuffers& home, std::int64_t rank,
                     std::int32_t shard, std::span<const std::int64_t> ids) const {
    const auto doc = plan_.doc_shard_offsets[expected_.document[shard]];
    RowCheck rows(findings, home, {{}, "fwd_kv", "context", rank, shard, -1, "", ""});
    std::size_t row = 0;
    for (std::int32_t p = detail::first_needed(plan_, shard);
         p <= detail::last_needed(plan_, expected_, shard); ++p) {
      const std::size_t kv_shard = plan_.doc_shards[doc + p];
      for (std::int64_t k = 0; k < plan_.shard_len[kv_shard] && row < ids.size(); ++k, ++row) {
        rows.expect(static_cast<std::int64_t>(row), ids[row], expected_.home_begin[kv_shard] + k);
      }
    }
    rows.finish();
  }

  /// Every KV row is there for somebody; per_query for exactly one query.
  void check_readers(FindingList& findings, std::int64_t rank,
                     const std::vector<std::int64_t>& differences) const {
    std::int64_t readers = 0;
    for (std::size_t row = 0; row + 1 < differences.size(); ++row) {
      readers += differences[row];
      if (readers >= 1 && (readers == 1 || plan_.kv_layout == KvLayout::per_rank)) continue;
      findings.add({readers == 0 ? FindingKind::coverage : FindingKind::overlap, "attention",
                    "kv_begin", rank, -1, -1,
                    concat("row ", row, " is in the context of ", readers, " queries"),
                    plan_.kv_layout == KvLayout::per_rank ? "at least 1" : "1"});
      return;
    }
  }

  /// Plane c holds, for every shard with a copy c, the rows from where forward put that copy.
  void check_planes(const RankBuffers& attention, const RankBuffers& planes) {
    const RowIds ids = identify(planes, attention.num_rows());
    const SparseMetadata& forward = routing_.fwd_kv;
    check_ranks([&](std::int64_t w, FindingList& findings) {
      const std::int64_t num_rows = expected_.home_rows[w];
      std::int64_t shard_row = 0;
      for (std::int64_t s = plan_.rank_shard_offsets[w]; s < plan_.rank_shard_offsets[w + 1]; ++s) {
        const std::int64_t copies = forward.destination_end(s) - forward.destination_begin(s);
        for (std::int64_t c = 0; c < expected_.num_planes[w]; ++c) {
          RowCheck rows(findings, attention, {{}, "rev_kv", "planes", w, s, c, "", ""});
          std::int64_t from = detail::untouched_row;
          if (c < copies) {
            const std::size_t copy = forward.destination_begin(s) + c;
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
  FindingList findings_;
  DispatchCheck result_;
  Clock::time_point phase_start_;
  int phases_done_ = 0;
};

}  // namespace

DispatchCheck check_dispatch(const QkvPlan& plan, const QkvRouting& routing,
                             const CheckOptions& options) {
  const char* who = "check_dispatch";
  constexpr std::int64_t max_row_bytes = std::int64_t{1} << 30;
  const auto check_row_bytes = [&](const char* name, std::int64_t bytes) {
    require(8 <= bytes && bytes <= max_row_bytes, who, ": options.", name, " = ", bytes,
            ", expected 8..", max_row_bytes);
  };
  check_row_bytes("q_row_bytes", options.q_row_bytes);
  check_row_bytes("kv_row_bytes", options.kv_row_bytes);
  require(options.num_threads >= 0, who, ": options.num_threads = ", options.num_threads,
          ", expected >= 0");
  require(options.max_findings >= 1, who, ": options.max_findings = ", options.max_findings,
          ", expected >= 1");
  plan.check(who);
  return DispatchChecker(plan, routing, options).run();
}

}  // namespace waybill
