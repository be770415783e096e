#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "runtime/fingerprint.h"
#include "schedule/sequence_plan.h"
#include "transport/transport.h"
#include "waybill/core/host_tensor.h"
#include "waybill/runtime/world.h"

namespace waybill {

/// The tables of a plan, which an executor keeps between calls where the work is done.
class UploadedPlan {
 public:
  UploadedPlan() = default;
  UploadedPlan(const UploadedPlan&) = delete;
  UploadedPlan& operator=(const UploadedPlan&) = delete;
  virtual ~UploadedPlan() = default;
};

/// Slots of an arrivals pad after those of the ranks, for counters of the executor.
inline constexpr std::int64_t num_executor_slots = 8;

/// Counters of an arrivals pad before the words of the ranks (with_fingerprints).
[[nodiscard]] constexpr std::int64_t num_arrival_signals(std::int32_t world_size) {
  return world_size + num_executor_slots;
}

/// One call of an operation, checked. All ranks have the same epoch.
struct SequenceCall {
  const char* operation = "";  ///< in errors
  const SequencePlan* plan = nullptr;
  const UploadedPlan* uploaded = nullptr;
  std::span<const ConstTensorView> inputs;  ///< [tensors]; rows may have any distance
  std::span<const TensorView> outputs;      ///< kv_gradient: [tensors]
  const SymmetricBuffer* window = nullptr;  ///< the one of this epoch's parity
  /// with_fingerprints(num_arrival_signals(W), W) counters: rank r raises slot r; then the slots of
  /// the executor, and what ranks tell of their calls.
  const SignalPad* arrivals = nullptr;
  /// [W * (1 + num_slots or more)] slot r: rank r's notes for whom it waits, where the executor
  /// writes such; after them the slots of batches: slot k of a plan is counter W + k.
  const SignalPad* slots = nullptr;
  std::uint64_t epoch = 0;      ///< this call's; a graph may replay a later one
  CallFingerprint fingerprint;  ///< this rank's view of the call
  int num_sms = 0;
  Stream stream;
};

/// Does the work of a world, on its kind of memory. Every call ends the epoch: each rank raises its
/// slot at all ranks, and no rank is past the call before all have raised theirs.
class Executor {
 public:
  Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  virtual ~Executor() = default;

  /// Whether it makes the chunks of a plan from its segments, and knows local segments: plans then
  /// come without chunks.
  [[nodiscard]] virtual bool expands_plans() const { return false; }

  /// Whether it runs plans with batches: relays, and several nodes.
  [[nodiscard]] virtual bool runs_batches() const { return false; }

  /// Whether it wants what goes to other nodes as SequencePlan::network.
  [[nodiscard]] virtual bool splits_network() const { return false; }

  /// Whether it wants SequencePlan::phases besides, to receive what others send.
  [[nodiscard]] virtual bool is_two_sided() const { return false; }

  /// Names the GPU whose links rows take; empty in host memory.
  [[nodiscard]] virtual std::string device_name() const { return {}; }

  /// Keeps the tables of a plan.
  [[nodiscard]] virtual std::unique_ptr<UploadedPlan> upload(const SequencePlan& plan,
                                                             Stream stream) = 0;

  /// Puts another plan's tables where those of an earlier one are.
  /// @throws InvalidArgument if they do not fit; the earlier ones are as before
  virtual void refill(UploadedPlan& uploaded, const SequencePlan& plan, Stream stream) = 0;

  /// Rows from the inputs into the windows of all ranks. @throws Timeout
  virtual void dispatch(const SequenceCall& call) = 0;

  /// Inputs into this rank's window, then the sums of what the windows of all ranks hold into the
  /// outputs. An input that is its place in the window stays there. @throws Timeout
  virtual void kv_gradient(const SequenceCall& call) = 0;

  /// Returns when all work on the stream is done. @throws Timeout that a call on it has met
  virtual void synchronize(Stream stream) = 0;

  /// Returns when all work of this rank's device is done, on whatever stream. @throws Timeout
  virtual void finish() = 0;

  /// Which recording (a CUDA graph) the calls on this stream go to; 0: none, they run.
  [[nodiscard]] virtual std::uint64_t capture(Stream /*stream*/) const { return 0; }

  /// Before a call when the number of calls that have run may differ in parity from that of its
  /// epoch, as a graph holds an odd number of them: runs an empty one if it does. On several nodes
  /// it does nothing, and the call reports the fault.
  virtual void realign(const SequenceCall& /*call*/) {}
};

/// Whether rows of a dtype can be summed into another: the same, or float32 for 16-bit ones.
[[nodiscard]] bool can_sum(DType from, DType to);

/// For worlds whose windows are host memory. Calls return when their work is done.
[[nodiscard]] std::unique_ptr<Executor> make_host_executor(Transport& transport);

}  // namespace waybill
