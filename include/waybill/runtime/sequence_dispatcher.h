#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/runtime/world.h"
#include "waybill/schedule/sequence_part.h"

namespace waybill {

struct SequencePlan;
class UploadedPlan;
class PlanHandle;

namespace detail {
/// The tables of a plan, for tests and the programs of the library; empty ones for an empty handle.
[[nodiscard]] const SequencePlan& compiled_plan(const PlanHandle& handle) noexcept;
}  // namespace detail

struct SequenceDispatcherOptions {
  /// Multiprocessors that a call may use; 0: none, the copy engines do it (they add nothing up: a
  /// gradient takes 16, and nobody forwards). On several nodes at least 1; a quarter, 1 to 8, then
  /// serves what crosses. Host worlds ignore it.
  int num_sms = 16;
  SequencePlanOptions plan = {};
  /// GPU worlds: rows that stay on their rank go by copy engine while the kernel runs, where there
  /// are many in long pieces. A graph that holds such copies cannot replay another plan.
  bool local_by_copy_engine = true;
  /// A plan whose window is larger is refused. All ranks say the same.
  std::int64_t max_window_bytes = std::numeric_limits<std::int64_t>::max();
};

/// One rank's work for one operation, compiled, with its tables where the work is done. Belongs to
/// the dispatcher that made it. Spans hold until the plan is replaced or gone.
class PlanHandle {
 public:
  /// Empty: no tensors, and no dispatcher takes it.
  PlanHandle() noexcept;
  PlanHandle(PlanHandle&&) noexcept;
  PlanHandle& operator=(PlanHandle&&) noexcept;
  ~PlanHandle();

  [[nodiscard]] SequenceOperation operation() const noexcept;
  /// The formats of all parts, in order.
  [[nodiscard]] std::span<const TensorFormat> tensors() const noexcept;
  /// [tensors] rows of this rank's tensor.
  [[nodiscard]] std::span<const std::int64_t> own_rows() const noexcept;
  /// [tensors] rows in this rank's window.
  [[nodiscard]] std::span<const std::int64_t> window_rows() const noexcept;
  /// [tensors] bytes: where a tensor begins in the window.
  [[nodiscard]] std::span<const std::int64_t> window_offsets() const noexcept;
  /// Bytes of the largest window of all ranks.
  [[nodiscard]] std::int64_t window_bytes() const noexcept;
  /// Slots of batches that the rank with the most needs.
  [[nodiscard]] std::int32_t num_slots() const noexcept;
  /// [W] bytes to (or from) each rank; the own one is local.
  [[nodiscard]] std::span<const std::int64_t> wire_bytes() const noexcept;
  [[nodiscard]] const PlanLimits& limits() const noexcept;

 private:
  friend class SequenceDispatcher;
  friend const SequencePlan& detail::compiled_plan(const PlanHandle& handle) noexcept;
  std::unique_ptr<SequencePlan> plan_;
  std::unique_ptr<UploadedPlan> uploaded_;
};

/// Moves shards of Q, K and V between the ranks of a world, by plans, and sums the gradients of the
/// copies of K and V.
///
/// All calls are collective: every rank makes the same calls in the same order, each with its own
/// part of the same plan. Calls on one dispatcher are ordered on one stream, or by events.
///
/// Every rank has two windows, which alternate. The tensors that dispatch returns lie in a window:
/// they may be read until this rank's next call has begun on the stream, and be the input of that
/// call. Who needs them longer copies them, or uses another dispatcher for what comes in between.
/// A fast rank may be in the call after that of a slow one; there is no barrier.
///
/// Windows grow when a plan needs more, at the first call with that plan: to the next power of two
/// (above 256 MiB, the next multiple of that) of the largest need of all ranks, at least 1 MiB.
/// That call waits for all ranks and for the stream. reserve() does it before. They never
/// shrink; outgrown ones are kept until the next growth or close(), as freeing device memory waits
/// for the device and so may happen only where all ranks wait for each other anyway.
///
/// Ranks compare what they mean by a call where they meet: operation, plan, formats and the
/// dispatch that it belongs to. Where they differ, all who meet that throw Disagreement, on GPUs
/// when they synchronize.
///
/// A call that throws anything but a refused argument leaves the dispatcher unusable: later calls
/// throw TransportError and say why.
class SequenceDispatcher {
 public:
  /// Collective. The dispatcher holds the world.
  /// @throws InvalidArgument for options out of range, and RelayUse::always with copy engines
  ///   (num_sms = 0 on GPUs), which forward nothing; on all ranks when max_window_bytes or the
  ///   plan's relay, batch_bytes or speeds differ, naming the rank; Timeout
  explicit SequenceDispatcher(const World& world, SequenceDispatcherOptions options = {});
  ~SequenceDispatcher();
  SequenceDispatcher(SequenceDispatcher&&) noexcept;
  SequenceDispatcher& operator=(SequenceDispatcher&&) noexcept;

  /// Collective: waits for this rank's device, then gives the windows back. Without it their memory
  /// goes with the world; the destructor does not wait for anybody.
  void close();

  /// Compiles and uploads this rank's work. Not collective. @throws as compile_dispatch
  [[nodiscard]] PlanHandle plan_dispatch(std::span<const SequencePart> parts, Stream stream = {});

  /// The same for kv_gradient; `parts` hold the forward metadata of K and V.
  [[nodiscard]] PlanHandle plan_kv_gradient(std::span<const SequencePart> parts,
                                            Stream stream = {});

  /// Replaces a plan by one of the same operation and formats, in the same memory: a captured graph
  /// replays the new one. @throws InvalidArgument with the plan unchanged when it has more chunks
  ///   or places than the plan was made with, the windows are too small, or a graph holds copies of
  ///   its ranges (num_sms = 0, local_by_copy_engine).
  void replace_plan(PlanHandle& ready, std::span<const SequencePart> parts, Stream stream = {});

  /// Collective: makes the windows large enough for plans with this window_bytes, and the counters
  /// for plans with this num_slots.
  void reserve(std::int64_t window_bytes, Stream stream = {},
               std::int32_t num_slots = least_batch_slots);

  /// Collective: sends the rows of `tensors` to where the plan says.
  /// @param tensors [own_rows or more, hidden] each, in the plan's order; the elements of a row are
  ///   adjacent, rows may have any distance
  /// @param of_dispatch the dispatch whose gradients these are, by its number; 0: none. Ranks
  ///   compare it, so that backward passes in another order are noticed.
  /// @return one view [window_rows, hidden] a tensor, in this rank's window; rows that no line of
  ///   the plan writes are undefined
  /// @throws InvalidArgument before anything moves; Disagreement; Timeout
  std::vector<TensorView> dispatch(const PlanHandle& ready,
                                   std::span<const ConstTensorView> tensors, Stream stream = {},
                                   std::uint64_t of_dispatch = 0);

  /// Collective: row x of an output is the sum over the copies of row x, in float32 (float64 for
  /// float64), in the order of the copies, rounded once; one copy alone keeps its bits; 0 without
  /// copies. The same as sum_kv_copies after a reverse dispatch into planes.
  /// @param gradients [window_rows or more, hidden] each: of the rows that this rank had received
  /// @param outputs [own_rows or more, hidden], dtype of the gradients, or float32 for 16-bit ones
  /// @param of_dispatch as above
  /// @throws InvalidArgument before anything moves; Disagreement; Timeout
  void kv_gradient(const PlanHandle& ready, std::span<const ConstTensorView> gradients,
                   std::span<const TensorView> outputs, Stream stream = {},
                   std::uint64_t of_dispatch = 0);

  /// The number of the last dispatch, from 1 on: what a gradient of it is told.
  [[nodiscard]] std::uint64_t last_dispatch() const noexcept;

  /// Where the next kv_gradient would copy its gradients: whoever writes them there, and passes
  /// these views, saves the copy. Collective when the windows must grow. Valid for the next call.
  [[nodiscard]] std::vector<TensorView> gradient_inputs(const PlanHandle& ready,
                                                        Stream stream = {});

  /// Returns when the calls on the stream are done. @throws Timeout that one of them has met
  void synchronize(Stream stream = {});

  [[nodiscard]] std::int64_t window_bytes() const noexcept;

  /// Owners of the windows' memory. Whoever keeps views past close() or the next growth, although
  /// nothing arrives there any more, holds these too. On GPUs let go of it only
  /// where all ranks wait for each other, or with the world.
  [[nodiscard]] std::vector<std::shared_ptr<void>> window_memory() const;
  [[nodiscard]] const SequenceDispatcherOptions& options() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;  ///< null: moved from
};

}  // namespace waybill
