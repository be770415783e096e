#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "experts/expert_executor.h"
#include "transport/transport.h"
#include "waybill/moe/expert_routing.h"

// A layer of experts in host memory: the tables of a dispatch, and one rank's part in a call.

namespace waybill::detail {

/// The routing of a dispatch in host memory. N nodes, M = max_tokens, K = topk. `config` is
/// slot_config.
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

  /// The ids of this local index's rank on a node, and the rows of its topk slots: [T, K].
  [[nodiscard]] std::span<std::int32_t> ids_of(std::int32_t node);
  [[nodiscard]] std::span<std::int32_t> dst_rows_of(std::int32_t node);
  [[nodiscard]] std::span<const std::int32_t> ids_of(std::int32_t node) const;
  [[nodiscard]] std::span<const std::int32_t> dst_rows_of(std::int32_t node) const;
  /// The index of a node's first id in `ids` and in the weights of a dispatch.
  [[nodiscard]] std::int64_t first_entry(std::int32_t node) const {
    return config_.is_intra_node() ? 0 : node * config_.max_tokens * config_.topk;
  }
  /// The shape of ids and weights, as ExpertTableViews says.
  [[nodiscard]] Shape shape_by_id() const;

  /// The rank with this local index on a node.
  [[nodiscard]] std::int32_t peer(std::int32_t node) const {
    return node * config_.local_world_size + config_.rank % config_.local_world_size;
  }
  [[nodiscard]] std::int32_t own_node() const { return config_.rank / config_.local_world_size; }

  /// Rows that this rank received in a window with `capacity_rows`.
  [[nodiscard]] std::int64_t num_rows(std::int64_t capacity_rows) const;

  /// Finds which rows belong to the same token.
  void read_tags(std::span<const RowTag> received);
  /// Compact rows: makes the maps to and from grouped rows. @param received [R, K] local experts
  void read_topk(std::span<const std::int32_t> received);

  std::shared_ptr<const ExpertRows> rows;    ///< perhaps shared with other ranks
  std::shared_ptr<const ExpertSlots> slots;  ///< with spare experts; the same
  std::vector<std::int32_t> slot_quotas;     ///< those of slots->plan
  std::int32_t required_rows = 0;            ///< rows->largest_recv_rows
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
  std::string wrong_positions;          ///< why they are wrong; this rank then sends nothing
  const std::byte* cleared_window = nullptr;  ///< in which route() cleared the tags

 private:
  EPConfig config_;
  EPDispatchOptions options_;
};

/// One dispatch in host memory.
class HostExpertTables final : public ExpertTables {
 public:
  /// @param made the same routing, if this dispatch makes it: it may write it until finish()
  HostExpertTables(std::shared_ptr<const HostExpertRouting> routing, DType weight_dtype,
                   std::shared_ptr<HostExpertRouting> made = nullptr)
      : routing_(std::move(routing)), being_made_(std::move(made)), weight_dtype_(weight_dtype) {}

  [[nodiscard]] const HostExpertRouting& routing() const override { return *routing_; }
  [[nodiscard]] const std::shared_ptr<const HostExpertRouting>& shared_routing() const {
    return routing_;
  }
  [[nodiscard]] ConstTensorView weights() const override;

  /// Null if the routing belongs to an earlier dispatch, and once this one is done.
  [[nodiscard]] HostExpertRouting* being_made() const { return being_made_.get(); }
  void finish() { being_made_.reset(); }

  /// Makes room for the weights of all topk slots.
  void carry_weights();
  [[nodiscard]] bool has_weights() const { return has_weights_; }
  /// The weights of this local index's rank on a node: [T, K] of weight_dtype; null without.
  [[nodiscard]] std::byte* weights_of(std::int32_t node);
  [[nodiscard]] const std::byte* weights_of(std::int32_t node) const;

  std::vector<std::byte> recv_weights;  ///< weights of the received rows, as in the window

 private:
  std::shared_ptr<const HostExpertRouting> routing_;
  std::shared_ptr<HostExpertRouting> being_made_;
  DType weight_dtype_;
  bool has_weights_ = false;
  std::vector<std::byte> weights_;  ///< like the routing's ids
};

/// One rank's part in one call: the surroundings, and what ranks exchange in host memory.
struct HostExpertCall {
  Transport& transport;
  const EPConfig& config;   ///< slot_config: what is said of experts is of slots
  const EPConfig& experts;  ///< the config given: without spare experts the same
  const EPDispatchOptions& options;
  const ExpertMemory& memory;
  const ExpertCall& call;

  void raise(ExpertSignal kind, std::int32_t peer) const {
    transport.signal(Rank{peer}, slot(kind, config.rank), call.epoch);
  }

  /// @throws Timeout; Disagreement instead when a rank has said that it means another call
  void wait_for(ExpertSignal kind, std::int32_t peer) const;

  /// Raises a signal at the other ranks of the `count` that are numbered together, this one among
  /// them, and waits for all of them.
  void raise_and_wait(ExpertSignal kind, std::int32_t count) const;

  /// Enters the call: waits until all ranks have, and mean the same. @throws as wait_for
  void enter() const;

  /// Writes a piece to a rank's part of a buffer.
  void put(const SymmetricBuffer& buffer, std::int32_t peer, std::int64_t offset,
           const void* source, std::int64_t size_bytes) const {
    transport.put(buffer, {Rank{peer}, offset, static_cast<const std::byte*>(source), size_bytes});
  }

  /// A place of this rank's workspace.
  template <class Element>
  [[nodiscard]] const Element* workspace(std::int64_t offset) const {
    return reinterpret_cast<const Element*>(memory.workspace.local + offset);
  }

  [[nodiscard]] SignalSlot slot(ExpertSignal kind, std::int32_t rank) const {
    return {&memory.signals, static_cast<std::int64_t>(kind) * config.world_size + rank};
  }
};

/// The functions of ExpertExecutor with the same names.
[[nodiscard]] std::shared_ptr<HostExpertTables> host_route(const HostExpertCall& at,
                                                           const ExpertDispatchInput& input);
[[nodiscard]] std::shared_ptr<HostExpertTables> host_enter(const HostExpertCall& at,
                                                           const ExpertDispatchInput& input,
                                                           const HostExpertTables& earlier);
void host_dispatch(const HostExpertCall& at, const ExpertDispatchInput& input,
                   HostExpertTables& tables);

/// Orders and roundings are those of simulate_expert_combine.
void host_combine(const HostExpertCall& at, const ExpertCombineInput& input,
                  const HostExpertTables& tables);

/// Weighs the gradients of the first `num_rows` rows as ExpertGradientInput says.
void weigh_gradients(const ExpertGradientInput& input, std::int64_t num_rows);

}  // namespace waybill::detail
