#include "waybill/routing/qkv_plan.h"

#include <limits>

#include "dense_checks.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

/// Offsets of a partition of `size` items into `num_parts`: begin at 0, never fall, end at size.
void check_offsets(const char* who, const char* name, const std::vector<std::int64_t>& offsets,
                   std::int64_t num_parts, std::int64_t size) {
  require(std::ssize(offsets) == num_parts + 1, who, ": plan.", name, " has ", offsets.size(),
          " values, expected ", num_parts + 1);
  require(offsets.front() == 0, who, ": plan.", name, "[0] = ", offsets.front(), ", expected 0");
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    require(offsets[i - 1] <= offsets[i], who, ": plan.", name, "[", i, "] = ", offsets[i],
            ", expected at least ", offsets[i - 1], ", the value before it");
  }
  require(offsets.back() == size, who, ": plan.", name, "[", num_parts, "] = ", offsets.back(),
          ", expected ", size);
}

void check_shards(const QkvPlan& plan, const char* who) {
  require(std::ssize(plan.q_dst) == plan.num_shards(), who, ": plan.q_dst has ", plan.q_dst.size(),
          " values, expected ", plan.num_shards(), " (as shard_len)");
  std::int64_t total = 0;
  for (std::size_t i = 0; i < plan.shard_len.size(); ++i) {
    const std::int64_t rows = plan.shard_len[i];
    require(0 <= rows && rows <= detail::max_total_rows, who, ": plan.shard_len[", i, "] = ", rows,
            ", expected 0..2^40 tokens");
    total += rows;
    require(total <= detail::max_total_rows, who,
            ": the sum of plan.shard_len exceeds 2^40 tokens at shard ", i);
    require(0 <= plan.q_dst[i] && plan.q_dst[i] < plan.world_size, who, ": plan.q_dst[", i,
            "] = ", plan.q_dst[i], ", expected a rank of 0..", plan.world_size - 1);
  }
}

void check_documents(const QkvPlan& plan, const char* who) {
  std::vector<bool> seen(plan.shard_len.size(), false);
  for (std::size_t i = 0; i < plan.doc_shards.size(); ++i) {
    const std::int32_t shard = plan.doc_shards[i];
    require(0 <= shard && shard < plan.num_shards(), who, ": plan.doc_shards[", i, "] = ", shard,
            ", expected a shard of 0..", plan.num_shards() - 1);
    require(!seen[static_cast<std::size_t>(shard)], who, ": plan.doc_shards[", i, "] = ", shard,
            ", but this shard is in a document already; expected each shard once");
    seen[static_cast<std::size_t>(shard)] = true;
  }
}

void check_windows(const QkvPlan& plan, const char* who) {
  if (plan.kv_begin.empty()) return;
  require(plan.mask == MaskKind::causal, who, ": plan.kv_begin has ", plan.kv_begin.size(),
          " values, expected none: the mask is full");
  require(std::ssize(plan.kv_begin) == plan.num_shards(), who, ": plan.kv_begin has ",
          plan.kv_begin.size(), " values, expected ", plan.num_shards(), " or none");
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    std::int32_t before = 0;
    const std::int64_t first = plan.doc_shard_offsets[static_cast<std::size_t>(d)];
    const std::int64_t last = plan.doc_shard_offsets[static_cast<std::size_t>(d + 1)];
    for (std::int64_t p = 0; p < last - first; ++p) {
      const auto shard =
          static_cast<std::size_t>(plan.doc_shards[static_cast<std::size_t>(first + p)]);
      const std::int32_t begin = plan.kv_begin[shard];
      require(before <= begin && begin <= p, who, ": plan.kv_begin[", shard, "] = ", begin,
              ", expected ", before, "..", p, " (position ", p, " of document ", d, ")");
      before = begin;
    }
  }
}

}  // namespace

std::string_view to_string(KvLayout layout) {
  return layout == KvLayout::per_query ? "per_query" : "per_rank";
}

KvLayout kv_layout_from_name(const char* who, std::string_view name) {
  require(name == "per_rank" || name == "per_query", who, ": kv_layout = \"", name,
          "\", expected \"per_rank\" or \"per_query\"");
  return name == "per_query" ? KvLayout::per_query : KvLayout::per_rank;
}

std::string_view to_string(MaskKind mask) { return mask == MaskKind::full ? "full" : "causal"; }

MaskKind mask_from_name(const char* who, std::string_view name) {
  require(name == "causal" || name == "full", who, ": mask = \"", name,
          "\", expected \"causal\" or \"full\"");
  return name == "full" ? MaskKind::full : MaskKind::causal;
}

void QkvPlan::check(const char* who) const {
  require(1 <= world_size && world_size <= max_world_size, who, ": plan.world_size = ", world_size,
          ", expected 1..", max_world_size);
  require(num_shards() <= std::numeric_limits<std::int32_t>::max(), who, ": plan has ",
          num_shards(), " shards, expected at most 2^31 - 1");
  check_offsets(who, "rank_shard_offsets", rank_shard_offsets, world_size, num_shards());
  check_shards(*this, who);
  require(std::ssize(doc_shards) == num_shards(), who, ": plan.doc_shards has ", doc_shards.size(),
          " values, expected ", num_shards(), ", each shard once");
  check_offsets(who, "doc_shard_offsets", doc_shard_offsets, num_documents(), num_shards());
  check_documents(*this, who);
  check_windows(*this, who);
}

}  // namespace waybill
