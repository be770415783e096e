#include "waybill/routing/document_plan.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <utility>

#include "plan_builder.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

void check_arguments(std::span<const std::int64_t> doc_lengths,
                     const DocumentPlanOptions& options) {
  constexpr const char* who = "plan_documents";
  constexpr std::int64_t most_tokens = std::int64_t{1} << 40;
  require(1 <= options.world_size && options.world_size <= max_world_size, who,
          ": world_size = ", options.world_size, ", expected 1..", max_world_size);
  require(
      1 <= options.tokens_per_rank && options.tokens_per_rank <= most_tokens / options.world_size,
      who, ": tokens_per_rank = ", options.tokens_per_rank, ", expected 1..2^40 / world_size");
  require(options.shard_tokens >= 1, who, ": shard_tokens = ", options.shard_tokens,
          ", expected >= 1");
  const std::int64_t capacity = options.world_size * options.tokens_per_rank;
  std::int64_t total = 0;
  for (std::size_t i = 0; i < doc_lengths.size(); ++i) {
    require(doc_lengths[i] >= 1 && doc_lengths[i] <= most_tokens, who, ": doc_lengths[", i,
            "] = ", doc_lengths[i], ", expected 1..2^40 tokens");
    total += doc_lengths[i];
    require(total <= capacity, who, ": doc_lengths up to document ", i, " sum to ", total,
            " tokens, expected at most ", capacity, " (world_size ", options.world_size,
            " x tokens_per_rank ", options.tokens_per_rank, ")");
  }
}

/// Lays the documents end to end over the ranks and cuts them; every shard is at home.
QkvPlan pack_documents(std::span<const std::int64_t> doc_lengths,
                       const DocumentPlanOptions& options) {
  detail::PlanBuilder builder(options.world_size, options.kv_layout);
  std::int32_t rank = 0;
  std::int64_t room = options.tokens_per_rank;
  for (const std::int64_t doc_length : doc_lengths) {
    for (std::int64_t left = doc_length; left > 0;) {
      if (room == 0) {
        builder.end_rank();
        ++rank;
        room = options.tokens_per_rank;
      }
      const std::int64_t piece = std::min(left, room);
      const std::int64_t num_shards = 1 + (piece - 1) / options.shard_tokens;
      for (std::int64_t s = 0; s < num_shards; ++s) {
        builder.add_shard(piece / num_shards + (s < piece % num_shards ? 1 : 0), rank);
      }
      left -= piece;
      room -= piece;
    }
    builder.end_document();
  }
  for (; rank < options.world_size; ++rank) builder.end_rank();
  return builder.take();
}

/// Most work first: home while it stays within the mean, else the rank with the least work.
void balance(QkvPlan& plan) {
  const std::vector<std::int64_t> work = shard_work(plan);
  std::vector<std::int32_t> order(work.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t a, std::int32_t b) { return work[a] > work[b]; });
  const double total = std::accumulate(work.begin(), work.end(), 0.0);
  const double mean = total / plan.world_size;

  using Load = std::pair<std::int64_t, std::int32_t>;  // work, rank; ties go to the lowest rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> lightest;
  std::vector<std::int64_t> load(plan.world_size);
  for (std::int32_t r = 0; r < plan.world_size; ++r) lightest.emplace(0, r);
  for (const std::int32_t shard : order) {
    const std::int32_t home = plan.q_dst[shard];
    std::int32_t target = home;
    if (static_cast<double>(load[home] + work[shard]) > mean) {
      while (lightest.top().first != load[lightest.top().second]) lightest.pop();  // outdated
      if (lightest.top().first < load[home]) target = lightest.top().second;
    }
    plan.q_dst[shard] = target;
    load[target] += work[shard];
    lightest.emplace(load[target], target);
  }
}

}  // namespace

QkvPlan plan_documents(std::span<const std::int64_t> doc_lengths,
                       const DocumentPlanOptions& options) {
  check_arguments(doc_lengths, options);
  QkvPlan plan = pack_documents(doc_lengths, options);
  plan.mask = options.mask;
  balance(plan);
  return plan;
}

std::vector<std::int64_t> shard_work(const QkvPlan& plan) {
  plan.check("shard_work");
  std::vector<std::int64_t> work(plan.shard_len.size());
  std::vector<std::int64_t> context;  // by position
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    context.assign(1, 0);
    std::int64_t doc_rows = 0;
    if (plan.mask == MaskKind::full) {
      for (std::int64_t k = plan.doc_shard_offsets[d]; k < plan.doc_shard_offsets[d + 1]; ++k) {
        doc_rows += plan.shard_len[plan.doc_shards[k]];
      }
    }
    for (std::int64_t k = plan.doc_shard_offsets[d]; k < plan.doc_shard_offsets[d + 1]; ++k) {
      const std::size_t shard = plan.doc_shards[k];
      const std::int64_t q_len = plan.shard_len[shard];
      const std::int64_t end = context.back() + q_len;
      require(end <= (std::int64_t{1} << 31), "shard_work: document ", d,
              " has over 2^31 tokens: ", "its work does not fit int64");
      const std::int64_t begin = plan.kv_begin.empty() ? 0 : context[plan.kv_begin[shard]];
      work[shard] = plan.mask == MaskKind::full ? q_len * doc_rows
                                                : q_len * (end - begin) - q_len * (q_len - 1) / 2;
      context.push_back(end);
    }
  }
  return work;
}

std::vector<std::int64_t> rank_work(const QkvPlan& plan) {
  const std::vector<std::int64_t> work = shard_work(plan);
  std::vector<std::int64_t> sums(plan.world_size);
  for (std::size_t s = 0; s < work.size(); ++s) {
    std::int64_t& sum = sums[plan.q_dst[s]];
    require(!__builtin_add_overflow(sum, work[s], &sum), "rank_work: the work of rank ",
            plan.q_dst[s], " does not fit int64");
  }
  return sums;
}

}  // namespace waybill
