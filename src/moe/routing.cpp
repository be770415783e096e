#include <algorithm>
#include <limits>

#include "core/to_size.h"
#include "waybill/core/error.h"
#include "waybill/moe/expert_routing.h"

namespace waybill {

using detail::to_size;

namespace {

template <class Id>
std::vector<std::int32_t> read_ids(const EPConfig& config, const EPDispatchOptions& options,
                                   const ConstTensorView& ids, const char* who) {
  const std::int64_t tokens = ids.shape[0];
  const std::int64_t dropped = options.dropped(config);
  std::vector<std::int32_t> result(tokens * config.topk);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t k = 0; k < config.topk; ++k) {
      const std::byte* const place = ids.data + (t * ids.strides[0] + k * ids.strides[1]) *
                                                    static_cast<std::int64_t>(sizeof(Id));
      const std::int64_t id = *reinterpret_cast<const Id*>(place);
      require((0 <= id && id < config.num_experts) || id == dropped, who, ": exp_indices[", t, "][",
              k, "] = ", id, ", expected 0..", config.num_experts - 1, ", or ", dropped,
              " for a dropped topk slot");
      result[t * config.topk + k] =
          static_cast<std::int32_t>(id == dropped ? config.num_experts : id);
    }
  }
  return result;
}

std::int32_t padded(std::int32_t rows, std::int64_t alignment) {
  return static_cast<std::int32_t>((rows + alignment - 1) / alignment * alignment);
}

/// Fills the segments of one receiver, by local expert and source.
void locate_segments(const EPConfig& config, const EPDispatchOptions& options, std::int32_t dst,
                     ExpertRows& rows) {
  const std::int64_t world = config.world_size;
  const std::int64_t experts = config.num_experts_per_rank();
  std::int32_t base = 0;
  for (std::int64_t p = 0; p < experts; ++p) {
    std::int32_t next = base;
    for (std::int64_t src = 0; src < world; ++src) {
      rows.segment_offsets[(dst * experts + p) * world + src] = next;
      next += rows.splits[src * (config.num_experts + 1) + dst * experts + p];
    }
    rows.expert_counts[dst * experts + p] = next - base;
    rows.expert_offsets[dst * (experts + 1) + p] = base;
    base += padded(next - base, options.expert_alignment);
  }
  rows.expert_offsets[dst * (experts + 1) + experts] = base;

  std::int32_t compact = 0;
  for (std::int64_t src = 0; src < world; ++src) {
    rows.compact_offsets[dst * (world + 1) + src] = compact;
    compact += rows.rank_tokens[src * world + dst];
  }
  rows.compact_offsets[dst * (world + 1) + world] = compact;
  rows.num_recv_rows[dst] = options.rows == EPRows::grouped ? base : compact;
}

}  // namespace

std::vector<std::int32_t> read_expert_ids(const EPConfig& config, const EPDispatchOptions& options,
                                          const ConstTensorView& ids, const char* who) {
  require(ids.ndim() == 2 && ids.shape[1] == config.topk && ids.shape[0] >= 0, who,
          ": exp_indices has shape ", to_string(ids.shape), ", expected [num_tokens, ", config.topk,
          "]");
  require(ids.shape[0] <= config.max_tokens, who, ": exp_indices has ", ids.shape[0],
          " tokens, expected at most max_tokens = ", config.max_tokens);
  if (ids.dtype == DType::int32) return read_ids<std::int32_t>(config, options, ids, who);
  if (ids.dtype == DType::int64) return read_ids<std::int64_t>(config, options, ids, who);
  throw_invalid(who, ": exp_indices is ", ids.dtype, ", expected int32 or int64");
}

std::vector<std::int32_t> count_topk_slots(const EPConfig& config,
                                           std::span<const std::int32_t> ids) {
  std::vector<std::int32_t> counts(num_counts(config));
  const std::int64_t topk = config.topk;
  const auto tokens = static_cast<std::int64_t>(ids.size()) / topk;
  std::vector<std::int64_t> last_token(config.world_size, -1);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t k = 0; k < topk; ++k) {
      const std::int32_t expert = ids[t * topk + k];
      ++counts[expert];
      if (expert == config.num_experts) continue;
      const std::int32_t rank = config.rank_of_expert(expert);
      if (last_token[rank] == t) continue;
      last_token[rank] = t;
      ++counts[config.num_experts + 1 + rank];
    }
  }
  return counts;
}

ExpertRows locate_rows(const EPConfig& config, const EPDispatchOptions& options,
                       std::span<const std::span<const std::int32_t>> counts) {
  const std::int64_t world = config.world_size;
  const std::int64_t experts = config.num_experts_per_rank();
  const std::int64_t bins = config.num_experts + 1;
  ExpertRows rows;
  rows.splits.reserve(world * bins);
  for (std::int64_t src = 0; src < world; ++src) {
    const auto record = counts[src];
    rows.splits.insert(rows.splits.end(), record.begin(), record.begin() + bins);
    rows.rank_tokens.insert(rows.rank_tokens.end(), record.begin() + bins, record.end());
    std::int64_t topk_slots = 0;
    for (std::int64_t e = 0; e < bins; ++e) topk_slots += record[e];
    if (topk_slots % config.topk != 0) {
      throw InternalError(concat("locate_rows: rank ", src, " has ", topk_slots,
                                 " topk slots, expected a multiple of topk = ", config.topk));
    }
    rows.num_input_tokens.push_back(static_cast<std::int32_t>(topk_slots / config.topk));
  }
  rows.segment_offsets.resize(world * experts * world);
  rows.expert_counts.resize(world * experts);
  rows.expert_offsets.resize(world * (experts + 1));
  rows.compact_offsets.resize(world * (world + 1));
  rows.num_recv_rows.resize(world);
  for (std::int32_t dst = 0; dst < world; ++dst) locate_segments(config, options, dst, rows);
  rows.largest_recv_rows = *std::ranges::max_element(rows.num_recv_rows);
  return rows;
}

ExpertRows locate_rows(const EPConfig& config, const EPDispatchOptions& options,
                       std::span<const std::int32_t> counts) {
  const std::size_t count = num_counts(config);
  std::vector<std::span<const std::int32_t>> by_rank;
  for (std::size_t src = 0; src < to_size(config.world_size); ++src)
    by_rank.push_back(counts.subspan(src * count, count));
  return locate_rows(config, options, by_rank);
}

}  // namespace waybill
