#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "../moe/moe_params.h"
#include "gpu_rank.h"
#include "waybill/runtime/expert_executor.h"

namespace waybill::cuda {

/// Byte offsets of the tables whose size is known ahead.
struct FixedTables {
  FixedTables(const EPConfig& config, const EPDispatchOptions& options);

  std::int64_t ids, dst_rows, weights, places, records, grouped_to_compact, send_reqs;
  std::int64_t num_input_tokens, splits, segment_offsets, expert_counts, expert_offsets;
  std::int64_t num_recv_rows;
  std::int64_t total;
};

/// Byte offsets of the tables that have an entry a received row.
struct RowTables {
  RowTables(const EPConfig& config, const EPDispatchOptions& options, std::int64_t capacity);

  std::int64_t capacity;  ///< rows
  std::int64_t tags, leader_rows, choice_rows, compact_to_grouped, topk;
  std::int64_t total;
};

/// Memory of one dispatch's tables, or of a part of them.
struct TableMemory {
  std::shared_ptr<void> device;
  std::shared_ptr<void> counts;  ///< pinned MoeHostCounts
  std::int64_t size_bytes = 0;
  cudaEvent_t used = nullptr;  ///< behind the last work with it
  bool captured = false;       ///< a graph may write it at any time
};

/// Keeps memory of tables that are gone for the next ones: freeing would wait for the device.
class TablePool {
 public:
  explicit TablePool(std::shared_ptr<GpuRank> gpu) : gpu_(std::move(gpu)) {}
  TablePool(const TablePool&) = delete;
  TablePool& operator=(const TablePool&) = delete;
  ~TablePool();

  [[nodiscard]] TableMemory take(std::int64_t size_bytes, cudaStream_t stream, bool capturing);
  void give_back(TableMemory memory);

 private:
  std::shared_ptr<GpuRank> gpu_;
  std::vector<TableMemory> free_;
};

class GpuExpertTables final : public ExpertTables {
 public:
  /// @param capacity received rows that they have room for; fit() may change it
  GpuExpertTables(const EPConfig& config, const EPDispatchOptions& options, std::int64_t capacity,
                  std::shared_ptr<TablePool> pool, std::shared_ptr<GpuRank> gpu,
                  cudaStream_t route_stream, bool capturing);
  ~GpuExpertTables() override;

  [[nodiscard]] ExpertTableViews views() const override;
  [[nodiscard]] std::span<const std::int32_t> wait_counts() override;
  [[nodiscard]] bool has_waited() const noexcept { return !num_recv_rows_.empty(); }

  /// Before rows come: room for `capacity` of them, if windows have grown meanwhile.
  void fit(std::int64_t capacity, cudaStream_t work, bool capturing);

  template <class T = std::int32_t>
  [[nodiscard]] T* part(std::int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory_.device.get()) + offset);
  }
  template <class T = std::int32_t>
  [[nodiscard]] T* row_part(std::int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(row_memory_.device.get()) + offset);
  }
  [[nodiscard]] const FixedTables& fixed() const noexcept { return fixed_; }
  [[nodiscard]] const RowTables& rows() const noexcept { return rows_; }
  [[nodiscard]] MoeHostCounts* counts() const {
    return static_cast<MoeHostCounts*>(memory_.counts.get());
  }

  /// Behind work on the stream that uses the tables. @param capturing the work is recorded
  void note_use(cudaStream_t stream, bool capturing);

  std::int64_t num_tokens = 0;  ///< of this rank
  std::uint64_t ticket = 0;     ///< of the route that fills them
  bool has_weights = false;
  bool are_filled = false;        ///< a dispatch has kept tags and records
  cudaStream_t stream = nullptr;  ///< of the route

 private:
  EPConfig config_;
  EPDispatchOptions options_;
  FixedTables fixed_;
  RowTables rows_;
  std::shared_ptr<TablePool> pool_;
  std::shared_ptr<GpuRank> gpu_;
  TableMemory memory_;
  TableMemory row_memory_;
  std::vector<std::int32_t> num_recv_rows_;
};

}  // namespace waybill::cuda
