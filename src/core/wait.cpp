#include "waybill/core/wait.h"

#include <algorithm>
#include <csignal>
#include <thread>
#include <utility>

namespace waybill {
namespace {

constexpr double check_every_s = 0.02;
constexpr double shortest_sleep_s = 50e-6;
constexpr double longest_sleep_s = 1e-3;
constexpr double share_of_waited = 1.0 / 64;  // a sleep may add as much to a long wait
constexpr std::int32_t few_waiters = 64;
constexpr double sleep_per_waiter_s = 10e-6;  // with more than a few
constexpr double longest_sleep_of_many_s = 10e-3;

double shortest_sleep_of(const WaitOptions& options) {
  if (options.num_waiters <= few_waiters) return shortest_sleep_s;
  return std::min(options.num_waiters * sleep_per_waiter_s, longest_sleep_of_many_s);
}

std::atomic<InterruptCheck> installed_check = nullptr;
std::atomic<bool> got_sigint = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // a signal handler sets it

thread_local const EnteredWaitScope* innermost = nullptr;
thread_local const PollingWait* innermost_wait = nullptr;
thread_local WaitTurn* innermost_turn = nullptr;

/// The handler is gone when it is called: the next signal does what it did before.
void note_sigint(int /*signal*/) { got_sigint = true; }

}  // namespace

void check_timeout(std::string_view who, double timeout_s) {
  require(timeout_s > 0 && timeout_s <= max_timeout_s, who, ": timeout_s = ", timeout_s,
          ", expected more than 0 and at most ", max_timeout_s,
          " seconds, as every wait has a deadline");
}

void check_interrupt() {
  for (const EnteredWaitScope* entered = innermost; entered != nullptr; entered = entered->outer_) {
    entered->scope_->check();
  }
  if (got_sigint) throw Interrupted("interrupted by SIGINT");
  if (const InterruptCheck check = installed_check) check();
}

PollingWait::PollingWait(double timeout_s, WaitOptions options)
    : timeout_s_(timeout_s),
      next_check_s_(check_every_s),
      options_(std::move(options)),
      outer_(std::exchange(innermost_wait, this)) {}

PollingWait::~PollingWait() { innermost_wait = outer_; }

std::optional<PollingWait::Clock::time_point> PollingWait::began() noexcept {
  if (innermost_wait == nullptr) return std::nullopt;
  return innermost_wait->start_;
}

double PollingWait::waited_s() const {
  return std::chrono::duration<double>(Clock::now() - start_).count();
}

bool PollingWait::pause() {
  const double waited = waited_s();
  if (waited > timeout_s_) return false;
  // A loop of calls between fast ranks waits often, never for long: it has to see SIGINT as well.
  if (waited >= next_check_s_ || got_sigint) {
    if (options_.check) options_.check();  // first: it knows more about what was waited for
    check_interrupt();
    next_check_s_ = waited + check_every_s - longest_sleep_s;
  }
  if (options_.gives_turn && innermost_turn != nullptr) innermost_turn->let_others();
  if (waited < options_.yields_s) {
    std::this_thread::yield();
  } else {
    const double least = shortest_sleep_of(options_);
    const double sleep =
        std::clamp(waited * share_of_waited, least, std::max(least, longest_sleep_s));
    std::this_thread::sleep_for(std::chrono::duration<double>(sleep));
  }
  return true;
}

EnteredWaitTurn::EnteredWaitTurn(WaitTurn& turn) noexcept
    : outer_(std::exchange(innermost_turn, &turn)) {}

EnteredWaitTurn::~EnteredWaitTurn() { innermost_turn = outer_; }

InterruptCheck set_interrupt_check(InterruptCheck check) noexcept {
  return installed_check.exchange(check);
}

struct EndWaitsOnSigint::Before {
  struct sigaction action = {};
};

EndWaitsOnSigint::EndWaitsOnSigint() : before_(std::make_unique<Before>()) {
  got_sigint = false;
  struct sigaction action = {};
  action.sa_handler = note_sigint;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  (void)sigemptyset(&action.sa_mask);
  (void)sigaction(SIGINT, &action, &before_->action);
}

EndWaitsOnSigint::~EndWaitsOnSigint() {
  (void)sigaction(SIGINT, &before_->action, nullptr);
  got_sigint = false;
}

EnteredWaitScope::EnteredWaitScope(std::shared_ptr<const WaitScope> scope) noexcept
    : scope_(std::move(scope)), outer_(std::exchange(innermost, this)) {}

EnteredWaitScope::~EnteredWaitScope() { innermost = outer_; }

void FailureScope::fail(std::string_view reason) noexcept { end(End::failed, reason); }

void FailureScope::interrupt(std::string_view reason) noexcept { end(End::interrupted, reason); }

void FailureScope::end(End how, std::string_view reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (end_ != End::none) return;
  try {
    reason_ = reason;
  } catch (const std::exception&) {  // no memory: it ends without a text
    reason_.clear();
  }
  end_ = how;
  for (const auto& listener : listeners_) {
    if (const auto notify = listener.lock()) (*notify)();
  }
}

void FailureScope::throw_end() const {
  const std::lock_guard lock(mutex_);
  if (end_ == End::interrupted) throw Interrupted(reason_);
  throw PeerFailed(reason_);
}

std::shared_ptr<void> FailureScope::on_end(std::function<void()> notify) {
  const auto kept = std::make_shared<std::function<void()>>(std::move(notify));
  const std::lock_guard lock(mutex_);
  std::erase_if(listeners_, [](const auto& listener) { return listener.expired(); });
  listeners_.push_back(kept);
  if (has_ended()) (*kept)();
  return kept;
}

}  // namespace waybill
