#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "waybill/moe/expert_routing.h"
#include "waybill/runtime/expert_executor.h"

namespace waybill::detail {

/// The tables of one dispatch in host memory. N nodes, M = max_tokens, K = topk.
class HostExpertTables final : public ExpertTables {
 public:
  HostExpertTables(const EPConfig& config, const EPDispatchOptions& options)
      : config_(config), options_(options) {}

  [[nodiscard]] ExpertTableViews views() const override;
  [[nodiscard]] std::span<const std::int32_t> wait_counts() override { return rows.num_recv_rows; }

  /// The ids of one node's rank of this local index, and the places of its choices: [T, K].
  [[nodiscard]] std::span<std::int32_t> ids_of(std::int32_t node);
  [[nodiscard]] std::span<std::int32_t> places_of(std::int32_t node);
  [[nodiscard]] std::span<const std::int32_t> ids_of(std::int32_t node) const;
  [[nodiscard]] std::span<const std::int32_t> places_of(std::int32_t node) const;
  /// [T, K] of weight_dtype; null without weights.
  [[nodiscard]] std::byte* weights_of(std::int32_t node);
  [[nodiscard]] const std::byte* weights_of(std::int32_t node) const;

  /// The rank of this local index on a node.
  [[nodiscard]] std::int32_t peer(std::int32_t node) const {
    return node * config_.local_world_size + config_.rank % config_.local_world_size;
  }
  [[nodiscard]] std::int32_t own_node() const { return config_.rank / config_.local_world_size; }

  /// Rows that this rank received, of a window with `capacity`.
  [[nodiscard]] std::int64_t num_rows(std::int64_t capacity) const;

  /// What the tags say: which rows are of the same token.
  void read_tags(std::span<const RowTag> received);
  /// Compact rows: what the local experts of each row say.
  void read_topk(std::span<const std::int32_t> received);

  ExpertRows rows;
  std::vector<std::int32_t> ids;       ///< one node [T, K], else [N, M, K], -1 where there is none
  std::vector<std::int32_t> dst_rows;  ///< [N, M, K]
  bool has_weights = false;
  std::vector<std::byte> weights;         ///< as ids
  std::vector<std::byte> recv_weights;    ///< of the rows received, as in the window
  std::vector<std::int32_t> send_reqs;    ///< several nodes: [N, 2, M]
  std::vector<RowTag> tags;               ///< [R]
  std::vector<std::int32_t> leader_rows;  ///< [R]
  std::vector<std::int32_t> choice_rows;  ///< [R, K]
  std::vector<std::int32_t> recv_topk;    ///< compact rows: [R, K]
  std::vector<std::int32_t> compact_to_grouped;
  std::vector<std::int32_t> grouped_to_compact;
  std::vector<std::int64_t> positions;  ///< full_scatter_indices, [sum of T, K]; empty without
  std::string wrong_positions;          ///< why this rank's cannot be; then it sends nothing

 private:
  [[nodiscard]] std::size_t first_entry(std::int32_t node) const;

  EPConfig config_;
  EPDispatchOptions options_;
};

}  // namespace waybill::detail
