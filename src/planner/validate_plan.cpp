#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/node_routes.h"
#include "routing/homes.h"
#include "routing/validate/findings.h"
#include "waybill/core/error.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

using validation::Findings;

constexpr const char* table_name = "attention_plan";

void compare(const char* field, std::int64_t rank, std::int64_t got, std::int64_t expected,
             Findings& findings) {
  if (got != expected)
    findings.add(FindingKind::count, table_name, field, {.rank = rank}, got, expected);
}

void compare_links(const char* field, const std::vector<LinkBytes>& got,
                   const std::vector<LinkBytes>& expected, Findings& findings) {
  for (std::size_t r = 0; r < expected.size() && !findings.full(); ++r) {
    for (const detail::LinkField& link : detail::link_fields) {
      compare(concat(field, ".", link.name).c_str(), static_cast<std::int64_t>(r),
              got[r].*link.bytes, expected[r].*link.bytes, findings);
    }
  }
}

// Numbers of an untrusted plan may be absurd; then they only have to differ.
std::int64_t add_wrapping(std::int64_t sum, std::int64_t number) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(sum) +
                                   static_cast<std::uint64_t>(number));
}

// By other code than the planner's, which is what is checked.
void count_rows(std::vector<LinkBytes>& links, std::int32_t src, std::int32_t dst,
                std::int64_t num_bytes, std::int32_t ranks_per_node) {
  if (src == dst) return;
  const bool is_near = src / ranks_per_node == dst / ranks_per_node;
  const auto add = [&](std::int64_t& sum) { sum = add_wrapping(sum, num_bytes); };
  add(is_near ? links[src].nvlink_out : links[src].network_out);
  add(is_near ? links[dst].nvlink_in : links[dst].network_in);
}

// Adds what a forward table moves; `received`: rows that come, local ones included.
void count_table(const SparseMetadata& table, std::int64_t row_bytes, std::int32_t ranks_per_node,
                 std::vector<LinkBytes>& links, std::vector<std::int64_t>& received) {
  detail::for_each_entry(table, [&](std::int32_t src, std::int64_t, std::int64_t n) {
    const std::int64_t rows = table.seq_len[n];
    for (std::int64_t c = table.destination_begin(n); c < table.destination_end(n); ++c) {
      const std::int32_t dst = table.dst_rank[c];
      received[dst] += rows;
      count_rows(links, src, dst, rows * row_bytes, ranks_per_node);
    }
  });
}

std::int64_t tokens_of(const QkvPlan& plan, std::int64_t document) {
  std::int64_t tokens = 0;
  for (const std::int32_t shard : detail::shards_of(plan, document))
    tokens += plan.shard_len[shard];
  return tokens;
}

// Work by the mask, which is tested query by query.
std::vector<std::int64_t> count_work(const AttentionPlan& plan) {
  const QkvPlan& qkv = plan.plan;
  std::vector<std::int64_t> work(qkv.world_size);
  std::int64_t doc_len = 0;
  detail::for_each_place(
      qkv, [&](std::int64_t d, std::int32_t place, std::int64_t token, std::int32_t n) {
        if (place == 0) doc_len = tokens_of(qkv, d);
        const std::int64_t len = qkv.shard_len[n];
        const std::int64_t pairs = plan.options.mask_of(d).pairs(token, token + len, doc_len);
        const HardwareFacts& facts = plan.options.hardware;
        std::int64_t& sum = work[qkv.q_dst[n]];
        sum = add_wrapping(sum, pairs);
        sum = add_wrapping(sum, facts.row_pairs * len + (len > 0 ? facts.shard_pairs : 0));
      });
  return work;
}

// Whether every range holds the keys that the mask shows, and none of another chunk or after the
// prefix of a document. Either all queries of a shard meet later keys, or none does.
bool has_ranges_of(const PlannerOptions& options, const QkvPlan& plan) {
  std::vector<std::int64_t> ends;
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const auto shards = detail::shards_of(plan, d);
    const AttentionMask mask = options.mask_of(d);
    ends.assign(1, 0);
    for (const std::int32_t shard : shards) ends.push_back(ends.back() + plan.shard_len[shard]);
    for (std::size_t p = 0; p + 1 < ends.size(); ++p) {
      if (ends[p] == ends[p + 1]) continue;
      const std::int32_t shard = shards[p];
      const TokenRange keys = mask.keys(ends[p], ends[p + 1], ends.back());
      const auto end = plan.end_needed(shard, static_cast<std::int32_t>(p));
      const TokenRange given{ends[plan.first_needed(shard)], ends[end]};
      if (given.begin > keys.begin || given.end < keys.end) return false;
      const TokenRange chunk = mask.chunk_of(ends[p], ends.back());
      if (given.begin < chunk.begin || given.end > chunk.end) return false;
      const bool ahead = mask.looks_ahead_at(ends[p]);
      if (ahead && given.end != keys.end) return false;
      if (ahead == plan.is_causal(shard) || ahead != mask.looks_ahead_at(ends[p + 1] - 1))
        return false;
    }
  }
  return true;
}

bool check_sizes(const AttentionPlan& plan, Findings& findings) {
  const auto world_size = static_cast<std::int64_t>(plan.plan.world_size);
  const auto size = [&](const char* field, std::int64_t got, std::int64_t expected) {
    if (got != expected)
      findings.add(FindingKind::shape, table_name, field, {}, got, concat(expected, " entries"));
    return got == expected;
  };
  if (!plan.options.prefixes.empty() &&
      !size("options.prefixes", std::ssize(plan.options.prefixes), plan.plan.num_documents()))
    return false;
  if (!has_ranges_of(plan.options, plan.plan)) {
    findings.add(FindingKind::plan, table_name, "options.mask", {}, to_string(plan.options.mask),
                 "a mask of the plan's ranges");
    return false;
  }
  bool good = size("options.world_size", plan.options.world_size, world_size);
  good &= size("work", std::ssize(plan.work), world_size);
  good &= size("home_tokens", std::ssize(plan.home_tokens), world_size);
  good &= size("attention_tokens", std::ssize(plan.attention_tokens), world_size);
  good &= size("kv_tokens", std::ssize(plan.kv_tokens), world_size);
  good &= size("links", std::ssize(plan.links), world_size);
  good &= plan.relay.empty() || size("relay.links", std::ssize(plan.relay.links), world_size);
  return good;
}

// Work and bytes of absurd sizes would not fit their types.
bool check_totals(const AttentionPlan& plan, Findings& findings) {
  const QkvPlan& qkv = plan.plan;
  double max_copies = 0;
  for (std::int64_t d = 0; d < qkv.num_documents(); ++d) {
    const std::int64_t tokens = tokens_of(qkv, d);
    max_copies +=
        static_cast<double>(tokens) * static_cast<double>(detail::shards_of(qkv, d).size());
    if (tokens <= (std::int64_t{1} << 31)) continue;
    findings.add(FindingKind::count, table_name, "plan", {},
                 concat(tokens, " tokens in document ", d), "at most 2^31");
    return false;
  }
  const auto row_bytes =
      static_cast<double>(plan.options.model.q_row_bytes() + plan.options.model.kv_row_bytes());
  if (max_copies * row_bytes < 9e18) return true;
  findings.add(FindingKind::count, table_name, "links", {}, "more bytes than 2^63 - 1", "fewer");
  return false;
}

bool check_options(const AttentionPlan& plan, Findings& findings) {
  try {
    plan.options.check("options");
    return true;
  } catch (const InvalidArgument& error) {
    findings.add(FindingKind::plan, table_name, "options", {}, error.what(),
                 "options that are possible");
    return false;
  }
}

/// Rows of a shard that a hop brings to a rank.
std::tuple<std::int32_t, std::int32_t, std::int64_t> place_of(const RelayHop& hop) {
  return {hop.dst_rank, hop.shard, hop.row_begin};
}

std::int64_t end_of(const RelayHop& hop) { return hop.row_begin + hop.num_rows; }

bool comes_before(const RelayHop& a, const RelayHop& b) { return place_of(a) < place_of(b); }

// Whole shards that ranks need from others, each once.
std::vector<RelayHop> needed_arrivals(const QkvPlan& plan, const SparseMetadata& kv) {
  std::vector<RelayHop> needed;
  detail::for_each_entry(kv, [&](std::int32_t src, std::int64_t, std::int64_t n) {
    for (std::int64_t c = kv.destination_begin(n); c < kv.destination_end(n); ++c) {
      if (kv.dst_rank[c] == src || plan.shard_len[n] == 0) continue;
      needed.push_back({.dst_rank = kv.dst_rank[c],
                        .shard = static_cast<std::int32_t>(n),
                        .num_rows = plan.shard_len[n]});
    }
  });
  std::sort(needed.begin(), needed.end(), comes_before);
  const auto is_same = [](const RelayHop& a, const RelayHop& b) {
    return place_of(a) == place_of(b);
  };
  needed.erase(std::unique(needed.begin(), needed.end(), is_same), needed.end());
  return needed;
}

std::string hop_text(const RelayHop& hop, std::size_t idx) {
  return concat("hop ", idx, ": ", hop.num_rows, " rows from ", hop.row_begin, ", from rank ",
                hop.src_rank, " to ", hop.dst_rank);
}

// The rule that the hop breaks, its stage included; null: none.
const char* wrong_with(const AttentionPlan& plan, std::size_t idx,
                       std::span<const std::int32_t> homes) {
  const RelaySchedule& relay = plan.relay;
  if (const char* const expected =
          detail::wrong_with_hop(relay.hops, idx, plan.plan.world_size, plan.plan.shard_len, homes))
    return expected;
  const RelayHop& hop = relay.hops[idx];
  if (hop.after < -1) return "an earlier hop, or -1, in `after`";
  if (hop.after < 0) return hop.stage == 0 ? nullptr : "stage 0";
  return hop.stage == std::int64_t{relay.hops[hop.after].stage} + 1
             ? nullptr
             : "one stage more than the hop before";
}

// Joins arrivals that continue each other; what overlaps or leaves gaps stays apart.
void join(std::vector<RelayHop>& arrivals) {
  std::sort(arrivals.begin(), arrivals.end(), comes_before);
  std::size_t num = 0;
  for (const RelayHop& arrival : arrivals) {
    RelayHop* last = num > 0 ? &arrivals[num - 1] : nullptr;
    if (last != nullptr && last->dst_rank == arrival.dst_rank && last->shard == arrival.shard &&
        end_of(*last) == arrival.row_begin) {
      last->num_rows += arrival.num_rows;
    } else {
      arrivals[num++] = arrival;
    }
  }
  arrivals.resize(num);
}

void compare_arrivals(const std::vector<RelayHop>& got, const std::vector<RelayHop>& needed,
                      Findings& findings) {
  const auto text = [](const RelayHop& a) { return concat("rows ", a.row_begin, "..", end_of(a)); };
  const auto add = [&](const RelayHop& at, const auto& found, const auto& expected) {
    findings.add(FindingKind::coverage, table_name, "relay.hops",
                 {.rank = at.dst_rank, .shard = at.shard}, found, expected);
  };
  std::size_t g = 0;
  std::size_t n = 0;
  while ((g < got.size() || n < needed.size()) && !findings.full()) {
    const bool both = g < got.size() && n < needed.size();
    const bool same_place = both && place_of(got[g]) == place_of(needed[n]);
    if (same_place && end_of(got[g]) == end_of(needed[n])) {
      ++g;
      ++n;
    } else if (n == needed.size() || (both && place_of(got[g]) <= place_of(needed[n]))) {
      add(got[g], text(got[g]), "the whole shard once, where it is needed");
      ++g;
      if (same_place) ++n;
    } else {
      add(needed[n], "nothing", text(needed[n]));
      ++n;
    }
  }
}

// Carries the relay schedule out, hop by hop.
void check_relay(const AttentionPlan& plan, const QkvRouting& routing,
                 const std::vector<LinkBytes>& q_links, Findings& findings) {
  const RelaySchedule& relay = plan.relay;
  const std::vector<std::int32_t> homes = detail::homes_of(plan.plan.rank_shard_offsets);
  std::vector<LinkBytes> links = q_links;
  std::vector<RelayHop> arrivals;
  std::int64_t num_stages = 0;
  for (std::size_t i = 0; i < relay.hops.size(); ++i) {
    const RelayHop& hop = relay.hops[i];
    if (const char* expected = wrong_with(plan, i, homes)) {
      findings.add(FindingKind::order, table_name, "relay.hops",
                   {.rank = hop.dst_rank, .shard = hop.shard}, hop_text(hop, i), expected);
      if (findings.full()) return;
      continue;
    }
    num_stages = std::max(num_stages, std::int64_t{hop.stage} + 1);
    count_rows(links, hop.src_rank, hop.dst_rank, hop.num_rows * plan.options.model.kv_row_bytes(),
               plan.options.hardware.ranks_per_node);
    arrivals.push_back(hop);
  }
  join(arrivals);
  compare_arrivals(arrivals, needed_arrivals(plan.plan, routing.fwd_kv), findings);
  compare_links("relay.links", relay.links, links, findings);
  compare("relay.num_stages", -1, relay.num_stages, num_stages, findings);
}

}  // namespace

std::vector<Finding> validate(const AttentionPlan& plan, const ValidateOptions& options) {
  ValidateOptions limits = options;
  const std::int64_t capacity = plan.options.max_tokens_per_rank;
  if (capacity > 0 && limits.q_capacity < 0) limits.q_capacity = capacity;
  if (capacity > 0 && limits.kv_capacity < 0) limits.kv_capacity = capacity;
  Findings findings(options.max_findings);
  findings.append(validate(plan.plan, limits));
  if (findings.count() > 0 || !check_options(plan, findings) || !check_sizes(plan, findings) ||
      !check_totals(plan, findings))
    return std::move(findings).take();

  const QkvRouting routing = compute_qkv_routing(plan.plan);
  findings.append(validate(plan.plan, routing, limits));
  const std::size_t world_size = plan.plan.world_size;
  const std::int32_t ranks_per_node = plan.options.hardware.ranks_per_node;
  std::vector<LinkBytes> q_links(world_size);
  std::vector<std::int64_t> q_rows(world_size);
  std::vector<std::int64_t> kv_rows(world_size);
  count_table(routing.fwd_q, plan.options.model.q_row_bytes(), ranks_per_node, q_links, q_rows);
  std::vector<LinkBytes> links = q_links;
  count_table(routing.fwd_kv, plan.options.model.kv_row_bytes(), ranks_per_node, links, kv_rows);
  const std::vector<std::int64_t> work = count_work(plan);
  for (std::size_t r = 0; r < world_size; ++r) {
    const auto rank = static_cast<std::int64_t>(r);
    std::int64_t home = 0;
    for (std::int64_t n = plan.plan.rank_shard_offsets[r]; n < plan.plan.rank_shard_offsets[r + 1];
         ++n)
      home += plan.plan.shard_len[n];
    compare("work", rank, plan.work[r], work[r], findings);
    compare("home_tokens", rank, plan.home_tokens[r], home, findings);
    compare("attention_tokens", rank, plan.attention_tokens[r], q_rows[r], findings);
    compare("kv_tokens", rank, plan.kv_tokens[r], kv_rows[r], findings);
  }
  compare_links("links", plan.links, links, findings);
  std::int64_t max_bytes_in = 0;
  for (const LinkBytes& link : links) max_bytes_in = std::max(max_bytes_in, link.in());
  if (plan.least_bytes_in < 0 || plan.least_bytes_in > max_bytes_in) {
    findings.add(FindingKind::count, table_name, "least_bytes_in", {}, plan.least_bytes_in,
                 concat("0..", max_bytes_in, ", what a rank of this plan receives"));
  }
  if (!plan.relay.empty()) check_relay(plan, routing, q_links, findings);
  return std::move(findings).take();
}

}  // namespace waybill
