#include "rank_dispatcher.h"

#include <nanobind/ndarray.h>

#include <array>
#include <utility>

#include "waybill/core/dtype.h"

namespace waybill::python {

namespace nb = nanobind;

namespace {

using Call = RankWorld::Call;

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

RankDispatcher::RankDispatcher(std::shared_ptr<RankWorld> rank,
                               const SequenceDispatcherOptions& options)
    : rank_(std::move(rank)) {
  const Call call(*rank_, "SequenceDispatcher");
  dispatcher_ = std::make_unique<SequenceDispatcher>(rank_->world(), options);
}

PlanHandle RankDispatcher::plan(bool gradient, std::span<const SequencePart> parts, Stream stream) {
  const Call call(*rank_, gradient ? "plan_kv_gradient" : "plan_dispatch");
  return {rank_, gradient ? dispatcher_->plan_kv_gradient(parts, stream)
                          : dispatcher_->plan_dispatch(parts, stream)};
}

void RankDispatcher::replace_plan(ReadyPlan& plan, std::span<const SequencePart> parts,
                                  Stream stream) {
  const Call call(*rank_, "replace_plan");
  dispatcher_->replace_plan(plan, parts, stream);
}

void RankDispatcher::reserve(std::int64_t window_bytes, std::int32_t num_slots, Stream stream) {
  const Call call(*rank_, "reserve");
  dispatcher_->reserve(window_bytes, stream, num_slots);
}

std::vector<TensorView> RankDispatcher::dispatch(const ReadyPlan& plan,
                                                 std::span<const ConstTensorView> tensors,
                                                 Stream stream, std::uint64_t of_dispatch) {
  const Call call(*rank_, "dispatch");
  rank_->meet("dispatch", stream);
  auto views = dispatcher_->dispatch(plan, tensors, stream, of_dispatch);
  rank_->meet("dispatch", stream);
  return views;
}

void RankDispatcher::kv_gradient(const ReadyPlan& plan, std::span<const ConstTensorView> gradients,
                                 std::span<const TensorView> outputs, Stream stream,
                                 std::uint64_t of_dispatch) {
  const Call call(*rank_, "kv_gradient");
  rank_->meet("kv_gradient", stream);
  dispatcher_->kv_gradient(plan, gradients, outputs, stream, of_dispatch);
  rank_->meet("kv_gradient", stream);
}

std::vector<TensorView> RankDispatcher::gradient_inputs(const ReadyPlan& plan, Stream stream) {
  const Call call(*rank_, "gradient_inputs");
  return dispatcher_->gradient_inputs(plan, stream);
}

void RankDispatcher::synchronize(Stream stream) {
  const Call call(*rank_, "synchronize");
  dispatcher_->synchronize(stream);
}

void RankDispatcher::close() {
  const Call call(*rank_, "close");
  dispatcher_->close();
}

nb::list RankDispatcher::arrays(const std::vector<TensorView>& views) const {
  const nb::capsule owner = hold(rank_, dispatcher_->window_memory());
  nb::list result;
  for (const TensorView& view : views) {
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
