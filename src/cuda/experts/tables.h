#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "../rank/gpu_rank.h"
#include "experts/expert_executor.h"
#include "params.h"
#include "schedule/node_rows.h"
#include "table_pool.h"

namespace waybill::cuda {

/// Byte offsets of a routing's tables in its memory: those whose size is known ahead, then those
/// that have an entry a received row.
struct FixedTables {
  FixedTables(const EPConfig& config, const EPDispatchOptions& options);

  std::int64_t ids, dst_rows, addresses, records, grouped_to_compact, send_reqs;
  std::int64_t num_input_tokens, splits, segment_offsets, expert_counts, expert_offsets;
  std::int64_t num_recv_rows;
  std::int64_t node_tokens, node_counts;  ///< see NodeRowsParams
  std::int64_t total;
};

struct RowTables {
  /// @param first where they begin in the memory
  RowTables(const EPConfig& config, const EPDispatchOptions& options, std::int64_t capacity_rows,
            std::int64_t first);

  std::int64_t capacity_rows;  ///< rows
  std::int64_t tags, primary_rows, topk_slot_rows, compact_to_grouped, topk;
  std::int64_t total;  ///< with what lies ahead
};

/// The routing of a dispatch on a GPU. What its dispatch has not written it can write, as long as
/// that holds it alone: others have it const.
class GpuExpertRouting final : public ExpertRouting {
 public:
  /// @param capacity received rows that there is room for; fit() may change it
  /// @param num_tokens of this rank
  /// @param ticket of the route that fills the tables
  GpuExpertRouting(const EPConfig& config, const EPDispatchOptions& options,
                   std::int64_t capacity_rows, std::int64_t num_tokens, std::uint64_t ticket,
                   std::shared_ptr<TablePool> pool, std::shared_ptr<GpuRank> gpu,
                   const TableCall& call);

  [[nodiscard]] ExpertTableViews views() const override;
  [[nodiscard]] std::span<const std::int32_t> wait_counts() const override;
  [[nodiscard]] std::span<const std::int32_t> known_counts() const override {
    return has_waited() ? wait_counts() : std::span<const std::int32_t>{};
  }
  void note_use(const Stream& stream) const override;
  [[nodiscard]] bool has_waited() const noexcept { return has_waited_; }
  /// Ahead of the route: rows to and from each node are counted, too.
  void expect_node_rows() noexcept { counts_nodes_ = true; }
  /// These. Waits as wait_counts().
  [[nodiscard]] const NodeRows& wait_node_rows() const;
  /// The shape of ids and weights, as ExpertTableViews says.
  [[nodiscard]] Shape shape_by_id() const;

  /// Before rows come: room for `capacity` of them, if windows have grown meanwhile.
  void fit(std::int64_t capacity_rows, const TableCall& call);

  template <class T = std::int32_t>
  [[nodiscard]] const T* part(std::int64_t offset) const {
    return reinterpret_cast<const T*>(memory_.data() + offset);
  }
  template <class T = std::int32_t>
  [[nodiscard]] T* part(std::int64_t offset) {
    return reinterpret_cast<T*>(memory_.data() + offset);
  }
  template <class T = std::int32_t>
  [[nodiscard]] const T* row_part(std::int64_t offset) const {
    return reinterpret_cast<const T*>(row_memory().data() + offset);
  }
  template <class T = std::int32_t>
  [[nodiscard]] T* row_part(std::int64_t offset) {
    return reinterpret_cast<T*>(row_memory().data() + offset);
  }
  [[nodiscard]] const FixedTables& fixed() const noexcept { return fixed_; }
  [[nodiscard]] const RowTables& rows() const noexcept { return rows_; }
  [[nodiscard]] HostCount* counts() { return memory_.counts(); }
  [[nodiscard]] HostCount* node_counts() { return memory_.counts() + config_.world_size; }
  [[nodiscard]] std::int64_t num_tokens() const noexcept { return num_tokens_; }
  [[nodiscard]] std::uint64_t ticket() const noexcept { return ticket_; }

  /// Behind work that uses the tables.
  void note_use(const TableCall& call) const;

 private:
  [[nodiscard]] std::int32_t num_counts() const {
    return config_.world_size + (counts_nodes_ ? 2 * config_.num_nodes() : 0);
  }
  [[nodiscard]] const TableMemory& row_memory() const {
    return grown_.is_there() ? grown_ : memory_;
  }

  EPConfig config_;
  EPDispatchOptions options_;
  FixedTables fixed_;
  RowTables rows_;
  std::int64_t num_tokens_;
  std::uint64_t ticket_;
  std::shared_ptr<TablePool> pool_;
  std::shared_ptr<GpuRank> gpu_;
  cudaStream_t stream_;  ///< of the route
  TableMemory memory_;
  TableMemory grown_;  ///< of the row tables, where windows have grown between
  mutable std::mutex mutex_;
  bool counts_nodes_ = false;
  mutable std::vector<std::int32_t> num_recv_rows_;  ///< written once
  mutable NodeRows node_rows_;                       ///< likewise
  mutable std::atomic<bool> has_waited_ = false;     ///< they are there
};

/// One dispatch on a GPU.
class GpuExpertTables final : public ExpertTables {
 public:
  /// Of a dispatch that makes its routing. @param weights not there: it carries none
  GpuExpertTables(std::shared_ptr<GpuExpertRouting> made, TableMemory weights, DType weight_dtype,
                  const TableCall& call);
  /// Of one by a routing that is there.
  GpuExpertTables(std::shared_ptr<const GpuExpertRouting> known, TableMemory weights,
                  DType weight_dtype, const TableCall& call);
  ~GpuExpertTables() override;

  [[nodiscard]] const GpuExpertRouting& routing() const override { return *routing_; }
  [[nodiscard]] const std::shared_ptr<const GpuExpertRouting>& shared_routing() const {
    return routing_;
  }
  [[nodiscard]] ConstTensorView weights() const override;

  /// Null where the routing is that of an earlier dispatch, and once this one is done.
  [[nodiscard]] GpuExpertRouting* being_made() const { return being_made_.get(); }
  /// The dispatch is queued on the stream.
  void finish(const TableCall& call);

  [[nodiscard]] bool has_weights() const noexcept { return weights_.is_there(); }
  /// Null without weights.
  [[nodiscard]] const std::byte* weight_data() const {
    return has_weights() ? weights_.data() : nullptr;
  }
  [[nodiscard]] std::byte* weight_data() { return has_weights() ? weights_.data() : nullptr; }

  /// For those of received rows, as the window has them. @return where they go
  [[nodiscard]] std::byte* keep_weights(TableMemory received) {
    received_ = std::move(received);
    return received_.data();
  }
  [[nodiscard]] const std::byte* received_weights() const {
    return received_.is_there() ? received_.data() : nullptr;
  }

  /// Behind work that uses the routing, and the weights if it did.
  void note_use(const TableCall& call, bool with_weights) const;

 private:
  std::shared_ptr<const GpuExpertRouting> routing_;
  std::shared_ptr<GpuExpertRouting> being_made_;
  TableMemory weights_;
  TableMemory received_;
  DType weight_dtype_;
  std::optional<TableCall> begun_;  ///< until the dispatch is queued
};

}  // namespace waybill::cuda
