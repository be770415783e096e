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

/// Byte offsets of the tables of one dispatch in its device memory.
struct TableLayout {
  TableLayout(const EPConfig& config, const EPDispatchOptions& options, std::int64_t capacity);

  std::int64_t capacity;
  std::int64_t ids, dst_rows, weights, places, records;
  std::int64_t num_input_tokens, splits, segment_offsets, expert_counts, expert_offsets;
  std::int64_t num_recv_rows, leader_rows, choice_rows, tags;
  std::int64_t compact_to_grouped, grouped_to_compact, topk;
  std::int64_t total;
};

/// Memory of one dispatch's tables.
struct TableMemory {
  std::shared_ptr<void> device;
  std::shared_ptr<void> counts;  ///< pinned MoeHostCounts
  std::int64_t capacity = 0;
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

  [[nodiscard]] TableMemory take(const TableLayout& layout, cudaStream_t stream, bool capturing);
  void give_back(TableMemory memory);

 private:
  std::shared_ptr<GpuRank> gpu_;
  std::vector<TableMemory> free_;
};

class GpuExpertTables final : public ExpertTables {
 public:
  GpuExpertTables(const EPConfig& config, const EPDispatchOptions& options,
                  const TableLayout& layout, std::shared_ptr<TablePool> pool,
                  std::shared_ptr<GpuRank> gpu, TableMemory memory);
  ~GpuExpertTables() override;

  [[nodiscard]] ExpertTableViews views() const override;
  [[nodiscard]] std::span<const std::int32_t> wait_counts() override;

  template <class T = std::int32_t>
  [[nodiscard]] T* part(std::int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory_.device.get()) + offset);
  }
  [[nodiscard]] const TableLayout& layout() const noexcept { return layout_; }
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
  [[nodiscard]] ConstTensorView view(std::int64_t offset, Shape shape) const;

  EPConfig config_;
  EPDispatchOptions options_;
  TableLayout layout_;
  std::shared_ptr<TablePool> pool_;
  std::shared_ptr<GpuRank> gpu_;
  TableMemory memory_;
  std::vector<std::int32_t> num_recv_rows_;
};

}  // namespace waybill::cuda
