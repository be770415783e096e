#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/node_routes.h"
#include "routing/homes.h"
#include "waybill/core/error.h"
#include "waybill/planner/attention_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::detail {

/// Collects what is wrong with an AttentionPlan, up to a number.
class PlanFindings {
 public:
  PlanFindings(std::vector<Finding> findings, std::int64_t most)
      : findings_(std::move(findings)), most_(most) {}

  void add(FindingKind kind, const char* field, std::int64_t rank, std::int64_t shard,
           const std::string& got, const std::string& expected);
  void compare(const char* field, std::int64_t rank, std::int64_t got, std::int64_t expected);
  void compare(const char* field, const std::vector<LinkBytes>& got,
               const std::vector<LinkBytes>& expected);
  void append(std::vector<Finding> more) {
    for (Finding& finding : more)
      if (!full()) findings_.push_back(std::move(finding));
  }

  [[nodiscard]] bool none() const { return findings_.empty(); }
  [[nodiscard]] bool full() const { return std::ssize(findings_) >= most_; }
  [[nodiscard]] std::vector<Finding> take() { return std::move(findings_); }

 private:
  std::vector<Finding> findings_;
  std::int64_t most_;
};

/// Bytes from rank to rank; none where they are the same.
void add_link_bytes(std::vector<LinkBytes>& links, std::int64_t src, std::int64_t dst,
                    std::int64_t num_bytes, std::int64_t ranks_per_node);

/// Carries the relay schedule out, hop by hop.
void check_relay(const AttentionPlan& plan, const QkvRouting& routing,
                 const std::vector<LinkBytes>& q_links, PlanFindings& findings);

}  // namespace waybill::detail

namespace waybill {
namespace detail {

void PlanFindings::add(FindingKind kind, const char* field, std::int64_t rank, std::int64_t shard,
                       const std::string& got, const std::string& expected) {
  if (full()) return;
  findings_.push_back({.kind = kind,
                       .table = "attention_plan",
                       .field = field,
                       .rank = rank,
                       .shard = shard,
                       .got = got,
                       .expected = expected});
}

void PlanFindings::compare(const char* field, std::int64_t rank, std::int64_t got,
                           std::int64_t expected) {
  if (got != expected)
    add(FindingKind::count, field, rank, -1, std::to_string(got), std::to_string(expected));
}

void PlanFindings::compare(const char* field, const std::vector<LinkBytes>& got,
                           const std::vector<LinkBytes>& expected) {
  for (std::size_t r = 0; r < expected.size() && !full(); ++r) {
    const auto rank = static_cast<std::int64_t>(r);
    const auto name = [&](const char* part) { return std::string(field) + part; };
    compare(name(".nvlink_in").c_str(), rank, got[r].nvlink_in, expected[r].nvlink_in);
    compare(name(".nvlink_out").c_str(), rank, got[r].nvlink_out, expected[r].nvlink_out);
    compare(name(".network_in").c_str(), rank, got[r].network_in, expected[r].network_in);
    compare(name(".network_out").c_str(), rank, got[r].network_out, expected[r].network_out);
  }
}

namespace {

// Numbers of an untrusted plan may be absurd; then they only have to differ.
void add_wrapping(std::int64_t& sum, std::int64_t number) {
  sum = static_cast<std::int64_t>(static_cast<std::uint64_t>(sum) +
                                  static_cast<std::uint64_t>(number));
}

}  // namespace

void add_link_bytes(std::vector<LinkBytes>& links, std::int64_t src, std::int64_t dst,
                    std::int64_t num_bytes, std::int64_t ranks_per_node) {
  if (src == dst) return;
  const bool near = src / ranks_per_node == dst / ranks_per_node;
  LinkBytes& from = links[src];
  LinkBytes& to = links[dst];
  add_wrapping(near ? from.nvlink_out : from.network_out, num_bytes);
  add_wrapping(near ? to.nvlink_in : to.network_in, num_bytes);
}

namespace {

// Adds what a forward table moves; `received`: rows that come, local ones included.
void count_table(const SparseMetadata& table, std::int64_t row_bytes, std::int64_t ranks_per_node,
                 std::vector<LinkBytes>& links, std::vector<std::int64_t>& received) {
  for (std::int64_t src = 0; src < table.world_size; ++src) {
    for (std::int64_t n = table.rank_offsets[src]; n < table.rank_offsets[src + 1]; ++n) {
      for (std::int64_t c = table.destination_begin(n); c < table.destination_end(n); ++c) {
        const std::int64_t dst = table.dst_rank[c];
        received[dst] += table.seq_len[n];
        add_link_bytes(links, src, dst, table.seq_len[n] * row_bytes, ranks_per_node);
      }
    }
  }
}

// Work by the mask, query by query; long documents by whole shards of unchanging slope.
std::vector<std::int64_t> count_work(const AttentionPlan& plan) {
  const QkvPlan& qkv = plan.plan;
  std::vector<std::int64_t> work(qkv.world_size);
  for (std::int64_t d = 0; d < qkv.num_documents(); ++d) {
    std::int64_t position = 0;
    std::int64_t doc_len = 0;
    for (std::int64_t i = qkv.doc_shard_offsets[d]; i < qkv.doc_shard_offsets[d + 1]; ++i)
      doc_len += qkv.shard_len[qkv.doc_shards[i]];
    for (std::int64_t i = qkv.doc_shard_offsets[d]; i < qkv.doc_shard_offsets[d + 1]; ++i) {
      const std::int32_t n = qkv.doc_shards[i];
      // Keys of the first and the last query; in between they grow by one, until the window.
      const std::int64_t len = qkv.shard_len[n];
      const std::int64_t window = plan.options.mask.window;
      const std::int64_t growing =
          window == 0 ? len : std::clamp<std::int64_t>(window - position, 0, len);
      const std::int64_t pairs =
          plan.options.mask.is_full()
              ? len * doc_len
              : growing * position + growing * (growing + 1) / 2 + (len - growing) * window;
      const HardwareFacts& facts = plan.options.hardware;
      std::int64_t& sum = work[qkv.q_dst[n]];
      add_wrapping(sum, pairs);
      add_wrapping(sum, facts.row_pairs * len + (len > 0 ? facts.shard_pairs : 0));
      position += len;
    }
  }
  return work;
}

bool check_sizes(const AttentionPlan& plan, PlanFindings& findings) {
  const auto world_size = static_cast<std::int64_t>(plan.plan.world_size);
  const auto size = [&](const char* field, std::int64_t got, std::int64_t expected) {
    if (got != expected)
      findings.add(FindingKind::shape, field, -1, -1, std::to_string(got),
                   concat(expected, " entries"));
    return got == expected;
  };
  if (plan.options.mask.kind != plan.plan.mask) {
    findings.add(FindingKind::plan, "options.mask", -1, -1,
                 std::string(to_string(plan.options.mask.kind)),
                 concat(to_string(plan.plan.mask), ", as the plan"));
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
bool check_totals(const AttentionPlan& plan, PlanFindings& findings) {
  const QkvPlan& qkv = plan.plan;
  double most_copies = 0;
  for (std::int64_t d = 0; d < qkv.num_documents(); ++d) {
    std::int64_t tokens = 0;
    for (std::int64_t i = qkv.doc_shard_offsets[d]; i < qkv.doc_shard_offsets[d + 1]; ++i)
      tokens += qkv.shard_len[qkv.doc_shards[i]];
    most_copies += static_cast<double>(tokens) *
                   static_cast<double>(qkv.doc_shard_offsets[d + 1] - qkv.doc_shard_offsets[d]);
    if (tokens <= (std::int64_t{1} << 31)) continue;
    findings.add(FindingKind::count, "plan", -1, -1, concat(tokens, " tokens in document ", d),
                 "at most 2^31");
    return false;
  }
  const auto row_bytes =
      static_cast<double>(plan.options.model.q_row_bytes() + plan.options.model.kv_row_bytes());
  if (most_copies * row_bytes < 9e18) return true;
  findings.add(FindingKind::count, "links", -1, -1, "more bytes than 2^63 - 1", "fewer");
  return false;
}

bool check_options(const AttentionPlan& plan, PlanFindings& findings) {
  try {
    plan.options.check("options");
    return true;
  } catch (const InvalidArgument& error) {
    findings.add(FindingKind::plan, "options", -1, -1, error.what(), "options that are possible");
    return false;
  }
}

}  // namespace
}  // namespace detail

std::vector<Finding> validate(const AttentionPlan& plan, const ValidateOptions& options) {
  ValidateOptions limits = options;
  const std::int64_t capacity = plan.options.max_tokens_per_rank;
  if (capacity > 0 && limits.q_capacity < 0) limits.q_capacity = capacity;
  if (capacity > 0 && limits.kv_capacity < 0) limits.kv_capacity = capacity;
  detail::PlanFindings findings(validate(plan.plan, limits),
                                std::max<std::int64_t>(1, options.max_findings));
  if (!findings.none() || !detail::check_options(plan, findings) ||
      !detail::check_sizes(plan, findings) || !detail::check_totals(plan, findings))
    return findings.take();

  const QkvRouting routing = compute_qkv_routing(plan.plan);
  findings.append(validate(plan.plan, routing, limits));
  const std::size_t world_size = plan.plan.world_size;
  const std::int64_t ranks_per_node = plan.options.hardware.ranks_per_node;
  std::vector<LinkBytes> q_links(world_size);
  std::vector<std::int64_t> q_rows(world_size);
  std::vector<std::int64_t> kv_rows(world_size);
  detail::count_table(routing.fwd_q, plan.options.model.q_row_bytes(), ranks_per_node, q_links,
                      q_rows);
  std::vector<LinkBytes> links = q_links;
  detail::count_table(routing.fwd_kv, plan.options.model.kv_row_bytes(), ranks_per_node, links,
                      kv_rows);
  const std::vector<std::int64_t> work = detail::count_work(plan);
  for (std::size_t r = 0; r < world_size; ++r) {
    const auto rank = static_cast<std::int64_t>(r);
    std::int64_t home = 0;
    for (std::int64_t n = plan.plan.rank_shard_offsets[r]; n < plan.plan.rank_shard_offsets[r + 1];
         ++n)
      home += plan.plan.shard_len[n];
    findings.compare("work", rank, plan.work[r], work[r]);
    findings.compare("home_tokens", rank, plan.home_tokens[r], home);
    findings.compare("attention_tokens", rank, plan.attention_tokens[r], q_rows[r]);
    findings.compare("kv_tokens", rank, plan.kv_tokens[r], kv_rows[r]);
  }
  findings.compare("links", plan.links, links);
  if (!plan.relay.empty()) detail::check_relay(plan, routing, q_links, findings);
  return findings.take();
}

}  // namespace waybill

namespace waybill::detail {
namespace {

/// Rows of a shard that a rank gets.
struct Arrival {
  std::int32_t rank = 0;
  std::int32_t shard = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;

  [[nodiscard]] std::tuple<std::int32_t, std::int32_t, std::int64_t> key() const {
    return {rank, shard, begin};
  }
};

// Whole shards that ranks need from others, each once.
std::vector<Arrival> needed_arrivals(const QkvPlan& plan, const SparseMetadata& kv) {
  std::vector<Arrival> needed;
  for (std::int32_t src = 0; src < kv.world_size; ++src) {
    for (std::int64_t n = kv.rank_offsets[src]; n < kv.rank_offsets[src + 1]; ++n) {
      for (std::int64_t c = kv.destination_begin(n); c < kv.destination_end(n); ++c) {
        const std::int32_t dst = kv.dst_rank[c];
        if (dst != src && plan.shard_len[n] > 0)
          needed.push_back({.rank = dst,
                            .shard = static_cast<std::int32_t>(n),
                            .begin = 0,
                            .end = plan.shard_len[n]});
      }
    }
  }
  const auto order = [](const Arrival& a, const Arrival& b) { return a.key() < b.key(); };
  std::sort(needed.begin(), needed.end(), order);
  needed.erase(std::unique(needed.begin(), needed.end(),
                           [](const Arrival& a, const Arrival& b) { return a.key() == b.key(); }),
               needed.end());
  return needed;
}

std::string hop_text(const RelayHop& hop, std::size_t idx) {
  return concat("hop ", idx, ": ", hop.num_rows, " rows from ", hop.row_begin, ", from rank ",
                hop.src_rank, " to ", hop.dst_rank);
}

// What the hop does not keep, its stage included.
const char* wrong_with(const RelaySchedule& relay, std::size_t idx, const RelayedShards& shards) {
  if (const char* const expected = wrong_with_hop(relay.hops, idx, shards)) return expected;
  const RelayHop& hop = relay.hops[idx];
  if (hop.after < 0) return hop.stage == 0 ? nullptr : "stage 0";
  return hop.stage == std::int64_t{relay.hops[hop.after].stage} + 1
             ? nullptr
             : "one stage more than the hop before";
}

// Joins arrivals that continue each other; what overlaps or leaves gaps stays apart.
void join(std::vector<Arrival>& arrivals) {
  std::sort(arrivals.begin(), arrivals.end(),
            [](const Arrival& a, const Arrival& b) { return a.key() < b.key(); });
  std::size_t num = 0;
  for (const Arrival& arrival : arrivals) {
    Arrival* last = num > 0 ? &arrivals[num - 1] : nullptr;
    if (last != nullptr && last->rank == arrival.rank && last->shard == arrival.shard &&
        last->end == arrival.begin) {
      last->end = arrival.end;
    } else {
      arrivals[num++] = arrival;
    }
  }
  arrivals.resize(num);
}

void compare(const std::vector<Arrival>& got, const std::vector<Arrival>& needed,
             PlanFindings& findings) {
  const auto text = [](const Arrival& a) { return concat("rows ", a.begin, "..", a.end); };
  std::size_t g = 0;
  std::size_t n = 0;
  while ((g < got.size() || n < needed.size()) && !findings.full()) {
    const bool both = g < got.size() && n < needed.size();
    if (both && got[g].key() == needed[n].key() && got[g].end == needed[n].end) {
      ++g;
      ++n;
    } else if (n == needed.size() || (both && got[g].key() <= needed[n].key())) {
      findings.add(FindingKind::coverage, "relay.hops", got[g].rank, got[g].shard, text(got[g]),
                   "the whole shard once, where it is needed");
      if (both && got[g].key() == needed[n].key()) ++n;
      ++g;
    } else {
      findings.add(FindingKind::coverage, "relay.hops", needed[n].rank, needed[n].shard, "nothing",
                   text(needed[n]));
      ++n;
    }
  }
}

}  // namespace

void check_relay(const AttentionPlan& plan, const QkvRouting& routing,
                 const std::vector<LinkBytes>& q_links, PlanFindings& findings) {
  const RelaySchedule& relay = plan.relay;
  const std::vector<std::int32_t> homes = homes_of(plan.plan.rank_shard_offsets);
  const RelayedShards shards{plan.plan.world_size, plan.plan.shard_len, homes};
  std::vector<LinkBytes> links = q_links;
  std::vector<Arrival> arrivals;
  std::int64_t num_stages = 0;
  for (std::size_t i = 0; i < relay.hops.size(); ++i) {
    const RelayHop& hop = relay.hops[i];
    if (const char* expected = wrong_with(relay, i, shards)) {
      findings.add(FindingKind::order, "relay.hops", hop.dst_rank, hop.shard, hop_text(hop, i),
                   expected);
      if (findings.full()) return;
      continue;
    }
    num_stages = std::max(num_stages, std::int64_t{hop.stage} + 1);
    add_link_bytes(links, hop.src_rank, hop.dst_rank,
                   hop.num_rows * plan.options.model.kv_row_bytes(),
                   plan.options.hardware.ranks_per_node);
    arrivals.push_back({.rank = hop.dst_rank,
                        .shard = hop.shard,
                        .begin = hop.row_begin,
                        .end = hop.row_begin + hop.num_rows});
  }
  join(arrivals);
  compare(arrivals, needed_arrivals(plan.plan, routing.fwd_kv), findings);
  findings.compare("relay.links", relay.links, links);
  findings.compare("relay.num_stages", -1, relay.num_stages, num_stages);
}

}  // namespace waybill::detail
