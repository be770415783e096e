#include <algorithm>

#include "plan_findings.h"
#include "waybill/core/error.h"
#include "waybill/planner/attention_plan.h"
#include "waybill/routing/qkv_routing.h"

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
