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

/// Calls visit(held) for what the KV buffer of a rank must hold, in order.
template <class Visit>
void for_each_expected(const SendTable& table, const PlanIndex& index, std::int32_t rank,
                       const Visit& visit) {
  const bool per_query = index.plan->kv_layout == KvLayout::per_query;
  walk_kv(index, rank, [&](const KvStep& step) {
    for (std::int64_t p = step.new_first; p <= step.new_last; ++p) {
      // per_query: the number of the query's copy, among those that need the KV shard.
      const std::int64_t slot = per_query ? step.query - index.first_query[p] : -1;
      visit(Held{index.entry_of(index.shard(p), table), slot, p, step.query});
    }
  });
}

/// The same copy of the same shard. On a rank no other entry is equal to it.
bool agree(const Held& expected, std::int64_t entry, std::int64_t slot) {
  return expected.entry == entry && (expected.slot < 0 || expected.slot == slot);
}

/// Shards without rows that land on the same row may stand in any order.
void order_empty(const SendTable& table, std::vector<Held>& list) {
  const auto has_rows = [&](const Held& held) { return table.entries[held.entry].len > 0; };
  for (auto first = list.begin(); first != list.end();) {
    const auto last = std::find_if(first, list.end(), has_rows);
    std::sort(first, last, [](const Held& a, const Held& b) {
      return std::tie(a.entry, a.slot) < std::tie(b.entry, b.slot);
    });
    first = last == list.end() ? last : last + 1;
  }
}

/// How many to leave out on one side so that both agree again, within reach; or one on each.
std::pair<std::int64_t, std::int64_t> resume(std::span<const Held> expected,
                                             std::span<const Held> got) {
  constexpr std::int64_t reach = 16;
  if (expected.empty()) return {0, 1};
  if (got.empty()) return {1, 0};
  for (std::int64_t skip = 1; skip <= reach; ++skip) {
    const bool ahead =
        skip < std::ssize(expected) && agree(expected[skip], got[0].entry, got[0].slot);
    const bool behind =
        skip < std::ssize(got) && agree(expected[0], got[skip].entry, got[skip].slot);
    if (ahead && behind) return {1, 1};  // they changed places
    if (ahead) return {skip, 0};
    if (behind) return {0, skip};
  }
  return {1, 1};
}

/// Says where the buffer of a rank is not as the plan asks for.
[[gnu::cold]] void report(const SendTable& table, const PlanIndex& index, std::int32_t rank,
                          std::vector<Held> expected, std::vector<Held> got, Findings& findings) {
  const auto add = [&](FindingKind kind, const char* field, const Held& at, const std::string& is,
                       const std::string& wanted) {
    findings.add(kind, table.name, field, table.place(at.entry, at.slot), is, wanted);
  };
  const auto reader = [&](const Held& held) {
    return concat("the query of ", index.describe(held.query));
  };
  order_empty(table, expected);
  order_empty(table, got);
  for (std::span<const Held> e = expected, g = got;
       (!e.empty() || !g.empty()) && !findings.full();) {
    std::int64_t missing = 1, superfluous = 1;
    if (e.empty() || g.empty() || !agree(e[0], g[0].entry, g[0].slot)) {
      std::tie(missing, superfluous) = resume(e, g);
      if (missing == 1 && superfluous == 1 && e[0].entry == g[0].entry) {
        add(FindingKind::order, "dst_offset", g[0], concat("this copy for ", reader(e[0])),
            concat("copy ", e[0].slot));
      } else {
        for (const Held& held : e.first(missing))
          add(FindingKind::causality, "dst_rank", held, concat("no copy in place on rank ", rank),
              concat("one for ", reader(held)));
        for (const Held& held : g.first(superfluous))
          add(FindingKind::causality, "dst_rank", held, concat("a copy on rank ", rank),
              "none there: no query reads it at that position");
      }
    }
    e = e.subspan(missing);
    g = g.subspan(superfluous);
  }
}

}  // namespace

void check_causality(const SendTable& table, const Arrivals& arrivals, const PlanIndex& index,
                     Findings& findings) {
  for (std::int32_t r = 0; r < table.world_size && !findings.full(); ++r) {
    const std::span<const Arrival> arrived = arrivals.of(r);
    std::size_t t = 0;
    bool same = true;
    for_each_expected(table, index, r, [&](const Held& held) {
      same = same && t < arrived.size() && agree(held, arrived[t].entry, arrived[t].slot);
      ++t;
    });
    if (same && t == arrived.size()) [[likely]]
      continue;
    std::vector<Held> expected, got;
    for_each_expected(table, index, r, [&](const Held& held) { expected.push_back(held); });
    for (const Arrival& a : arrived) got.push_back({a.entry, a.slot, -1, -1});
    report(table, index, r, std::move(expected), std::move(got), findings);
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
