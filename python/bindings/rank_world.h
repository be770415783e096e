#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "interrupts.h"
#include "runtime/abort_state.h"
#include "waybill/core/host_tensor.h"
#include "waybill/core/wait.h"
#include "waybill/runtime/sequence_dispatcher.h"
#include "waybill/runtime/world.h"

namespace waybill::python {

/// The turn of one call among those that several threads make: in the order in which they came.
class CallTurn final : public WaitTurn {
 public:
  /// Without waiting. @return whether this thread has the turn now
  [[nodiscard]] bool try_take();

  /// Waits for it. @throws as check_interrupt
  void take();

  void give() noexcept;
  void let_others() noexcept override;

 private:
  void await(std::unique_lock<std::mutex>& lock, bool may_throw);

  std::mutex mutex_;
  std::condition_variable freed_;
  std::deque<const void*> waiting_;  ///< in their order; each by an address of its own
  std::atomic<int> num_waiting_ = 0;
  bool taken_ = false;
};

/// One rank's world as Python holds it. Objects of Python die on any thread at any time; what must
/// not die while the rank works is kept here until its next call, or until the world ends.
class RankWorld {
 public:
  /// @param device ordinal of the GPU whose memory the windows are; -1: host memory
  /// @param scope ends the waits of ranks that are threads; null: they are processes
  /// @param in_step ranks are threads with a GPU each: queue_together() waits
  RankWorld(World world, std::shared_ptr<const FailureScope> scope, int device, bool in_step)
      : world_(std::move(world)), scope_(std::move(scope)), device_(device), in_step_(in_step) {}
  RankWorld(const RankWorld&) = delete;
  RankWorld& operator=(const RankWorld&) = delete;
  ~RankWorld();

  [[nodiscard]] World& world() noexcept { return world_; }
  [[nodiscard]] int device() const noexcept { return device_; }

  /// A call of this rank. It clears away what has died since the last one. Calls of several threads
  /// come one after the other; a call that waits for other ranks lets those of other objects go on,
  /// which ranks may make in another order. Bound functions use call() below.
  class Call {
   public:
    /// Waits for the calls of other threads, without the interpreter's lock.
    /// @param object whose calls this world serves; null: the call is the world's
    /// @throws InvalidArgument from within a call of this thread; as check_interrupt
    Call(RankWorld& rank, const char* who, CallTurn* object);
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call();

   private:
    RankWorld& rank_;
    CallTurn* object_;
    const Call* outer_;
    std::optional<EnteredWaitTurn> entered_;
  };

  /// Before a call begins, as a call whose data are there has no wait that would look: whether the
  /// user or another rank has ended the program. A few loads while nothing has ended.
  /// @throws PeerFailed, Interrupted, PythonInterrupt
  void check_ended(const char* who);

  /// Around what queues work that waits for other ranks. What a thread loads, allocates or copies
  /// at other times may stop until any device of the process is idle. So no device is left waiting
  /// for a thread that may do such things: all ranks queue their parts, then all go on. A rank that
  /// does not come is a Timeout before anything is queued, and no device is lost; this rank's world
  /// is unusable then. Nothing is done while `stream` is captured.
  void queue_together(const char* operation, Stream stream);

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

using WorldHandle = Held<RankWorld>;

/// A cudaStream_t, as Python has it.
[[nodiscard]] inline Stream stream_from(std::uintptr_t handle) {
  return {reinterpret_cast<void*>(handle)};  // NOLINT(performance-no-int-to-ptr)
}

/// Makes one call of a rank: `f()` without the interpreter's lock, in the turn of the rank and of
/// the object. A stream means that `f` queues work that waits for other ranks.
/// @param looks whether it ends before it begins where the program has ended
template <class F>
auto call(RankWorld& rank, CallTurn* object, const char* who, std::optional<Stream> stream, F&& f,
          bool looks = true) {
  const InterpreterUnlocked without_lock;
  if (looks) rank.check_ended(who);
  const RankWorld::Call turn(rank, who, object);
  if (!stream) return f();
  rank.queue_together(who, *stream);
  if constexpr (std::is_void_v<decltype(f())>) {
    f();
    rank.queue_together(who, *stream);
  } else {
    auto result = f();
    rank.queue_together(who, *stream);
    return result;
  }
}

/// An object of a rank as Python holds it, such as a layer: with its world, one call at a time.
template <class Object>
class OnRank {
 public:
  /// @param make makes the object from the World, in a call
  template <class Make>
  OnRank(const WorldHandle& world, const char* who, const Make& make) : rank_(world.object) {
    python::call(*rank_, &turn_, who, std::nullopt, [&] { object_.emplace(make(rank_->world())); });
  }
  OnRank(const OnRank&) = delete;
  OnRank& operator=(const OnRank&) = delete;
  virtual ~OnRank() = default;

  /// `f(object)` in a call; or a method of it. A stream means that `f` queues work that waits for
  /// other ranks.
  template <class F>
  auto call(const char* who, F&& f, std::optional<Stream> stream = std::nullopt) {
    return python::call(*rank_, &turn_, who, stream, [&] { return run(f); });
  }

  /// The same for what may run after the program has been asked to end: questions, cleaning up.
  template <class F>
  auto call_always(const char* who, F&& f) {
    return python::call(
        *rank_, &turn_, who, std::nullopt, [&] { return run(f); }, false);
  }

  [[nodiscard]] const std::shared_ptr<RankWorld>& rank() const noexcept { return rank_; }

 private:
  /// After each call, and in its turn.
  virtual void call_ended(const Object& /*object*/) noexcept {}

  template <class F>
  auto run(F& f) {
    const std::unique_ptr<OnRank, void (*)(OnRank*)> at_end(
        this, [](OnRank* self) { self->call_ended(*self->object_); });
    return std::invoke(f, *object_);
  }

  std::shared_ptr<RankWorld> rank_;
  CallTurn turn_;
  std::optional<Object> object_;
};

/// An array of integers of the dtype's size over rows of a window: numpy's in host memory; on a GPU
/// an object that speaks DLPack. `owner` is an owner_of().
[[nodiscard]] nanobind::object array_over(const ConstTensorView& view, const RankWorld& rank,
                                          const nanobind::capsule& owner);

/// Keeps the world, memory that retires with the last array over it, and `other`, which ends then.
[[nodiscard]] nanobind::capsule owner_of(std::shared_ptr<RankWorld> rank,
                                         std::vector<std::shared_ptr<void>> memory,
                                         std::shared_ptr<void> other = nullptr);

}  // namespace waybill::python
