#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../rank/gpu_rank.h"
#include "params.h"

namespace waybill::cuda {

/// Makes a device the current one of the thread, which may be any.
class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device) {
    (void)cudaGetDevice(&before_);
    if (before_ != device_) (void)cudaSetDevice(device_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() {
    if (before_ != device_) (void)cudaSetDevice(before_);
  }

 private:
  int device_;
  int before_ = 0;
};

/// The work of a call: its stream, and the recording (a CUDA graph) that it goes to; 0: none.
struct TableCall {
  cudaStream_t stream = nullptr;
  std::uint64_t capture = 0;
};

/// @throws CudaError, or what the rank's kernels have reported
[[nodiscard]] TableCall table_call(const GpuRank& gpu, cudaStream_t stream);

/// A block of device memory, and who still works with it.
struct TableBlock {
  struct Use {
    cudaStream_t stream;
    cudaEvent_t event;  ///< behind the last work with it on that stream
    bool is_old;        ///< of an earlier owner
  };

  TableBlock() = default;
  TableBlock(const TableBlock&) = delete;
  TableBlock& operator=(const TableBlock&) = delete;
  ~TableBlock();

  std::shared_ptr<void> device;
  std::shared_ptr<void> counts;  ///< pinned, [3 W] HostCount, where asked for
  std::int64_t size_bytes = 0;
  cudaStream_t taken_on = nullptr;  ///< it waits for all old uses
  std::mutex mutex;                 ///< of what follows
  std::vector<Use> uses;
  std::vector<cudaEvent_t> idle_events;
  /// Recording for which it was taken: its graph may write the block at any time.
  std::uint64_t capture = 0;
  /// A graph reads what something else has written: what the block holds must stay.
  bool stays = false;
};

class TablePool;

/// Memory of one dispatch's tables, or of a part of them. The pool gets it back when this dies, on
/// whatever thread: nothing is asked of a stream then, as the caller may have destroyed it.
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

  /// Behind work with the memory on a stream: who gets it next waits for that. Nobody gets it any
  /// more once a graph uses it for which it was not taken. From any thread.
  void note_use(const TableCall& call) const;

 private:
  friend class TablePool;
  void swap(TableMemory& other) noexcept {
    pool_.swap(other.pool_);
    block_.swap(other.block_);
  }

  std::shared_ptr<TablePool> pool_;
  mutable std::list<TableBlock> block_;  ///< one or none; its node goes to and fro
};

/// Keeps memory of tables that are gone for the next ones: freeing would wait for the device. What
/// was taken for a recording serves other recordings alone, whose graphs write before they read.
/// Threads may give back while one takes.
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

}  // namespace waybill::cuda
