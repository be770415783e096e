#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "call_turn.h"
#include "runtime/abort_state.h"
#include "waybill/core/wait.h"
#include "waybill/runtime/sequence_dispatcher.h"
#include "waybill/runtime/world.h"

namespace waybill::python {

/// One rank's world as Python holds it. Objects of Python die on any thread at any time; what must
/// not die while the rank works is kept here until its next call, or until the world ends.
class RankWorld {
 public:
  /// @param device ordinal of the GPU whose memory the windows are; -1: host memory
  /// @param scope ends the waits of ranks that are threads; null: they are processes
  /// @param in_step ranks are threads with a GPU each: meet() meets
  RankWorld(World world, std::shared_ptr<const FailureScope> scope, int device, bool in_step)
      : world_(std::move(world)), scope_(std::move(scope)), device_(device), in_step_(in_step) {}
  RankWorld(const RankWorld&) = delete;
  RankWorld& operator=(const RankWorld&) = delete;
  ~RankWorld();

  [[nodiscard]] World& world() noexcept { return world_; }
  [[nodiscard]] int device() const noexcept { return device_; }

  /// Whether a call looks before it begins. One that only answers, or may find nothing to do, does
  /// not.
  enum class Looks : std::uint8_t { yes, no };

  /// A call of this rank, and what clears away what has died. Calls of several threads come one
  /// after the other; a call that waits for other ranks lets those of other objects go on, which
  /// ranks may make in another order.
  class Call {
   public:
    /// Looks whether the user or another rank has ended the program, as a call whose data are there
    /// has no wait that would. Waits for the calls of other threads, without the interpreter's
    /// lock.
    /// @param object whose calls this world serves; null: the call is the world's
    /// @throws InvalidArgument from within a call of this thread; as check_interrupt
    Call(RankWorld& rank, const char* who, CallTurn* object = nullptr, Looks looks = Looks::yes);
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call();

   private:
    RankWorld& rank_;
    CallTurn* object_;
    const Call* outer_;
    std::optional<EnteredWaitTurn> entered_;
  };

  /// Before a call begins: a few loads while nothing has ended.
  /// @throws PeerFailed, Interrupted, PythonInterrupt
  void check_ended(const char* who);

  /// Around what queues work that waits for other ranks. What a thread loads, allocates or copies
  /// at other times may stop until any device of the process is idle. So no device is left waiting
  /// for a thread that may do such things: all ranks queue their parts, then all go on. A rank that
  /// does not come is a Timeout before anything is queued, and no device is lost; this rank's world
  /// is unusable then. Nothing is done while `stream` is captured.
  void meet(const char* operation, Stream stream);

  /// To be destroyed in the rank's next call.
  void discard(PlanHandle plan);

  /// Memory under a view that died. What nobody else holds is freed with the world: freeing waits
  /// for the device, on which another rank may wait for this one.
  void retire(std::vector<std::shared_ptr<void>> memory);

 private:
  World world_;
  std::shared_ptr<const FailureScope> scope_;
  int device_;
  bool in_step_;
  detail::AbortState abort_state_{"world", &world_.transport()};
  CallTurn turn_;
  std::mutex mutex_;
  std::vector<PlanHandle> dead_plans_;
  std::vector<std::shared_ptr<void>> retired_;
};

/// What Python's World holds.
struct WorldHandle {
  std::shared_ptr<RankWorld> rank;
};

/// A cudaStream_t, as Python has it.
[[nodiscard]] inline Stream stream_from(std::uintptr_t handle) {
  return {reinterpret_cast<void*>(handle)};  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace waybill::python
