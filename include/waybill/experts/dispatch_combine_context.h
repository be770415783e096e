#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "waybill/core/host_tensor.h"
#include "waybill/moe/ep_config.h"
#include "waybill/runtime/world.h"

namespace waybill {

struct EPLayerOptions;
struct ExpertMemory;
struct SignalPad;

/// The buffers in which a rank's rows arrive.
struct DispatchOutputBuffers {
  TensorView rows;     ///< [rows, hidden]
  TensorView weights;  ///< [rows]; of compact rows [rows, topk]
};

/// The symmetric memory of a layer of experts. Collective calls; one object per rank.
class DispatchCombineContext {
 public:
  /// Collective. Windows of max_tokens * topk * capacity_factor rows, the workspace and the
  /// signals.
  /// @param capacity_factor multiplier, as in Triton-distributed
  /// @throws InvalidArgument naming the field, also where the world has other sizes; on all ranks
  ///   naming a rank and what is not the same on all of them; Timeout
  [[nodiscard]] static DispatchCombineContext create(const World& world, const EPConfig& config,
                                                     std::int64_t capacity_factor = 2,
                                                     const EPDispatchOptions& options = {});

  /// The same with windows of this many rows.
  [[nodiscard]] static DispatchCombineContext with_rows(const World& world, const EPConfig& config,
                                                        const EPDispatchOptions& options,
                                                        std::int64_t rows);

  DispatchCombineContext(DispatchCombineContext&& other) noexcept;
  DispatchCombineContext& operator=(DispatchCombineContext&& other) noexcept;
  ~DispatchCombineContext();

  /// Collective: gives the memory back. Without it, it goes with the world. Twice does nothing.
  void finalize();

  /// Collective when they must grow, on all ranks alike: windows of at least this many rows.
  /// Old windows keep their contents until the second growth after, or finalize(). Never shrinks.
  /// @return the buffers of the next dispatch of even number
  DispatchOutputBuffers reallocate_dispatch_output_buf(std::int64_t dispatch_recv_tokens);

  /// Rows of the windows.
  [[nodiscard]] std::int64_t capacity_rows() const noexcept;
  [[nodiscard]] bool finalized() const noexcept;
  [[nodiscard]] const ExpertMemory& memory() const noexcept { return *memory_; }
  [[nodiscard]] const EPConfig& config() const noexcept { return config_; }
  [[nodiscard]] const EPDispatchOptions& options() const noexcept { return options_; }

  /// Parts of a dispatch window, cut to `rows` rows.
  [[nodiscard]] DispatchOutputBuffers buffers(std::uint32_t parity, std::int64_t rows) const;
  [[nodiscard]] TensorView scales(std::uint32_t parity, std::int64_t rows) const;
  [[nodiscard]] TensorView combine_rows(std::uint32_t parity, std::int64_t rows) const;

 private:
  friend class EPAll2AllLayer;
  /// @param who begins the text of errors
  /// @param rows of the windows; not given: as the options say
  [[nodiscard]] static DispatchCombineContext make(const World& world, const EPConfig& config,
                                                   const EPLayerOptions& options, const char* who,
                                                   std::optional<std::int64_t> rows = {});
  DispatchCombineContext(const World& world, const EPConfig& config,
                         const EPDispatchOptions& options);
  void allocate_windows(std::int64_t rows);

  World world_;
  EPConfig config_;
  EPDispatchOptions options_;
  std::unique_ptr<ExpertMemory> memory_;  ///< executors keep its address
};

/// A barrier of the ranks of this rank's node, by signals that only grow.
class BarrierAllContext {
 public:
  /// Collective for the whole world. @param is_intra_node false: the barrier is that of the world
  explicit BarrierAllContext(const World& world, bool is_intra_node = true);
  BarrierAllContext(BarrierAllContext&&) noexcept;
  BarrierAllContext& operator=(BarrierAllContext&&) noexcept;
  ~BarrierAllContext();

  /// Returns when all ranks of the node (or of the world) have called. @throws Timeout
  void barrier_all(const char* operation = "barrier_all");

  /// Collective: gives the signals back. Twice does nothing.
  void finalize();

 private:
  World world_;
  bool is_intra_node_;
  std::shared_ptr<SignalPad> signals_;
  std::uint64_t epoch_ = 0;
};

}  // namespace waybill
