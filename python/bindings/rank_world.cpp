#include "rank_world.h"

#include <optional>
#include <utility>

#include "interrupts.h"
#include "runtime/executor.h"
#include "waybill/core/error.h"

namespace waybill::python {

namespace {

thread_local const RankWorld::Call* innermost_call = nullptr;

/// Whoever has the turn may need the interpreter's lock to end its call.
void take(CallTurn& turn) {
  if (turn.try_take()) return;
  std::optional<InterpreterUnlocked> without_lock;
  if (Py_IsInitialized() != 0 && holds_interpreter()) without_lock.emplace();
  turn.take();
}

}  // namespace

RankWorld::~RankWorld() {
  // Memory of a GPU is freed when the device is idle, for which another rank's thread may need the
  // interpreter.
  std::optional<InterpreterUnlocked> without_lock;
  if (Py_IsInitialized() != 0 && holds_interpreter()) without_lock.emplace();
  dead_plans_.clear();
  retired_.clear();
  World gone = std::move(world_);
}

RankWorld::Call::Call(RankWorld& rank, const char* who, CallTurn* object, Looks looks)
    : rank_(rank), object_(object), outer_(innermost_call) {
  for (const Call* call = outer_; call != nullptr; call = call->outer_) {
    require(&call->rank_ != &rank, who, ": the world of rank ", rank.world_.rank(),
            " is in a call of this thread, expected that to end first");
  }
  if (looks == Looks::yes) rank.check_ended(who);
  if (object_ != nullptr) take(*object_);
  try {
    take(rank.turn_);
  } catch (...) {
    if (object_ != nullptr) object_->give();
    throw;
  }
  innermost_call = this;
  entered_.emplace(rank.turn_);
  std::vector<PlanHandle> dead;
  const std::lock_guard lock(rank.mutex_);
  dead.swap(rank.dead_plans_);
}

RankWorld::Call::~Call() {
  entered_.reset();
  innermost_call = outer_;
  rank_.turn_.give();
  if (object_ != nullptr) object_->give();
}

void RankWorld::check_ended(const char* who) {
  if (scope_ != nullptr && scope_->has_ended()) {
    world_.transport().check_peers(who, world_.rank());
  }
  check_asked_to_end();
}

void RankWorld::meet(const char* operation, Stream stream) {
  if (!in_step_ || world_.executor().capture(stream) != 0) return;
  abort_state_.check(operation);
  abort_state_.guard([&] { world_.transport().barrier(operation); });
}

void RankWorld::discard(PlanHandle plan) {
  const std::lock_guard lock(mutex_);
  dead_plans_.push_back(std::move(plan));
}

void RankWorld::retire(std::vector<std::shared_ptr<void>> memory) {
  const std::lock_guard lock(mutex_);
  for (std::shared_ptr<void>& block : memory) {
    if (block.use_count() == 1) retired_.push_back(std::move(block));
  }
}

}  // namespace waybill::python
