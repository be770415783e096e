#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "rank_world.h"
#include "waybill/core/host_tensor.h"

namespace waybill::python {

/// What Python asks a plan for.
struct PlanFacts {
  explicit PlanFacts(const PlanHandle& plan);

  std::vector<std::int64_t> own_rows;
  std::vector<std::int64_t> window_rows;
  std::vector<std::int64_t> wire_bytes;
  std::int64_t window_bytes;
  std::int32_t num_slots;
  TransferMode way;
};

/// A plan of a dispatcher as Python holds it. What is asked while another thread replaces the plan
/// is the old one's.
class RankPlan {
 public:
  RankPlan(std::shared_ptr<RankWorld> rank, PlanHandle plan)
      : rank_(std::move(rank)), plan_(std::move(plan)), facts_(plan_) {}
  RankPlan(RankPlan&&) = default;
  ~RankPlan() {
    if (rank_ != nullptr) rank_->discard(std::move(plan_));
  }

  [[nodiscard]] const PlanHandle& plan() const noexcept { return plan_; }
  [[nodiscard]] PlanHandle& plan() noexcept { return plan_; }

  /// With the interpreter's lock, as for set_facts.
  [[nodiscard]] const PlanFacts& facts() const noexcept { return facts_; }
  void set_facts(PlanFacts facts) { facts_ = std::move(facts); }

 private:
  std::shared_ptr<RankWorld> rank_;
  PlanHandle plan_;
  PlanFacts facts_;
};

/// Views of a window, and what keeps its memory: another thread may close the dispatcher as soon as
/// the call that returns them is over.
struct WindowViews {
  std::vector<TensorView> views;
  std::vector<std::shared_ptr<void>> memory;
};

/// A SequenceDispatcher as Python holds it: with its world, one call at a time. To be called
/// without the interpreter's lock, but for arrays().
class RankDispatcher {
 public:
  RankDispatcher(std::shared_ptr<RankWorld> rank, const SequenceDispatcherOptions& options);

  RankPlan plan(bool gradient, std::span<const SequencePart> parts, Stream stream);
  /// @return what the plan is then
  PlanFacts replace_plan(PlanHandle& plan, std::span<const SequencePart> parts, Stream stream);
  void reserve(std::int64_t window_bytes, std::int32_t num_slots, Stream stream);
  WindowViews dispatch(const PlanHandle& plan, std::span<const ConstTensorView> tensors,
                       Stream stream, std::uint64_t of_dispatch);
  void kv_gradient(const PlanHandle& plan, std::span<const ConstTensorView> gradients,
                   std::span<const TensorView> outputs, Stream stream, std::uint64_t of_dispatch);
  WindowViews gradient_inputs(const PlanHandle& plan, Stream stream);
  void synchronize(Stream stream);
  void close();
  /// After this rank's last call that is over.
  [[nodiscard]] std::int64_t window_bytes() const { return window_bytes_; }
  [[nodiscard]] std::uint64_t last_dispatch() const { return last_dispatch_; }

  /// Arrays over views of a window, of integers of the dtype's size; each keeps the memory alive.
  /// numpy's for host memory; for a GPU's, objects that speak DLPack.
  [[nodiscard]] nanobind::list arrays(WindowViews shown) const;

 private:
  class DispatcherCall;
  std::shared_ptr<RankWorld> rank_;
  CallTurn turn_;
  std::unique_ptr<SequenceDispatcher> dispatcher_;
  std::atomic<std::int64_t> window_bytes_ = 0;
  std::atomic<std::uint64_t> last_dispatch_ = 0;
};

}  // namespace waybill::python
