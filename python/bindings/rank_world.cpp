#include "rank_world.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <tuple>
#include <utility>

#include "runtime/executor.h"
#include "waybill/core/dtype.h"
#include "waybill/core/error.h"

namespace waybill::python {

namespace {

namespace nb = nanobind;

constexpr std::chrono::milliseconds check_every{20};

thread_local const RankWorld::Call* innermost_call = nullptr;

/// Whoever has the turn may need the interpreter's lock to end its call.
void take(CallTurn& turn) {
  if (turn.try_take()) return;
  std::optional<InterpreterUnlocked> without_lock;
  if (Py_IsInitialized() != 0 && holds_interpreter()) without_lock.emplace();
  turn.take();
}

}  // namespace

bool CallTurn::try_take() {
  const std::lock_guard lock(mutex_);
  if (taken_ || !waiting_.empty()) return false;
  taken_ = true;
  return true;
}

void CallTurn::take() {
  std::unique_lock lock(mutex_);
  await(lock, true);
}

void CallTurn::give() noexcept {
  {
    const std::lock_guard lock(mutex_);
    taken_ = false;
  }
  freed_.notify_all();
}

void CallTurn::let_others() noexcept {
  if (num_waiting_ == 0) return;
  std::unique_lock lock(mutex_);
  taken_ = false;
  freed_.notify_all();
  await(lock, false);
}

void CallTurn::await(std::unique_lock<std::mutex>& lock, bool may_throw) {
  const char mine = 0;
  const auto leave = [&] {
    std::erase(waiting_, &mine);
    --num_waiting_;
  };
  waiting_.push_back(&mine);
  ++num_waiting_;
  while (taken_ || waiting_.front() != &mine) {
    (void)freed_.wait_for(lock, check_every);
    if (!may_throw) continue;
    lock.unlock();
    try {
      check_interrupt();
    } catch (...) {
      lock.lock();
      leave();
      freed_.notify_all();
      throw;
    }
    lock.lock();
  }
  leave();
  taken_ = true;
}

RankWorld::~RankWorld() {
  // Memory of a GPU is freed when the device is idle, for which another rank's thread may need the
  // interpreter.
  std::optional<InterpreterUnlocked> without_lock;
  if (Py_IsInitialized() != 0 && holds_interpreter()) without_lock.emplace();
  dead_plans_.clear();
  retired_.clear();
  World gone = std::move(world_);
}

RankWorld::Call::Call(RankWorld& rank, const char* who, CallTurn* object)
    : rank_(rank), object_(object), outer_(innermost_call) {
  for (const Call* call = outer_; call != nullptr; call = call->outer_) {
    require(&call->rank_ != &rank, who, ": the world of rank ", rank.world_.rank(),
            " is in a call of this thread, expected that to end first");
  }
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

void RankWorld::queue_together(const char* operation, Stream stream) {
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

nb::object array_over(const ConstTensorView& view, const RankWorld& rank,
                      const nb::capsule& owner) {
  if (view.shape.empty()) return nb::none();  // not given
  const auto bits = static_cast<std::uint8_t>(dtype_bytes(view.dtype) * 8);
  const nb::dlpack::dtype dtype{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int), bits, 1};
  const std::vector<std::size_t> extents(view.shape.begin(), view.shape.end());
  void* const data = const_cast<std::byte*>(view.data);  // NOLINT: tensors have no read-only form
  if (rank.device() < 0) {
    return nb::cast(
        nb::ndarray<nb::numpy>(data, extents.size(), extents.data(), owner, nullptr, dtype));
  }
  return nb::cast(nb::ndarray<>(data, extents.size(), extents.data(), owner, nullptr, dtype,
                                nb::device::cuda::value, rank.device()));
}

nb::capsule owner_of(std::shared_ptr<RankWorld> rank, std::vector<std::shared_ptr<void>> memory,
                     std::shared_ptr<void> other) {
  using Held = std::tuple<std::shared_ptr<RankWorld>, std::vector<std::shared_ptr<void>>,
                          std::shared_ptr<void>>;
  auto held = std::make_unique<Held>(std::move(rank), std::move(memory), std::move(other));
  return {held.release(), [](void* pointer) noexcept {
            const std::unique_ptr<Held> last(static_cast<Held*>(pointer));
            std::get<0>(*last)->retire(std::move(std::get<1>(*last)));
          }};
}

}  // namespace waybill::python
