#include "rank_world.h"

#include <optional>
#include <utility>

#include "interrupts.h"
#include "waybill/core/error.h"

namespace waybill::python {

RankWorld::~RankWorld() {
  // Memory of a GPU is freed when the device is idle, for which another rank's thread may need the
  // interpreter.
  std::optional<InterpreterUnlocked> without_lock;
  if (Py_IsInitialized() != 0 && holds_interpreter()) without_lock.emplace();
  dead_plans_.clear();
  retired_.clear();
  World gone = std::move(world_);
}

RankWorld::Call::Call(RankWorld& rank, const char* who) : rank_(rank) {
  require(!rank.busy_.test_and_set(), who, ": the world of rank ", rank.world_.rank(),
          " is in a call of another thread, expected one call at a time");
  std::vector<PlanHandle> dead;
  const std::lock_guard lock(rank.mutex_);
  dead.swap(rank.dead_plans_);
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
