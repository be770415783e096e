#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "experts/expert_executor.h"
#include "waybill/moe/expert_routing.h"

namespace waybill::detail {

/// The routing of a dispatch in host memory. N nodes, M = max_tokens, K = topk.
class HostExpertRouting final : public ExpertRouting {
 public:
  HostExpertRouting(const EPConfig& config, const EPDispatchOptions& options)
      : config_(config), options_(options) {}

  [[nodiscard]] ExpertTableViews views() const override;
  [[nodiscard]] std::span<const std::int32_t> wait_counts() const override {
    return rows->num_recv_rows;
  }
  [[nodiscard]] std::span<const std::int32_t> known_counts() const override {
    return rows->num_recv_rows;
  }

  /// The ids of one node's rank of this local index, and the places of its topk slots: [T, K].
  [[nodiscard]] std::span<std::int32_t> ids_of(std::int32_t node);
  [[nodiscard]] std::span<std::int32_t> places_of(std::int32_t node);
  [[nodiscard]] std::span<const std::int32_t> ids_of(std::int32_t node) const;
  [[nodiscard]] std::span<const std::int32_t> places_of(std::int32_t node) const;
  /// Of the first id of a node, in `ids` and in the weights of a dispatch.
  [[nodiscard]] std::size_t first_entry(std::int32_t node) const;
  /// The shape of ids and weights, as ExpertTableViews says.
  [[nodiscard]] Shape shape_by_id() const;

  /// The rank of this local index on a node.
  [[nodiscard]] std::int32_t peer(std::int32_t node) const {
    return node * config_.local_world_size + config_.rank % config_.local_world_size;
  }
  [[nodiscard]] std::int32_t own_node() const { return config_.rank / config_.local_world_size; }

  /// Rows that this rank received, of a window with `capacity_rows`.
  [[nodiscard]] std::int64_t num_rows(std::int64_t capacity_rows) const;

  /// What the tags say: which rows are of the same token.
  void read_tags(std::span<const RowTag> received);
  /// Compact rows: what the local experts of each row say.
  void read_topk(std::span<const std::int32_t> received);

  std::shared_ptr<const ExpertRows> rows;  ///< perhaps shared with other ranks
  std::int32_t required_rows = 0;          ///< rows->largest_recv_rows
  std::vector<std::int32_t> ids;        ///< one node [T, K], else [N, M, K], -1 where there is none
  std::vector<std::int32_t> dst_rows;   ///< [N, M, K]
  std::vector<std::int32_t> send_reqs;  ///< several nodes: [N, 2, M]
  std::vector<RowTag> tags;             ///< [R]
  std::vector<std::int32_t> primary_rows;    ///< [R]
  std::vector<std::int32_t> topk_slot_rows;  ///< [R, K]
  std::vector<std::int32_t> recv_topk;       ///< compact rows: [R, K]
  std::vector<std::int32_t> compact_to_grouped;
  std::vector<std::int32_t> grouped_to_compact;
  std::vector<std::int64_t> positions;  ///< full_scatter_indices, [sum of T, K]; empty without
  std::string wrong_positions;          ///< why this rank's cannot be; then it sends nothing

 private:
  EPConfig config_;
  EPDispatchOptions options_;
};

/// One dispatch in host memory.
class HostExpertTables final : public ExpertTables {
 public:
  /// Of a dispatch that makes its routing: until it is done (finish) that may be written.
  HostExpertTables(std::shared_ptr<HostExpertRouting> made, DType weight_dtype)
      : routing_(made), being_made_(std::move(made)), weight_dtype_(weight_dtype) {}
  /// Of one by a routing that is there.
  HostExpertTables(std::shared_ptr<const HostExpertRouting> known, DType weight_dtype)
      : routing_(std::move(known)), weight_dtype_(weight_dtype) {}

  [[nodiscard]] const HostExpertRouting& routing() const override { return *routing_; }
  [[nodiscard]] const std::shared_ptr<const HostExpertRouting>& shared_routing() const {
    return routing_;
  }
  [[nodiscard]] ConstTensorView weights() const override;

  /// Null where the routing is that of an earlier dispatch, and once this one is done.
  [[nodiscard]] HostExpertRouting* being_made() const { return being_made_.get(); }
  void finish() { being_made_.reset(); }

  /// Room for the weights of all topk slots.
  void carry_weights();
  [[nodiscard]] bool has_weights() const { return has_weights_; }
  /// Of one node's rank of this local index: [T, K] of weight_dtype; null without weights.
  [[nodiscard]] std::byte* weights_of(std::int32_t node);
  [[nodiscard]] const std::byte* weights_of(std::int32_t node) const;

  std::vector<std::byte> recv_weights;  ///< of the rows received, as in the window

 private:
  std::shared_ptr<const HostExpertRouting> routing_;
  std::shared_ptr<HostExpertRouting> being_made_;
  DType weight_dtype_;
  bool has_weights_ = false;
  std::vector<std::byte> weights_;  ///< as the routing's ids
};

}  // namespace waybill::detail
