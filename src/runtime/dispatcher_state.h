#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/abort_state.h"
#include "runtime/capture_log.h"
#include "runtime/executor.h"
#include "schedule/sequence_plan.h"
#include "transport/transport.h"
#include "waybill/runtime/sequence_dispatcher.h"
#include "waybill/runtime/world.h"

namespace waybill::detail {

/// What a SequenceDispatcher is. Functions of the same names say what these do.
class DispatcherState {
 public:
  DispatcherState(const World& world, const SequenceDispatcherOptions& options);
  ~DispatcherState();
  DispatcherState(const DispatcherState&) = delete;
  DispatcherState& operator=(const DispatcherState&) = delete;

  void close();
  [[nodiscard]] PlanHandle plan_dispatch(std::span<const SequencePart> parts, Stream stream);
  [[nodiscard]] PlanHandle plan_kv_gradient(std::span<const SequencePart> parts, Stream stream);
  void replace_plan(PlanHandle& ready, std::span<const SequencePart> parts, Stream stream);
  void reserve(std::int64_t window_bytes, Stream stream, std::int32_t num_slots);
  std::vector<TensorView> dispatch(const PlanHandle& ready,
                                   std::span<const ConstTensorView> tensors, Stream stream,
                                   std::uint64_t of_dispatch);
  void kv_gradient(const PlanHandle& ready, std::span<const ConstTensorView> gradients,
                   std::span<const TensorView> outputs, Stream stream, std::uint64_t of_dispatch);
  [[nodiscard]] std::vector<TensorView> gradient_inputs(const PlanHandle& ready, Stream stream);
  void synchronize(Stream stream);
  [[nodiscard]] std::vector<std::shared_ptr<void>> window_memory() const;

  [[nodiscard]] std::uint64_t last_dispatch() const noexcept { return num_dispatches_; }
  [[nodiscard]] std::int64_t window_bytes() const noexcept { return windows_[0].size_bytes; }
  [[nodiscard]] const SequenceDispatcherOptions& options() const noexcept { return options_; }

 private:
  [[nodiscard]] PlanHandle ready(SequencePlan plan, Stream stream);
  /// That parts are for as many ranks as there are.
  void check_world(const char* who, std::span<const SequencePart> parts) const;
  void check_call(const char* who, const PlanHandle& ready, SequenceOperation operation) const;
  void grow_for(const char* who, std::int64_t window_bytes, std::int32_t num_slots, Stream stream);
  void retire();
  [[nodiscard]] SymmetricBuffer& window_of(std::uint64_t epoch) { return windows_[epoch % 2]; }
  [[nodiscard]] std::vector<TensorView> window_views(const SequencePlan& plan, std::uint64_t epoch);
  [[nodiscard]] SequenceCall next_call(const char* who, const PlanHandle& ready,
                                       std::span<const ConstTensorView> inputs,
                                       std::span<const TensorView> outputs, Stream stream,
                                       std::uint64_t of_dispatch);
  void realign(const SequenceCall& call);

  World world_;
  SequenceDispatcherOptions options_;
  CompileOptions compile_;
  std::string name_;  ///< " of dispatcher 2", for its memory: no other object's is taken for it
  SymmetricBuffer windows_[2];
  std::vector<SymmetricBuffer> retired_;  ///< outgrown, perhaps holding the last output
  std::uint64_t retired_epoch_ = 0;       ///< of the last call when they were
  SignalPad arrivals_;
  SignalPad slots_;                   ///< for whom ranks wait, and the slots of batches
  std::vector<SignalPad> old_slots_;  ///< outgrown
  std::uint64_t epoch_ = 0;           ///< of the last call
  std::uint64_t num_dispatches_ = 0;  ///< calls of dispatch
  CaptureLog captures_;
  AbortState abort_state_{"dispatcher", &world_.transport()};
};

}  // namespace waybill::detail
