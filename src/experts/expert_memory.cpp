#include "experts/expert_memory.h"

#include "core/memory_layout.h"
#include "waybill/moe/expert_routing.h"

namespace waybill {
namespace {

constexpr std::int64_t int_bytes = sizeof(std::int32_t);

}  // namespace

ExpertWindowLayout expert_window_layout(const EPConfig& config, const EPDispatchOptions& options,
                                        std::int64_t capacity_rows) {
  const bool compact = options.rows == EPRows::compact;
  const std::int64_t weights = compact ? config.topk : 1;
  detail::MemoryLayout parts;
  ExpertWindowLayout layout;
  layout.rows = parts.take(capacity_rows * payload_row_bytes(config, options));
  layout.tags = parts.take(capacity_rows * static_cast<std::int64_t>(sizeof(RowTag)));
  layout.scales = parts.take(capacity_rows * scale_row_bytes(config, options));
  layout.weights = parts.take(capacity_rows * weights * dtype_bytes(config.weight_dtype));
  layout.topk = parts.take(compact ? capacity_rows * config.topk * int_bytes : 0);
  layout.total = parts.total();
  return layout;
}

ExpertWorkspaceLayout expert_workspace_layout(const EPConfig& config,
                                              const EPDispatchOptions& options) {
  detail::MemoryLayout parts;
  ExpertWorkspaceLayout layout;
  for (std::int64_t& counts : layout.counts) {
    counts = parts.take(config.world_size * num_counts(config) * int_bytes);
  }
  // On one node nothing is forwarded, and every part below is empty.
  const std::int64_t nodes = config.is_intra_node() ? 0 : config.num_nodes();
  const std::int64_t tokens = nodes * config.max_tokens;
  layout.forward_rows = parts.take(tokens * payload_row_bytes(config, options));
  layout.forward_scales = parts.take(tokens * scale_row_bytes(config, options));
  layout.forward_weights = parts.take(tokens * config.topk * dtype_bytes(config.weight_dtype));
  layout.forward_ids = parts.take(tokens * config.topk * int_bytes);
  layout.partial_sums = parts.take(tokens * config.hidden * dtype_bytes(config.token_dtype));
  layout.sums = parts.take(tokens * config.hidden * dtype_bytes(config.token_dtype));
  layout.total = parts.total();
  return layout;
}

}  // namespace waybill
