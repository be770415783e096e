#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "waybill/core/host_tensor.h"
#include "waybill/moe/ep_config.h"
#include "waybill/runtime/world.h"

namespace waybill {

struct ExpertMemory;
struct Setting;

namespace detail {
class LayerState;
}

/// Where a rank's rows arrive.
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
  /// What they held stays where it was until the second growth after, or finalize(). Never shrinks.
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
  friend class detail::LayerState;
  /// @param who begins the text of errors
  /// @param more settings that ranks compare beside those of config and options
  /// @param num_rows of the windows; called when config and options are right, may throw
  /// @param slots of a token in receive slabs, see slab_slots(); 0: none are made
  [[nodiscard]] static DispatchCombineContext make(const World& world, const EPConfig& config,
                                                   const EPDispatchOptions& options,
                                                   const char* who, std::span<const Setting> more,
                                                   const std::function<std::int64_t()>& num_rows,
                                                   std::int64_t slots = 0);
  [[nodiscard]] static std::int64_t rows_of(const EPConfig& config, std::int64_t capacity_factor,
                                            const char* who);
  DispatchCombineContext(const World& world, const EPConfig& config,
                         const EPDispatchOptions& options);
  void allocate_windows(std::int64_t rows);
  void allocate_slabs(std::int64_t slots);

  World world_;
  EPConfig config_;
  EPDispatchOptions options_;
  std::unique_ptr<ExpertMemory> memory_;  ///< where executors know it
};

/// A barrier of the ranks of this rank's node, by signals that only grow.
class BarrierAllContext {
 public:
  /// Collective, of the whole world. @param is_intra_node false: the barrier is that of the world
  explicit BarrierAllContext(const World& world, bool is_intra_node = true);
  BarrierAllContext(BarrierAllContext&&) noexcept;
  BarrierAllContext& operator=(BarrierAllContext&&) noexcept;
  ~BarrierAllContext();

  /// Returns when all ranks of the node (or of the world) have called. @throws Timeout
  void barrier_all(const char* operation = "barrier_all");

  /// Collective: gives the signals back. Twice does nothing.
  void finalize();

 private:
  struct State;
  std::unique_ptr<State> state_;  ///< null: moved from
};

}  // namespace waybill
