#include "rank_dispatcher.h"

#include <nanobind/ndarray.h>

#include <array>
#include <utility>

#include "waybill/core/dtype.h"

namespace waybill::python {

namespace nb = nanobind;

namespace {

/// What a view of a window keeps.
struct HeldWindow {
  std::shared_ptr<RankWorld> rank;
  std::vector<std::shared_ptr<void>> memory;
};

nb::capsule hold(const std::shared_ptr<RankWorld>& rank,
                 std::vector<std::shared_ptr<void>> memory) {
  auto held = std::make_unique<HeldWindow>(rank, std::move(memory));
  return {held.release(), [](void* pointer) noexcept {
            const std::unique_ptr<HeldWindow> last(static_cast<HeldWindow*>(pointer));
            last->rank->retire(std::move(last->memory));
          }};
}

}  // namespace

PlanFacts::PlanFacts(const PlanHandle& plan)
    : own_rows(plan.own_rows().begin(), plan.own_rows().end()),
      window_rows(plan.window_rows().begin(), plan.window_rows().end()),
      wire_bytes(plan.wire_bytes().begin(), plan.wire_bytes().end()),
      window_bytes(plan.window_bytes()),
      num_slots(plan.num_slots()),
      way(plan.limits().way) {}

/// A call of the rank, behind which the size of the windows is known.
class RankDispatcher::DispatcherCall {
 public:
  DispatcherCall(RankDispatcher& self, const char* who,
                 RankWorld::Looks looks = RankWorld::Looks::yes)
      : self_(self), call_(*self.rank_, who, &self.turn_, looks) {}
  DispatcherCall(const DispatcherCall&) = delete;
  DispatcherCall& operator=(const DispatcherCall&) = delete;
  ~DispatcherCall() {
    if (self_.dispatcher_ == nullptr) return;
    self_.window_bytes_ = self_.dispatcher_->window_bytes();
    self_.last_dispatch_ = self_.dispatcher_->last_dispatch();
  }

 private:
  RankDispatcher& self_;
  RankWorld::Call call_;
};

RankDispatcher::RankDispatcher(std::shared_ptr<RankWorld> rank,
                               const SequenceDispatcherOptions& options)
    : rank_(std::move(rank)) {
  const DispatcherCall call(*this, "SequenceDispatcher");
  dispatcher_ = std::make_unique<SequenceDispatcher>(rank_->world(), options);
}

RankPlan RankDispatcher::plan(bool gradient, std::span<const SequencePart> parts, Stream stream) {
  const DispatcherCall call(*this, gradient ? "plan_kv_gradient" : "plan_dispatch");
  return {rank_, gradient ? dispatcher_->plan_kv_gradient(parts, stream)
                          : dispatcher_->plan_dispatch(parts, stream)};
}

PlanFacts RankDispatcher::replace_plan(PlanHandle& plan, std::span<const SequencePart> parts,
                                       Stream stream) {
  const DispatcherCall call(*this, "replace_plan");
  dispatcher_->replace_plan(plan, parts, stream);
  return PlanFacts(plan);
}

void RankDispatcher::reserve(std::int64_t window_bytes, std::int32_t num_slots, Stream stream) {
  const DispatcherCall call(*this, "reserve");
  dispatcher_->reserve(window_bytes, stream, num_slots);
}

WindowViews RankDispatcher::dispatch(const PlanHandle& plan,
                                     std::span<const ConstTensorView> tensors, Stream stream,
                                     std::uint64_t of_dispatch) {
  const DispatcherCall call(*this, "dispatch");
  rank_->meet("dispatch", stream);
  auto views = dispatcher_->dispatch(plan, tensors, stream, of_dispatch);
  rank_->meet("dispatch", stream);
  return {std::move(views), dispatcher_->window_memory()};
}

void RankDispatcher::kv_gradient(const PlanHandle& plan, std::span<const ConstTensorView> gradients,
                                 std::span<const TensorView> outputs, Stream stream,
                                 std::uint64_t of_dispatch) {
  const DispatcherCall call(*this, "kv_gradient");
  rank_->meet("kv_gradient", stream);
  dispatcher_->kv_gradient(plan, gradients, outputs, stream, of_dispatch);
  rank_->meet("kv_gradient", stream);
}

WindowViews RankDispatcher::gradient_inputs(const PlanHandle& plan, Stream stream) {
  const DispatcherCall call(*this, "gradient_inputs");
  auto views = dispatcher_->gradient_inputs(plan, stream);
  return {std::move(views), dispatcher_->window_memory()};
}

void RankDispatcher::synchronize(Stream stream) {
  const DispatcherCall call(*this, "synchronize");
  dispatcher_->synchronize(stream);
}

void RankDispatcher::close() {
  const DispatcherCall call(*this, "close", RankWorld::Looks::no);
  dispatcher_->close();
}

nb::list RankDispatcher::arrays(WindowViews shown) const {
  const nb::capsule owner = hold(rank_, std::move(shown.memory));
  nb::list result;
  for (const TensorView& view : shown.views) {
    const auto bits = static_cast<std::uint8_t>(dtype_bytes(view.dtype) * 8);
    const nb::dlpack::dtype dtype{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int), bits, 1};
    const std::array extents{static_cast<std::size_t>(view.shape[0]),
                             static_cast<std::size_t>(view.shape[1])};
    if (rank_->device() < 0) {
      result.append(
          nb::cast(nb::ndarray<nb::numpy>(view.data, 2, extents.data(), owner, nullptr, dtype)));
    } else {
      result.append(nb::cast(nb::ndarray<>(view.data, 2, extents.data(), owner, nullptr, dtype,
                                           nb::device::cuda::value, rank_->device())));
    }
  }
  return result;
}

}  // namespace waybill::python
