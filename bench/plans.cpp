#include "plans.h"

#include <algorithm>
#include <vector>

#include "support/packed_plan.h"
#include "waybill/core/random.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/routing/generators.h"

namespace waybill::bench {
namespace {

constexpr std::int64_t tokens_per_rank = 65536;

void spread(QkvPlan& plan) {
  Random random(7);
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    std::int64_t rank = random.below(plan.world_size);
    for (std::int64_t k = plan.doc_shard_offsets[static_cast<std::size_t>(d)];
         k < plan.doc_shard_offsets[static_cast<std::size_t>(d + 1)]; ++k) {
      const auto shard = static_cast<std::size_t>(plan.doc_shards[static_cast<std::size_t>(k)]);
      plan.q_dst[shard] = static_cast<std::int32_t>(rank);
      rank = (rank + 1) % plan.world_size;
    }
  }
}

}  // namespace

QkvPlan spread_plan(std::int32_t world_size, std::int64_t num_shards, KvLayout kv_layout) {
  const std::vector<std::int64_t> documents = sample_documents(
      builtin_length_distributions().front(), world_size * tokens_per_rank, /*seed=*/1);
  test::PackedPlanOptions options{.world_size = world_size,
                                  .tokens_per_rank = tokens_per_rank,
                                  .shard_tokens = 1,
                                  .kv_layout = kv_layout};
  std::int64_t low = 1;
  std::int64_t high = tokens_per_rank;
  while (low < high) {  // the longest shards that still give enough of them
    const std::int64_t middle = (low + high + 1) / 2;
    std::int64_t count = 0;
    for (const std::int64_t length : documents) count += 1 + (length - 1) / middle;
    (count >= num_shards ? low : high) = count >= num_shards ? middle : middle - 1;
  }
  options.shard_tokens = low;
  QkvPlan plan = test::packed_plan(documents, options);
  spread(plan);
  return plan;
}

QkvPlan long_document_plan(std::int32_t world_size, std::int64_t num_shards,
                           std::int64_t shards_per_document, KvLayout kv_layout) {
  const std::int64_t shard_tokens =
      std::max<std::int64_t>(1, world_size * tokens_per_rank / num_shards);
  const std::vector<std::int64_t> documents(
      static_cast<std::size_t>(num_shards / shards_per_document),
      shard_tokens * shards_per_document);
  QkvPlan plan = test::packed_plan(documents, {.world_size = world_size,
                                               .tokens_per_rank = tokens_per_rank,
                                               .shard_tokens = shard_tokens,
                                               .kv_layout = kv_layout});
  spread(plan);
  return plan;
}

}  // namespace waybill::bench
