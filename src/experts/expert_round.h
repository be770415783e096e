#pragma once

#include <cstdint>

#include "experts/expert_executor.h"
#include "runtime/executor.h"
#include "transport/transport.h"
#include "waybill/core/error.h"
#include "waybill/moe/ep_config.h"

namespace waybill::detail {

/// What the ranks of a layer tell each other in host memory: signals, and pieces of the workspace.
class ExpertRound {
 public:
  ExpertRound(Transport& transport, const EPConfig& config, const ExpertMemory& memory)
      : transport_(transport), config_(config), memory_(memory) {}

  void raise(ExpertSignal kind, std::int32_t peer, const ExpertCall& call) {
    transport_.signal(Rank{peer}, slot(kind, config_.rank), call.epoch);
  }

  /// @throws Timeout; Disagreement instead when a rank has said that it means another call
  void wait_for(ExpertSignal kind, std::int32_t peer, const ExpertCall& call) {
    try {
      (void)transport_.wait(slot(kind, peer), call.epoch, Rank{peer}, call.operation);
    } catch (const Timeout&) {
      exchange_of(call).compare_all(Rank{peer});
      throw;
    }
  }

  /// Raises at the ranks [first, first + count) and waits for all of them, beginning behind this.
  void arrive_and_wait(ExpertSignal kind, std::int32_t first, std::int32_t count,
                       const ExpertCall& call) {
    const auto other = [&](std::int32_t k) { return first + (config_.rank - first + k) % count; };
    for (std::int32_t k = 1; k < count; ++k) raise(kind, other(k), call);
    for (std::int32_t k = 1; k < count; ++k) wait_for(kind, other(k), call);
  }

  /// Enters the call: waits until all ranks have, and mean the same. @throws as wait_for
  void enter(const ExpertCall& call) {
    const auto other = [&](std::int32_t k) { return (config_.rank + k) % config_.world_size; };
    const FingerprintExchange exchange = exchange_of(call);
    exchange.send();
    for (std::int32_t k = 1; k < config_.world_size; ++k)
      raise(ExpertSignal::entered, other(k), call);
    for (std::int32_t k = 1; k < config_.world_size; ++k) {
      wait_for(ExpertSignal::entered, other(k), call);
      exchange.compare(Rank{other(k)});
    }
  }

  /// Writes a piece to a rank's workspace.
  void post(std::int32_t peer, std::int64_t offset, const void* source, std::int64_t size_bytes) {
    transport_.put(memory_.workspace,
                   {Rank{peer}, offset, static_cast<const std::byte*>(source), size_bytes});
  }

  /// Writes a piece to a rank's part of a buffer.
  void put(const SymmetricBuffer& buffer, std::int32_t peer, std::int64_t offset,
           const void* source, std::int64_t size_bytes) {
    transport_.put(buffer, {Rank{peer}, offset, static_cast<const std::byte*>(source), size_bytes});
  }

  /// A place of this rank's workspace.
  template <class Element>
  [[nodiscard]] const Element* read(std::int64_t offset) const {
    return reinterpret_cast<const Element*>(memory_.workspace.local + offset);
  }

  void barrier(const ExpertCall& call) { transport_.barrier(call.operation); }

 private:
  [[nodiscard]] SignalSlot slot(ExpertSignal kind, std::int32_t rank) const {
    return {&memory_.signals, static_cast<std::int64_t>(kind) * config_.world_size + rank};
  }

  [[nodiscard]] FingerprintExchange exchange_of(const ExpertCall& call) const {
    return {transport_,     memory_.signals, num_layer_signals(config_.world_size),
            call.operation, call.epoch,      call.fingerprint};
  }

  Transport& transport_;
  const EPConfig& config_;
  const ExpertMemory& memory_;
};

}  // namespace waybill::detail
