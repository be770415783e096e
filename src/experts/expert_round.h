#pragma once

#include <atomic>
#include <cstdint>

#include "waybill/core/error.h"
#include "waybill/core/to_size.h"
#include "waybill/experts/expert_executor.h"
#include "waybill/moe/ep_config.h"
#include "waybill/runtime/executor.h"
#include "waybill/runtime/fingerprint.h"
#include "waybill/transport/transport.h"

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
      for (std::int32_t k = 0; k < config_.world_size; ++k) {
        const std::int32_t other = (peer + k) % config_.world_size;
        if (other != config_.rank) (void)compare(other, call);
      }
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
    for (std::int32_t k = 1; k < config_.world_size; ++k) {
      tell(other(k), call);
      raise(ExpertSignal::entered, other(k), call);
    }
    for (std::int32_t k = 1; k < config_.world_size; ++k) {
      wait_for(ExpertSignal::entered, other(k), call);
      if (compare(other(k), call)) continue;
      throw InternalError(concat(call.operation, ": rank ", other(k), " entered call ", call.epoch,
                                 " without saying what it means by it"));
    }
  }

  /// Writes a piece to a rank's workspace.
  void post(std::int32_t peer, std::int64_t offset, const void* source, std::int64_t size_bytes) {
    transport_.put(memory_.workspace,
                   {Rank{peer}, offset, static_cast<const std::byte*>(source), size_bytes});
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

  /// Where a rank's words of a call stand.
  [[nodiscard]] std::int64_t first_word(std::int32_t rank, const ExpertCall& call) const {
    return fingerprint_slot(num_layer_signals(config_.world_size), config_.world_size, call.epoch,
                            rank);
  }

  /// Before this rank enters, so that whoever sees it there has the words.
  void tell(std::int32_t peer, const ExpertCall& call) {
    std::int64_t idx = first_word(config_.rank, call);
    for (const std::uint64_t word : pack_fingerprint(call.fingerprint)) {
      transport_.signal(Rank{peer}, {&memory_.signals, idx++}, tagged_word(word, call.epoch));
    }
  }

  /// @return whether the peer has said what it means by the call. @throws Disagreement
  [[nodiscard]] bool compare(std::int32_t peer, const ExpertCall& call) const {
    FingerprintWords theirs{};
    const std::int64_t first = first_word(peer, call);
    for (std::size_t w = 0; w < fingerprint_words; ++w) {
      std::uint64_t& word = memory_.signals.local[first + static_cast<std::int64_t>(w)];
      theirs[w] = std::atomic_ref(word).load(std::memory_order_acquire);
      if (!is_of_call(theirs[w], call.epoch)) return false;
    }
    const FingerprintWords mine = pack_fingerprint(call.fingerprint);
    if (same_call(mine, theirs)) return true;
    throw Disagreement(describe_disagreement(call.operation, call.epoch, Rank{config_.rank}, mine,
                                             Rank{peer}, theirs));
  }

  Transport& transport_;
  const EPConfig& config_;
  const ExpertMemory& memory_;
};

}  // namespace waybill::detail
