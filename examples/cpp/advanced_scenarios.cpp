// Eight scenes from real use; each checks what it shows. Ends with 0 when all hold, else with 1.
//
//   1 uneven shards                5 KV once per query or once per rank
//   2 head-tail balance            6 capacities
//   3 documents on several ranks   7 planted mistakes
//   4 a sliding window             8 gradients of K and V

#include <algorithm>
#include <cstdint>
#include <iomanip>
#include <iostream>
#include <numeric>
#include <string_view>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/core/random.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/planner/planner.h"
#include "waybill/report/plan_summary.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/routing/validate.h"
#include "waybill/simulate/check.h"
#include "waybill/simulate/orchestrate.h"

namespace {

using namespace waybill;

constexpr RowBytes row_bytes{.q = 8192, .kv = 4096};  // of one token, as in a model of today

int num_failures = 0;

void scene(std::string_view text) { std::cout << "\n== " << text << "\n"; }

void check(std::string_view what, bool ok) {
  std::cout << (ok ? "  ok      " : "  FAILED  ") << what << "\n";
  num_failures += ok ? 0 : 1;
}

/// Validates the tables, then carries the dispatch out and compares every byte.
void check_plan(const QkvPlan& plan) {
  const QkvRouting routing = compute_qkv_routing(plan);
  const std::vector<Finding> findings = validate(plan, routing);
  for (const Finding& finding : findings) std::cout << "  " << finding << "\n";
  check("the validator finds nothing", findings.empty());
  check("every byte arrives, there and back",
        check_dispatch(plan, routing, {.q_row_bytes = 32, .kv_row_bytes = 16}).passed());
}

void print_work(std::string_view label, const QkvPlan& plan) {
  const std::vector<std::int64_t> work = rank_work(plan);
  const std::int64_t total = std::accumulate(work.begin(), work.end(), std::int64_t{0});
  std::cout << "  " << label << ", work by rank:";
  for (const std::int64_t pairs : work) std::cout << " " << pairs;
  const double mean = static_cast<double>(total) / static_cast<double>(work.size());
  std::cout << "  (largest over mean " << std::fixed << std::setprecision(2)
            << static_cast<double>(std::ranges::max(work)) / mean << ")\n";
}

/// One document on rank 0 of 4, in equal shards; `dst` says who attends to each.
QkvPlan one_document(std::vector<std::int32_t> dst, std::int64_t shard_tokens) {
  const auto n = static_cast<std::int32_t>(dst.size());
  QkvPlan plan;
  plan.world_size = 4;
  plan.rank_shard_offsets = {0, n, n, n, n};
  plan.shard_len.assign(dst.size(), shard_tokens);
  plan.q_dst = std::move(dst);
  plan.doc_shard_offsets = {0, n};
  plan.doc_shards.resize(plan.q_dst.size());
  std::iota(plan.doc_shards.begin(), plan.doc_shards.end(), 0);
  return plan;
}

void uneven_shards() {
  scene("1  Causal context parallelism with uneven shards");
  std::cout << "  1000 tokens on rank 0: shards of 520, 280, 200 for ranks 0, 1, 2. The work of a\n"
               "  late token is larger, so late shards are shorter.\n";
  const IndexArray seq_lens = IndexArray::matrix({{1000}, {0}, {0}});
  const IndexArray cp_num = IndexArray::matrix({{3}, {0}, {0}});
  const IndexArray cp_dst = IndexArray::cube({{{0, 1, 2}}, {{-1, -1, -1}}, {{-1, -1, -1}}});
  const IndexArray shard_lens = IndexArray::cube({{{520, 280, 200}}, {{0, 0, 0}}, {{0, 0, 0}}});
  const QkvDispatch dispatch =
      create_qkv_dispatch_with_custom_mapping(3, seq_lens, cp_num, cp_dst, shard_lens);
  print_work("uneven", dispatch.plan);
  std::cout << "  KV rows that the ranks receive:";
  for (const auto rows : dispatch.metadata.fwd_kv.num_total_recv_tokens) std::cout << " " << rows;
  std::cout << "\n";
  const std::vector<std::int64_t> prefixes = {520, 800, 1000};
  check("each rank gets the prefix that its queries need",
        dispatch.metadata.fwd_kv.num_total_recv_tokens == prefixes);
  check_plan(dispatch.plan);
}

void head_tail_balance() {
  scene("2  Balance by pairing heads with tails");
  const QkvPlan blocks = one_document({0, 0, 1, 1, 2, 2, 3, 3}, 256);
  const QkvPlan folded = one_document({0, 1, 2, 3, 3, 2, 1, 0}, 256);
  print_work("in blocks", blocks);
  print_work("folded   ", folded);
  const std::vector<std::int64_t> work = rank_work(folded);
  check("folded, all ranks have the same work",
        std::ranges::all_of(work, [&](std::int64_t w) { return w == work[0]; }));
  check_plan(folded);
}

/// Documents as they occur, packed without regard to the borders of ranks.
QkvPlan real_plan(KvLayout layout) {
  const std::vector<std::int64_t> lengths =
      sample_documents(length_distribution("wlbllm"), 8 * 32768, /*seed=*/11);
  return plan_attention(lengths, {.world_size = 8, .tokens_per_rank = 32768, .kv_layout = layout})
      .plan;
}

void documents_across_ranks() {
  scene("3  Documents that lie on several ranks");
  const QkvPlan plan = real_plan(KvLayout::per_rank);
  std::int64_t across = 0;
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const auto first =
        static_cast<std::size_t>(plan.doc_shard_offsets[static_cast<std::size_t>(d)]);
    const auto last =
        static_cast<std::size_t>(plan.doc_shard_offsets[static_cast<std::size_t>(d + 1)]) - 1;
    const auto home = [&](std::size_t k) {
      return std::ranges::upper_bound(plan.rank_shard_offsets, plan.doc_shards[k]);
    };
    across += home(first) != home(last) ? 1 : 0;
  }
  std::cout << "  " << plan.num_documents() << " documents in " << plan.num_shards()
            << " shards on 8 ranks; " << across << " lie across ranks\n";
  print_work("planned", plan);
  check("some documents lie across ranks", across > 0);
  check_plan(plan);
}

void sliding_window() {
  scene("4  A sliding window");
  QkvPlan plan = one_document({0, 1, 2, 3, 3, 2, 1, 0}, 256);
  const QkvRouting causal = compute_qkv_routing(plan);
  plan.kv_begin = {0, 0, 0, 1, 2, 3, 4, 5};  // each query shard: itself and the two before
  const QkvRouting window = compute_qkv_routing(plan);
  const auto rows = [](const QkvRouting& routing) {
    const auto& total = routing.fwd_kv.recv.total;
    return std::accumulate(total.begin(), total.end(), std::int64_t{0});
  };
  std::cout << "  KV rows to store: causal " << rows(causal) << ", window " << rows(window) << "\n";
  check("no query reads more than three shards",
        std::ranges::max(window.attention.max_seqlen_kv) == 3 * 256);
  check("fewer rows travel", rows(window) < rows(causal));
  check_plan(plan);
}

void kv_once_a_rank() {
  scene("5  KV once per query or once per rank");
  std::cout << "  A long document in 98 shards over 8 ranks, and two shorter ones.\n";
  const std::vector<std::int64_t> lengths = {200000, 40000, 22144};
  std::int64_t wire_bytes[2];
  for (const KvLayout layout : {KvLayout::per_query, KvLayout::per_rank}) {
    const QkvPlan plan =
        plan_attention(lengths, {.world_size = 8, .tokens_per_rank = 32768, .kv_layout = layout})
            .plan;
    const PlanSummary summary = summarize(plan, compute_qkv_routing(plan), row_bytes);
    std::cout << "  " << to_string(layout) << ": " << (summary.wire_bytes >> 20)
              << " MiB on the wire, KV stored " << std::fixed << std::setprecision(2)
              << summary.kv_copies << " times, limit " << (summary.limit_bytes >> 20)
              << " MiB at rank " << summary.limit_rank << "\n";
    wire_bytes[layout == KvLayout::per_rank ? 1 : 0] = summary.wire_bytes;
  }
  check("once per rank moves fewer bytes", wire_bytes[1] < wire_bytes[0]);
}

void capacities() {
  scene("6  Does it fit?");
  const QkvPlan plan = real_plan(KvLayout::per_rank);
  const QkvRouting routing = compute_qkv_routing(plan);
  const std::int64_t most = std::ranges::max(routing.fwd_kv.recv.total);
  std::cout << "  the fullest rank needs " << most << " KV rows\n";
  check("a buffer of so many rows is enough",
        validate(plan, routing, {.kv_capacity = most}).empty());
  const std::vector<Finding> findings = validate(plan, routing, {.kv_capacity = most - 1});
  for (const Finding& finding : findings) std::cout << "  " << finding << "\n";
  check("one row less is not", !findings.empty() && findings[0].kind == FindingKind::capacity);
}

void planted_mistakes() {
  scene("7  Mistakes, and what the validator says");
  const QkvPlan plan = real_plan(KvLayout::per_rank);
  const QkvRouting routing = compute_qkv_routing(plan);
  const auto plant = [&](std::string_view what, auto&& damage) {
    QkvRouting broken = routing;
    damage(broken);
    const std::vector<Finding> findings = validate(plan, broken, {.max_findings = 1});
    if (!findings.empty()) std::cout << "  " << findings[0] << "\n";
    check(what, !findings.empty());
  };
  plant("an offset of one row too much", [](QkvRouting& r) { r.fwd_q.dst_offset[5] += 1; });
  plant("a copy of KV sent to the wrong rank",
        [](QkvRouting& r) { r.fwd_kv.dst_rank[7] = (r.fwd_kv.dst_rank[7] + 1) % 8; });
  plant("a query that reads one row past itself",
        [](QkvRouting& r) { r.attention.kv_len[3] += 1; });
  plant("a count that does not match", [](QkvRouting& r) { r.rev_kv.recv.total[2] -= 1; });
}

/// The reverse of the forward KV dispatch, then the sum over copies: with a payload of ones every
/// row's gradient is the number of its copies.
void kv_gradients() {
  scene("8  Gradients of K and V");
  const QkvPlan plan = one_document({0, 1, 2, 3, 3, 2, 1, 0}, 64);
  const QkvRouting routing = compute_qkv_routing(plan);
  const Metadata rev_kv = to_dense_reverse(routing.rev_kv, routing.fwd_kv);
  constexpr std::int64_t hidden = 8;
  const std::int64_t home_rows = 8 * 64;
  const std::int64_t copies = rev_kv.seq_recv_mask->dim(2);

  std::vector<HostTensor> gradients;  // on the ranks that attended
  std::vector<HostTensor> planes;     // at home
  for (std::size_t w = 0; w < 4; ++w) {
    gradients.emplace_back(DType::bfloat16, Shape{routing.fwd_kv.recv.total[w], hidden});
    std::ranges::fill(gradients.back().as<std::uint16_t>(), std::uint16_t{0x3F80});  // 1.0
    planes.emplace_back(DType::bfloat16, Shape{w == 0 ? copies * home_rows : 0, hidden});
  }
  std::vector<ConstTensorView> sources;
  std::vector<TensorView> outputs;
  for (const HostTensor& tensor : gradients) sources.push_back(tensor.view());
  for (HostTensor& tensor : planes) outputs.push_back(tensor.view());
  simulate_dispatch(sources, outputs, routing.rev_kv);

  HostTensor sum(DType::float32, {home_rows, hidden});
  sum_kv_copies(planes[0].view(), sum.view(), rev_kv, Rank{0});
  std::cout << "  copies summed, by shard:";
  bool right = true;
  for (std::int64_t s = 0; s < 8; ++s) {
    const std::int64_t num_copies =
        routing.fwd_kv.destination_end(s) - routing.fwd_kv.destination_begin(s);
    const auto first = static_cast<std::size_t>(s * 64 * hidden);
    const auto rows = sum.as<float>().subspan(first, 64 * hidden);
    std::cout << " " << rows[0];
    right = right &&
            std::ranges::all_of(rows, [&](float x) { return x == static_cast<float>(num_copies); });
  }
  std::cout << "\n";
  check("every row is the sum of all its copies", right);
}

}  // namespace

int main() {
  try {
    uneven_shards();
    head_tail_balance();
    documents_across_ranks();
    sliding_window();
    kv_once_a_rank();
    capacities();
    planted_mistakes();
    kv_gradients();
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
  std::cout << (num_failures == 0 ? "\nAll is well.\n" : "\nSomething is wrong.\n");
  return num_failures == 0 ? 0 : 1;
}
