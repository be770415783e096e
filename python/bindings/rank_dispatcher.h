#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "rank_world.h"
#include "waybill/core/tensor_view.h"

namespace waybill::python {

/// A plan of a dispatcher as Python holds it.
class PlanHandle {
 public:
  PlanHandle(std::shared_ptr<RankWorld> rank, ReadyPlan plan)
      : rank_(std::move(rank)), plan_(std::move(plan)) {}
  PlanHandle(PlanHandle&&) = default;
  ~PlanHandle() {
    if (rank_ != nullptr) rank_->discard(std::move(plan_));
  }

  [[nodiscard]] const ReadyPlan& plan() const noexcept { return plan_; }
  [[nodiscard]] ReadyPlan& plan() noexcept { return plan_; }

 private:
  std::shared_ptr<RankWorld> rank_;
  ReadyPlan plan_;
};

/// A SequenceDispatcher as Python holds it: with its world, one call at a time. To be called
/// without the interpreter's lock, but for arrays().
class RankDispatcher {
 public:
  RankDispatcher(std::shared_ptr<RankWorld> rank, const SequenceDispatcherOptions& options);

  PlanHandle plan(bool gradient, std::span<const SequencePart> parts, Stream stream);
  void replace_plan(ReadyPlan& plan, std::span<const SequencePart> parts, Stream stream);
  void reserve(std::int64_t window_bytes, std::int32_t num_slots, Stream stream);
  std::vector<TensorView> dispatch(const ReadyPlan& plan, std::span<const ConstTensorView> tensors,
                                   Stream stream, std::uint64_t of_dispatch);
  void kv_gradient(const ReadyPlan& plan, std::span<const ConstTensorView> gradients,
                   std::span<const TensorView> outputs, Stream stream, std::uint64_t of_dispatch);
  std::vector<TensorView> gradient_inputs(const ReadyPlan& plan, Stream stream);
  void synchronize(Stream stream);
  void close();
  [[nodiscard]] std::int64_t window_bytes() const { return dispatcher_->window_bytes(); }
  [[nodiscard]] std::uint64_t last_dispatch() const { return dispatcher_->last_dispatch(); }

  /// Arrays over views of a window, of integers of the dtype's size; each keeps the memory alive.
  /// numpy's for host memory; for a GPU's, objects that speak DLPack.
  [[nodiscard]] nanobind::list arrays(const std::vector<TensorView>& views) const;

 private:
  std::shared_ptr<RankWorld> rank_;
  std::unique_ptr<SequenceDispatcher> dispatcher_;
};

}  // namespace waybill::python
