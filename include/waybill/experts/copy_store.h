#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "waybill/core/dtype.h"
#include "waybill/moe/expert_routing.h"
#include "waybill/runtime/world.h"

namespace waybill {

/// One tensor of an expert, such as a matrix; of the same size for all experts.
struct ExpertPart {
  std::int64_t elements = 0;
  DType dtype = DType::float32;  ///< the weights' and home's gradient's
};

/// The copies of a call of CopyExchange, and the memory of their tensors.
struct ExpertCopyCall {
  /// The same on all ranks. A copy that is not to move is left out: its slot is -1.
  ExpertSlotTable slots;
  std::span<const ExpertPart> parts;  ///< tensors of an expert; the same on all ranks
  /// [P, parts] first bytes of the tensors of home experts; not read where no copy is named
  std::span<std::byte* const> home;
  /// [spare slots, parts] those of copies; not read where the slot is empty
  std::span<std::byte* const> copies;
  /// A number of the caller's, such as the layer's; the same on all ranks.
  std::uint64_t owner = 0;
};

/// Brings the weights of copies from their homes, and the gradients of copies back, between ranks
/// in host memory. What arrives is that of simulate_expert_copies and
/// simulate_expert_copy_gradients, bit for bit.
///
/// Tensors lie anywhere: they travel in pieces through a small symmetric buffer. All calls are
/// collective, in the same order on all ranks, also on ranks without copies. They return when this
/// rank's part is done. A call that throws InvalidArgument has involved nobody and may be repeated;
/// after any other error the object is unusable.
class CopyExchange {
 public:
  /// Collective. @throws Unsupported for a world of GPUs; Timeout
  explicit CopyExchange(const World& world);
  CopyExchange(CopyExchange&& other) noexcept;
  CopyExchange& operator=(CopyExchange&& other) noexcept;
  ~CopyExchange();

  /// Weights from their homes into the copies, as plan_weight_transfers says.
  /// @throws InvalidArgument; Disagreement where ranks name other copies; Timeout
  void fetch_weights(const ExpertCopyCall& call);

  /// Adds the gradients of copies to those of home, as plan_gradient_transfers says. Those of
  /// copies are float32; float64 for parts of float64.
  /// @throws as fetch_weights; InvalidArgument for a dtype that is not summed
  void add_gradients(const ExpertCopyCall& call);

  /// A number of each rank, [R], such as the version of its weights.
  /// @param owner as ExpertCopyCall::owner
  /// @throws Disagreement; Timeout
  [[nodiscard]] std::vector<std::int64_t> exchange_versions(std::int64_t mine, std::uint64_t owner);

  /// Collective: gives the symmetric memory back. Twice does nothing. Later calls throw
  /// TransportError.
  void finalize();

 private:
  struct State;
  std::unique_ptr<State> state_;  ///< null: moved from
};

/// The copies of a call of CopyStore. R ranks, P home experts and S slots each, of which S - P are
/// spare.
struct CopyStoreCall {
  std::int32_t num_experts = 0;
  std::int32_t spare_experts = 0;  ///< S - P, at most those of the store
  /// Device memory, int32 [R, S]: the expert of each slot, -1: empty, and the rows that it takes; a
  /// copy without rows does not move. The same on all ranks, as a dispatch's all_slot_experts and
  /// all_slot_quotas are. Without `quotas` all copies move.
  const std::int32_t* slots = nullptr;
  const std::int32_t* quotas = nullptr;
  std::span<const ExpertPart> parts;  ///< tensors of an expert; the same on all ranks
  /// [P, parts] first bytes of the tensors of home experts (weights or gradients), device memory
  std::span<std::byte* const> home;
  /// [parts] first bytes of [spare_experts, elements] in the store: weights, or gradients in
  /// float32 (float64 for float64). At the same offset on all ranks.
  std::span<std::byte* const> copies;
  std::uint32_t owner = 0;  ///< number of the module that calls; the same on all ranks
  /// A number of this rank's weights. A copy that has come for the same owner with the same stamp
  /// of its home lies there already.
  std::int64_t stamp = 0;
  bool fresh = true;  ///< all copies come, also those that lie there; the same on all ranks
};

/// Spare slots of GPU ranks, and what brings weights to copies and their gradients home. What
/// arrives is that of simulate_expert_copies and simulate_expert_copy_gradients, bit for bit.
///
/// The plan is on the device, and calls are queued. Where all ranks map each other's memory the
/// host waits for nothing, and graphs may hold the calls. A graph's `fetch_weights` should be
/// `fresh`, as replays have other weights. Over a network the host waits for the plan, no graph
/// holds a call, and all copies come in each. All calls are collective, in the same order on all
/// ranks. After a failed call the object is unusable.
class CopyStore {
 public:
  /// Collective. @param size_bytes of the store, the same on all ranks
  /// @throws InvalidArgument for negative numbers; Unsupported for ranks in host memory and for
  ///   more than 2048 spare slots of all ranks; Timeout
  CopyStore(const World& world, std::int64_t size_bytes, std::int32_t spare_experts);
  CopyStore(CopyStore&& other) noexcept;
  CopyStore& operator=(CopyStore&& other) noexcept;
  ~CopyStore();

  /// Device memory of this rank, aligned to 256 bytes, zeros at first.
  [[nodiscard]] std::byte* data() const;
  [[nodiscard]] std::int64_t size_bytes() const;
  /// Keeps that memory alive.
  [[nodiscard]] std::shared_ptr<void> memory() const;

  /// Queues: weights from their homes into the stores, along plan_weight_transfers' trees (over a
  /// network straight to each other node). Reads `home`, writes the store.
  /// @throws InvalidArgument, also for more than 16 parts or 256 tensors of home experts;
  ///   Unsupported in a graph over a network; later Disagreement, Timeout
  void fetch_weights(const CopyStoreCall& call, const Stream& stream);

  /// Queues: the gradients of copies, which lie in the store, are added to those of home: home
  /// first, then copies by rank, rounded once. Reads the stores, adds to `home`.
  /// @throws as fetch_weights; InvalidArgument for a dtype that is not summed
  void add_gradients(const CopyStoreCall& call, const Stream& stream);

  /// Collective: gives the symmetric memory back. Twice does nothing.
  void finalize();

 private:
  struct State;
  std::unique_ptr<State> state_;  ///< null: moved from
};

}  // namespace waybill
