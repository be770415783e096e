#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "../rank/gpu_rank.h"
#include "experts/expert_executor.h"
#include "kernels.h"
#include "schedule/workspace_phase.h"
#include "waybill/core/host_tensor.h"

namespace waybill::cuda {

/// The stream of a call, and the CUDA graph that records the call; 0: none.
struct TableCall {
  cudaStream_t stream = nullptr;
  std::uint64_t capture = 0;
};

/// @throws CudaError, or the error that the rank's kernels have reported
[[nodiscard]] TableCall table_call(const GpuRank& gpu, cudaStream_t stream);

/// A block of device memory, and the streams that still work with it.
struct TableBlock {
  struct Use {
    cudaStream_t stream;
    cudaEvent_t event;  ///< recorded after the last work on that stream
    bool is_old;        ///< an earlier owner's use
  };

  TableBlock() = default;
  TableBlock(const TableBlock&) = delete;
  TableBlock& operator=(const TableBlock&) = delete;
  ~TableBlock();

  std::shared_ptr<void> device;
  std::shared_ptr<void> counts;  ///< pinned, [3 W] HostCount; null unless asked for
  std::int64_t size_bytes = 0;
  cudaStream_t taken_on = nullptr;  ///< this stream waits for all old uses
  std::mutex mutex;                 ///< guards the members below
  std::vector<Use> uses;
  std::vector<cudaEvent_t> idle_events;
  /// The recording that took the block: its graph may write the block at any time.
  std::uint64_t capture = 0;
  /// A graph reads what other work has written, so the block must keep its content.
  bool stays = false;
};

class TablePool;

/// Memory of one dispatch's tables, or of a part of them. The destructor gives it back to the pool,
/// on any thread. It does not use a stream, as the caller may have destroyed it.
class TableMemory {
 public:
  TableMemory() = default;
  TableMemory(TableMemory&& other) noexcept { swap(other); }
  TableMemory& operator=(TableMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~TableMemory();

  [[nodiscard]] bool is_there() const noexcept { return !block_.empty(); }
  [[nodiscard]] std::byte* data() const {
    return static_cast<std::byte*>(block_.front().device.get());
  }
  [[nodiscard]] HostCount* counts() const {
    return static_cast<HostCount*>(block_.front().counts.get());
  }

  /// Must be called after work with the memory is queued: the next owner waits for that work. If a
  /// graph uses memory that was not taken for it, the memory never gets another owner. Any thread
  /// may call it.
  void note_use(const TableCall& call) const;

 private:
  friend class TablePool;
  void swap(TableMemory& other) noexcept {
    pool_.swap(other.pool_);
    block_.swap(other.block_);
  }

  std::shared_ptr<TablePool> pool_;
  mutable std::list<TableBlock> block_;  ///< one or none; its node moves between here and the pool
};

/// Keeps the memory of dead tables for the next ones, because freeing it would wait for the device.
/// Memory that was taken for a recording serves only other recordings, whose graphs write before
/// they read. One thread may take while others give back.
class TablePool : public std::enable_shared_from_this<TablePool> {
 public:
  explicit TablePool(std::shared_ptr<GpuRank> gpu) : gpu_(std::move(gpu)) {}
  TablePool(const TablePool&) = delete;
  TablePool& operator=(const TablePool&) = delete;

  [[nodiscard]] TableMemory take(std::int64_t size_bytes, bool with_counts, const TableCall& call);

 private:
  friend class TableMemory;
  void find(std::int64_t size_bytes, bool with_counts, bool recorded, std::list<TableBlock>& to);
  void give_back(std::list<TableBlock>& block) noexcept;

  std::shared_ptr<GpuRank> gpu_;
  std::mutex mutex_;
  std::list<TableBlock> free_;
  std::list<TableBlock> staying_;
};

/// One table of a routing: where it begins, and its shape. Its elements are int32 unless its
/// declaration says otherwise.
struct DeviceTable {
  std::int64_t offset = 0;
  Shape shape;
  bool by_row = false;  ///< it has one entry per received row
};

/// The tables of a routing, one after another.
struct RoutingTables {
  RoutingTables(const EPConfig& config, const EPDispatchOptions& options,
                std::int64_t capacity_rows);

  // The sizes of these are known before any row arrives.
  DeviceTable ids, dst_rows;
  DeviceTable addresses;  ///< int64
  DeviceTable records, grouped_to_compact, send_reqs;
  DeviceTable num_input_tokens, splits, segment_offsets, expert_counts, expert_offsets;
  DeviceTable num_recv_rows;              ///< [W + 1]: of each rank, then the maximum
  DeviceTable node_tokens, node_counts;   ///< see NodeRowsParams
  DeviceTable slot_experts, slot_quotas;  ///< spare experts: [W, P], see ExpertTableViews
  // These have one entry per received row.
  std::int64_t capacity_rows;
  DeviceTable tags;  ///< [capacity_rows, 4]: RowTag
  DeviceTable primary_rows, topk_slot_rows, compact_to_grouped, topk;
  std::int64_t first_by_row;  ///< the first byte of the tables by row
  std::int64_t total_bytes;
};

/// The routing of a dispatch on a GPU. The dispatch that makes it may write to it until others use
/// it; they have it const.
class GpuExpertRouting final : public ExpertRouting {
 public:
  /// @param capacity_rows received rows that the tables can hold; fit() may raise it
  /// @param num_tokens this rank's tokens
  /// @param ticket number of the route that fills the tables
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
  /// Must be called before the route, which then counts the rows to and from each node, too.
  void expect_node_rows() noexcept { counts_nodes_ = true; }
  /// The rows between nodes. It waits like wait_counts().
  [[nodiscard]] const NodeRows& wait_node_rows() const;
  /// The shape of ids and weights, as ExpertTableViews says.
  [[nodiscard]] Shape shape_by_id() const;

  /// Makes the tables by row hold `capacity_rows` rows, if windows have grown. Call it before rows
  /// arrive.
  void fit(std::int64_t capacity_rows, const TableCall& call);

  template <class T = std::int32_t>
  [[nodiscard]] const T* part(const DeviceTable& table) const {
    return reinterpret_cast<const T*>(data_of(table));
  }
  template <class T = std::int32_t>
  [[nodiscard]] T* part(const DeviceTable& table) {
    return reinterpret_cast<T*>(data_of(table));
  }
  [[nodiscard]] const RoutingTables& tables() const noexcept { return tables_; }
  [[nodiscard]] HostCount* counts() { return memory_.counts(); }
  [[nodiscard]] HostCount* node_counts() { return memory_.counts() + config_.world_size; }
  [[nodiscard]] std::int64_t num_tokens() const noexcept { return num_tokens_; }
  [[nodiscard]] std::uint64_t ticket() const noexcept { return ticket_; }

  /// Must be called after work that uses the tables is queued.
  void note_use(const TableCall& call) const;

 private:
  [[nodiscard]] std::int32_t num_counts() const {
    return config_.world_size + (counts_nodes_ ? 2 * config_.num_nodes() : 0);
  }
  [[nodiscard]] std::byte* data_of(const DeviceTable& table) const {
    if (!table.by_row || !grown_.is_there()) return memory_.data() + table.offset;
    return grown_.data() + table.offset - tables_.first_by_row;
  }

  EPConfig config_;
  EPDispatchOptions options_;
  RoutingTables tables_;
  std::int64_t num_tokens_;
  std::uint64_t ticket_;
  std::shared_ptr<TablePool> pool_;
  std::shared_ptr<GpuRank> gpu_;
  cudaStream_t stream_;  ///< the stream of the route
  TableMemory memory_;
  TableMemory grown_;  ///< the tables by row, if windows have grown meanwhile
  mutable std::mutex mutex_;
  bool counts_nodes_ = false;
  mutable std::vector<std::int32_t> num_recv_rows_;  ///< written once
  mutable NodeRows node_rows_;                       ///< written once
  mutable std::atomic<bool> has_waited_ = false;     ///< the two above are valid
};

/// One dispatch on a GPU.
class GpuExpertTables final : public ExpertTables {
 public:
  /// @param being_made the routing, if this dispatch makes it; null if it is an earlier one
  /// @param weights empty if it carries none
  GpuExpertTables(std::shared_ptr<const GpuExpertRouting> routing,
                  std::shared_ptr<GpuExpertRouting> being_made, TableMemory weights,
                  DType weight_dtype, const TableCall& call);
  ~GpuExpertTables() override;

  [[nodiscard]] const GpuExpertRouting& routing() const override { return *routing_; }
  [[nodiscard]] const std::shared_ptr<const GpuExpertRouting>& shared_routing() const {
    return routing_;
  }
  [[nodiscard]] ConstTensorView weights() const override;

  /// Null if the routing is that of an earlier dispatch, or this dispatch is finished.
  [[nodiscard]] GpuExpertRouting* being_made() const { return being_made_.get(); }
  /// Must be called when the dispatch is queued on the stream.
  void finish(const TableCall& call);

  [[nodiscard]] bool has_weights() const noexcept { return weights_.is_there(); }
  /// Null without weights.
  [[nodiscard]] const std::byte* weight_data() const {
    return has_weights() ? weights_.data() : nullptr;
  }
  [[nodiscard]] std::byte* weight_data() { return has_weights() ? weights_.data() : nullptr; }

  /// Takes memory for the weights of received rows.
  /// @return where the dispatch writes them
  [[nodiscard]] std::byte* keep_weights(TableMemory received) {
    received_ = std::move(received);
    return received_.data();
  }
  [[nodiscard]] const std::byte* received_weights() const {
    return received_.is_there() ? received_.data() : nullptr;
  }

  /// Must be called after work that uses the routing, or also the weights, is queued.
  void note_use(const TableCall& call, bool with_weights) const;

 private:
  std::shared_ptr<const GpuExpertRouting> routing_;
  std::shared_ptr<GpuExpertRouting> being_made_;
  TableMemory weights_;
  TableMemory received_;
  DType weight_dtype_;
  std::optional<TableCall> begun_;  ///< set until the dispatch is queued
};

}  // namespace waybill::cuda
