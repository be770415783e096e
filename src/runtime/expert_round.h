#pragma once

#include <cstdint>

#include "waybill/core/at.h"
#include "waybill/moe/ep_config.h"
#include "waybill/runtime/expert_executor.h"
#include "waybill/transport/transport.h"

namespace waybill::detail {

/// What the ranks of a layer tell each other in host memory: signals, and pieces of the board.
class ExpertRound {
 public:
  ExpertRound(Transport& transport, const EPConfig& config, const ExpertMemory& memory)
      : transport_(transport), config_(config), memory_(memory) {}

  void raise(ExpertSignal kind, std::int32_t peer, const ExpertCall& call) {
    transport_.signal(Rank{peer}, slot(kind, config_.rank), call.epoch);
  }

  void await(ExpertSignal kind, std::int32_t peer, const ExpertCall& call) {
    (void)transport_.wait(slot(kind, peer), call.epoch, Rank{peer}, call.operation);
  }

  /// Raises at the ranks [first, first + count) and waits for all of them, beginning behind this.
  void meet(ExpertSignal kind, std::int32_t first, std::int32_t count, const ExpertCall& call) {
    const auto other = [&](std::int32_t k) { return first + (config_.rank - first + k) % count; };
    for (std::int32_t k = 1; k < count; ++k) raise(kind, other(k), call);
    for (std::int32_t k = 1; k < count; ++k) await(kind, other(k), call);
  }

  /// Enters the call: waits until all ranks have.
  void enter(const ExpertCall& call) { meet(ExpertSignal::entered, 0, config_.world_size, call); }

  /// Writes a piece to a rank's board.
  void post(std::int32_t peer, std::int64_t offset, const void* source, std::int64_t size_bytes) {
    transport_.put(memory_.board,
                   {Rank{peer}, offset, static_cast<const std::byte*>(source), size_bytes});
  }

  /// A place of this rank's board.
  template <class Element>
  [[nodiscard]] const Element* read(std::int64_t offset) const {
    return reinterpret_cast<const Element*>(memory_.board.local + offset);
  }

  void barrier(const ExpertCall& call) { transport_.barrier(call.operation); }

 private:
  [[nodiscard]] SignalSlot slot(ExpertSignal kind, std::int32_t rank) const {
    return {&memory_.signals, static_cast<std::int64_t>(kind) * config_.world_size + rank};
  }

  Transport& transport_;
  const EPConfig& config_;
  const ExpertMemory& memory_;
};

}  // namespace waybill::detail
