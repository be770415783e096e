#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "waybill/core/wait.h"

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

}  // namespace waybill::python
