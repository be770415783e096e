#include "call_turn.h"

#include <algorithm>
#include <chrono>

namespace waybill::python {

namespace {

constexpr std::chrono::milliseconds check_every{20};

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

}  // namespace waybill::python
