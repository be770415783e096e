#include <algorithm>
#include <tuple>

#include "checks.h"

namespace waybill::validation {
namespace {

/// A KV shard in a buffer, expected or there.
struct Held {
  std::int64_t entry;
  std::int64_t slot;   ///< copy; -1: any
  std::int64_t place;  ///< place of the KV shard in the plan; -1: unknown
  std::int64_t query;  ///< place of the first query that reads it
};

/// Compares the KV buffer of one rank with what the plan asks for.
class KvBuffer {
 public:
  KvBuffer(const SendTable& table, const Arrivals& arrivals, const PlanIndex& index,
           std::int32_t rank, Findings& findings)
      : table_(table),
        arrived_(arrivals.of(rank)),
        index_(index),
        rank_(rank),
        findings_(findings),
        per_query_(index.plan->kv_layout == KvLayout::per_query) {}

  /// True: shard by shard as expected.
  [[nodiscard]] bool matches() const {
    std::int64_t t = 0;
    bool same = true;
    walk_kv(index_, rank_, [&](const KvStep& step) {
      same = same && step.new_last - step.new_first < std::ssize(arrived_) - t;
      for (std::int64_t p = step.new_first; same && p <= step.new_last; ++p, ++t) {
        const Arrival& a = arrived_[t];
        same = entry_of(p) == a.entry && (!per_query_ || a.slot == slot_of(step, p));
      }
    });
    return same && t == std::ssize(arrived_);
  }

  /// Says where they differ. Shards without rows that land on the same row may stand in any order.
  [[gnu::cold]] void report() {
    std::vector<Held> expected;
    walk_kv(index_, rank_, [&](const KvStep& step) {
      for (std::int64_t p = step.new_first; p <= step.new_last; ++p) {
        expected.push_back({entry_of(p), per_query_ ? slot_of(step, p) : -1, p, step.query});
      }
    });
    std::vector<Held> got;
    for (const Arrival& a : arrived_) got.push_back({a.entry, a.slot, -1, -1});
    order_empty(expected);
    order_empty(got);
    compare(expected, got);
  }

 private:
  /// per_query: the number of the query's copy of the KV shard at a place, among those that need
  /// it.
  [[nodiscard]] std::int64_t slot_of(const KvStep& step, std::int64_t place) const {
    return step.query - index_.first_query[place];
  }

  [[nodiscard]] std::int64_t entry_of(std::int64_t place) const {
    return index_.entry_of(index_.shard(place), table_);
  }

  void order_empty(std::vector<Held>& list) const {
    const auto has_rows = [&](const Held& held) { return table_.entries[held.entry].len > 0; };
    const auto before = [](const Held& a, const Held& b) {
      return std::tie(a.entry, a.slot) < std::tie(b.entry, b.slot);
    };
    for (auto first = list.begin(); first != list.end();) {
      const auto last = std::find_if(first, list.end(), has_rows);
      std::sort(first, last, before);
      first = last == list.end() ? last : last + 1;
    }
  }

  void compare(const std::vector<Held>& expected, const std::vector<Held>& got) {
    std::int64_t e = 0;
    std::int64_t g = 0;
    while ((e < std::ssize(expected) || g < std::ssize(got)) && !findings_.full()) {
      if (agree(expected, e, got, g)) {
        ++e;
        ++g;
        continue;
      }
      const auto [missing, superfluous] = resume(expected, e, got, g);
      if (missing == 1 && superfluous == 1 && expected[e].entry == got[g].entry) {
        report_number(expected[e++], got[g++]);
        continue;
      }
      for (const std::int64_t end = e + missing; e < end; ++e) report_missing(expected[e]);
      for (const std::int64_t end = g + superfluous; g < end; ++g) {
        report_superfluous(got[g]);
      }
    }
  }

  /// The same copy of the same shard. On a rank no other entry is equal to it.
  [[nodiscard]] static bool agree(const std::vector<Held>& expected, std::int64_t e,
                                  const std::vector<Held>& got, std::int64_t g) {
    if (e >= std::ssize(expected) || g >= std::ssize(got)) return false;
    const Held& wanted = expected[e];
    return wanted.entry == got[g].entry && (wanted.slot < 0 || wanted.slot == got[g].slot);
  }

  /// How many to leave out on one side so that both agree again, within reach; or one on each.
  [[nodiscard]] static std::pair<std::int64_t, std::int64_t> resume(
      const std::vector<Held>& expected, std::int64_t e, const std::vector<Held>& got,
      std::int64_t g) {
    constexpr std::int64_t reach = 16;
    if (e == std::ssize(expected)) return {0, 1};
    if (g == std::ssize(got)) return {1, 0};
    for (std::int64_t skip = 1; skip <= reach; ++skip) {
      const bool ahead = agree(expected, e + skip, got, g);
      const bool behind = agree(expected, e, got, g + skip);
      if (ahead && behind) return {1, 1};  // they changed places
      if (ahead) return {skip, 0};
      if (behind) return {0, skip};
    }
    return {1, 1};
  }

  void report_number(const Held& expected, const Held& got) {
    findings_.add(FindingKind::order, table_.name, "dst_offset", table_.place(got.entry, got.slot),
                  concat("this copy for ", reader(expected)), concat("copy ", expected.slot));
  }

  void report_missing(const Held& held) {
    findings_.add(FindingKind::causality, table_.name, "dst_rank",
                  table_.place(held.entry, held.slot), concat("no copy in place on rank ", rank_),
                  concat("one for ", reader(held)));
  }

  void report_superfluous(const Held& held) {
    findings_.add(FindingKind::causality, table_.name, "dst_rank",
                  table_.place(held.entry, held.slot), concat("a copy on rank ", rank_),
                  "none there: no query reads it at that position");
  }

  [[nodiscard]] std::string reader(const Held& held) const {
    return concat("the query of ", index_.describe(held.query));
  }

  const SendTable& table_;
  std::span<const Arrival> arrived_;
  const PlanIndex& index_;
  std::int32_t rank_;
  Findings& findings_;
  bool per_query_;
};

}  // namespace

void check_causality(const SendTable& table, const Arrivals& arrivals, const PlanIndex& index,
                     Findings& findings) {
  for (std::int32_t r = 0; r < table.world_size && !findings.full(); ++r) {
    KvBuffer buffer(table, arrivals, index, r, findings);
    if (!buffer.matches()) buffer.report();
  }
}

void check_copy_order(const SendTable& table, const PlanIndex& index, Findings& findings) {
  const QkvPlan& plan = *index.plan;
  std::vector<std::int64_t> last(plan.world_size, -1);  // place of the latest query of a rank
  for (std::int64_t d = 0; d < plan.num_documents() && !findings.full(); ++d) {
    const std::int64_t first = plan.doc_shard_offsets[d];
    const std::int64_t end = plan.doc_shard_offsets[d + 1];
    for (std::int64_t p = first; p < end; ++p) last[plan.q_dst[index.shard(p)]] = p;
    for (std::int64_t p = first; p < end; ++p) {
      const std::int64_t entry = index.entry_of(index.shard(p), table);
      std::int64_t before = end;
      for (std::int64_t c = table.destination_begin(entry); c < table.destination_end(entry); ++c) {
        const std::int64_t query = last[table.dst_rank[c]];
        if (query < first) continue;  // a copy that nobody reads: not a matter of order
        if (query >= before) [[unlikely]] {
          findings.add(FindingKind::order, table.name, "dst_rank",
                       table.place(entry, table.slot(entry, c)), table.dst_rank[c],
                       "a rank whose last query comes before that of the copy before");
        }
        before = query;
      }
    }
  }
}

}  // namespace waybill::validation
