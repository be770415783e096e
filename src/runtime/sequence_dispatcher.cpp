#include "waybill/runtime/sequence_dispatcher.h"

#include "dispatcher_state.h"
#include "plan_tables.h"

namespace waybill {

const SequencePlan& detail::compiled_plan(const PlanHandle& handle) noexcept {
  static const SequencePlan none;
  return handle.plan_ == nullptr ? none : *handle.plan_;
}

PlanHandle::PlanHandle() noexcept = default;
PlanHandle::PlanHandle(PlanHandle&&) noexcept = default;
PlanHandle& PlanHandle::operator=(PlanHandle&&) noexcept = default;
PlanHandle::~PlanHandle() = default;

SequenceOperation PlanHandle::operation() const noexcept {
  return detail::compiled_plan(*this).operation;
}
std::span<const TensorFormat> PlanHandle::tensors() const noexcept {
  return detail::compiled_plan(*this).tensors;
}
std::span<const std::int64_t> PlanHandle::own_rows() const noexcept {
  return detail::compiled_plan(*this).own_rows;
}
std::span<const std::int64_t> PlanHandle::window_rows() const noexcept {
  return detail::compiled_plan(*this).window_rows;
}
std::span<const std::int64_t> PlanHandle::window_offsets() const noexcept {
  return std::span(detail::compiled_plan(*this).window_offsets).first(tensors().size());
}
std::int64_t PlanHandle::window_bytes() const noexcept {
  return detail::compiled_plan(*this).window_bytes;
}
std::int32_t PlanHandle::num_slots() const noexcept {
  return detail::compiled_plan(*this).num_slots;
}
std::span<const std::int64_t> PlanHandle::wire_bytes() const noexcept {
  return detail::compiled_plan(*this).wire_bytes;
}
const PlanLimits& PlanHandle::limits() const noexcept {
  return detail::compiled_plan(*this).limits;
}

SequenceDispatcher::SequenceDispatcher(const World& world, SequenceDispatcherOptions options)
    : state_(std::make_unique<detail::DispatcherState>(world, options)) {}
SequenceDispatcher::SequenceDispatcher(SequenceDispatcher&&) noexcept = default;
SequenceDispatcher& SequenceDispatcher::operator=(SequenceDispatcher&&) noexcept = default;
SequenceDispatcher::~SequenceDispatcher() = default;

void SequenceDispatcher::close() { state_->close(); }

PlanHandle SequenceDispatcher::plan_dispatch(std::span<const SequencePart> parts, Stream stream) {
  return state_->plan_dispatch(parts, stream);
}

PlanHandle SequenceDispatcher::plan_kv_gradient(std::span<const SequencePart> parts,
                                                Stream stream) {
  return state_->plan_kv_gradient(parts, stream);
}

void SequenceDispatcher::replace_plan(PlanHandle& ready, std::span<const SequencePart> parts,
                                      Stream stream) {
  state_->replace_plan(ready, parts, stream);
}

void SequenceDispatcher::reserve(std::int64_t window_bytes, Stream stream, std::int32_t num_slots) {
  state_->reserve(window_bytes, stream, num_slots);
}

std::vector<TensorView> SequenceDispatcher::dispatch(const PlanHandle& ready,
                                                     std::span<const ConstTensorView> tensors,
                                                     Stream stream, std::uint64_t of_dispatch) {
  return state_->dispatch(ready, tensors, stream, of_dispatch);
}

void SequenceDispatcher::kv_gradient(const PlanHandle& ready,
                                     std::span<const ConstTensorView> gradients,
                                     std::span<const TensorView> outputs, Stream stream,
                                     std::uint64_t of_dispatch) {
  state_->kv_gradient(ready, gradients, outputs, stream, of_dispatch);
}

std::uint64_t SequenceDispatcher::last_dispatch() const noexcept { return state_->last_dispatch(); }

std::vector<TensorView> SequenceDispatcher::gradient_inputs(const PlanHandle& ready,
                                                            Stream stream) {
  return state_->gradient_inputs(ready, stream);
}

void SequenceDispatcher::synchronize(Stream stream) { state_->synchronize(stream); }

std::int64_t SequenceDispatcher::window_bytes() const noexcept { return state_->window_bytes(); }

std::vector<std::shared_ptr<void>> SequenceDispatcher::window_memory() const {
  return state_->window_memory();
}

const SequenceDispatcherOptions& SequenceDispatcher::options() const noexcept {
  return state_->options();
}

}  // namespace waybill
