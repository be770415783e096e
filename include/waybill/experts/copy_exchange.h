#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "waybill/core/dtype.h"
#include "waybill/moe/expert_transfers.h"
#include "waybill/runtime/world.h"

namespace waybill {

/// One tensor of an expert, such as a matrix; of the same size for all experts.
struct ExpertPart {
  std::int64_t elements = 0;
  DType dtype = DType::float32;  ///< of the weights, and of home's gradient
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

}  // namespace waybill
