#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "experts/row_tag.h"
#include "runtime/executor.h"
#include "transport/transport.h"
#include "waybill/moe/ep_config.h"

namespace waybill {

/// Byte offsets in a dispatch window, in which a rank receives up to `capacity_rows` rows.
struct ExpertWindowLayout {
  std::int64_t rows = 0;     ///< [capacity_rows, row_bytes]
  std::int64_t tags = 0;     ///< [capacity_rows] RowTag
  std::int64_t scales = 0;   ///< [capacity_rows, num_scales]
  std::int64_t weights = 0;  ///< [capacity_rows, weights_per_row] weight_dtype
  std::int64_t topk = 0;  ///< compact rows: [capacity_rows, topk] int32 local expert, -1: not here
  std::int64_t total = 0;

  std::int64_t row_bytes = 0;
  std::int64_t scale_bytes = 0;      ///< all scales of a row
  std::int64_t weight_bytes = 0;     ///< one weight
  std::int64_t weights_per_row = 1;  ///< topk for compact rows
};
[[nodiscard]] ExpertWindowLayout expert_window_layout(const EPConfig& config,
                                                      const EPDispatchOptions& options,
                                                      std::int64_t capacity_rows);

/// Byte offsets in the workspace, through which ranks exchange data of fixed size. M = max_tokens,
/// N nodes. An entry by source node is written by the rank with the same local index there.
struct ExpertWorkspaceLayout {
  std::int64_t counts[2] = {};       ///< [W, num_counts] int32, by parity of the dispatch
  std::int64_t slot_counts[2] = {};  ///< with spare experts: the same of slot_config
  // Several nodes only:
  std::int64_t forward_rows = 0;     ///< [N, M, row_bytes]: tokens to forward in this node
  std::int64_t forward_scales = 0;   ///< [N, M, num_scales]
  std::int64_t forward_weights = 0;  ///< [N, M, topk] weight_dtype
  std::int64_t forward_ids = 0;      ///< [N, M, topk] int32, a dropped topk slot num_experts
  std::int64_t partial_sums = 0;     ///< [N, M, hidden] token_dtype: sums of node n, by token
  std::int64_t sums = 0;             ///< the same of this node, on their way to node n; on GPUs
  std::int64_t total = 0;
};
[[nodiscard]] ExpertWorkspaceLayout expert_workspace_layout(const EPConfig& config,
                                                            const EPDispatchOptions& options);

/// Signals of a layer, W slots each: rank r raises slot kind * W + r to the number of the call.
/// After them come num_executor_slots counters of the executor and the fingerprints of calls:
/// with_fingerprints(num_layer_signals(W), W) slots in all.
enum class ExpertSignal : std::uint8_t {
  entered,    ///< this call has begun: counts are on the workspace, or expert outputs in the window
  forwarded,  ///< several nodes: tokens, ids and weights for this rank to forward have arrived
  arrived,    ///< this rank has written all its rows into the windows of its node
  shared,     ///< several nodes: sums of this rank's node have arrived
  posted,     ///< several nodes, on GPUs: ids and weights have arrived, rows not yet
  planned,    ///< with spare experts: counts of slots are on the workspace
};
inline constexpr std::int64_t num_expert_signals = 6;

/// Signals before the fingerprints (with_fingerprints).
[[nodiscard]] constexpr std::int64_t num_layer_signals(std::int32_t world_size) {
  return num_expert_signals * world_size + num_executor_slots;
}

/// The symmetric memory of a layer. Windows alternate; the workspace and the signals stay.
struct ExpertMemory {
  std::string name;  ///< " of layer 3": distinguishes the memory of this layer from all other
  std::int64_t capacity_rows = 0;  ///< rows of each window
  ExpertWindowLayout window;
  ExpertWorkspaceLayout workspace_layout;
  SymmetricBuffer dispatch_windows[2];  ///< by parity of the dispatch
  SymmetricBuffer combine_windows[2];   ///< by parity of the combine: [capacity_rows, hidden]
  SymmetricBuffer workspace;
  SignalPad signals;
  std::vector<SymmetricBuffer> retired;  ///< outgrown windows; their rows may still be read
};

}  // namespace waybill
