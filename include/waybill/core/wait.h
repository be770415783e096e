#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/core/error.h"

namespace waybill {

/// Longer deadlines are refused: in nanoseconds, a few of them added up, they must fit a counter.
inline constexpr double max_timeout_s = 1e9;

/// @throws InvalidArgument unless 0 < timeout_s <= max_timeout_s: every wait has a deadline
void check_timeout(std::string_view who, double timeout_s);

/// Asked by every wait of the host. Throws Interrupted when the user wants the program to stop, or
/// what a scope of this thread throws (a rank of run_ranks_as_threads whose peer failed).
void check_interrupt();

/// How a PollingWait waits.
struct WaitOptions {
  double yields_s = 0.001;           ///< how long it yields before it sleeps
  std::function<void()> check = {};  ///< called as often as check_interrupt(); it may throw
  bool gives_turn = false;           ///< while it pauses, others may have this thread's WaitTurn
  /// Waiters that may share the host's cores: with more than 64 each sleeps the longer, as
  /// otherwise the cores do little else than wake them up.
  std::int32_t num_waiters = 1;
};

/// A turn that threads take one after another, at an object that serves one thread at a time.
class WaitTurn {
 public:
  WaitTurn() = default;
  WaitTurn(const WaitTurn&) = delete;
  WaitTurn& operator=(const WaitTurn&) = delete;
  virtual ~WaitTurn() = default;

  /// In a pause of the thread that has the turn: lets threads that wait for it have it, and takes
  /// it again.
  virtual void let_others() noexcept = 0;
};

/// While it lives, this thread has the turn, and its waits that may give it away do so.
class EnteredWaitTurn {
 public:
  explicit EnteredWaitTurn(WaitTurn& turn) noexcept;
  EnteredWaitTurn(const EnteredWaitTurn&) = delete;
  EnteredWaitTurn& operator=(const EnteredWaitTurn&) = delete;
  ~EnteredWaitTurn();

 private:
  WaitTurn* outer_;
};

/// A polling wait of the host: `while (!done()) if (!wait.pause()) throw Timeout(...)`.
class PollingWait {
 public:
  /// @param timeout_s may be infinity
  explicit PollingWait(double timeout_s, WaitOptions options = {});
  PollingWait(const PollingWait&) = delete;
  PollingWait& operator=(const PollingWait&) = delete;
  ~PollingWait();

  /// Yields at first, then sleeps 50 us, later up to 1 ms; calls check_interrupt() at least every
  /// 20 ms. @return false once timeout_s are over. @throws as check_interrupt
  bool pause();

  [[nodiscard]] double waited_s() const;

  /// For an InterruptCheck: when the innermost one of this thread began; nothing: there is none.
  [[nodiscard]] static std::optional<std::chrono::steady_clock::time_point> began() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  double timeout_s_;
  double next_check_s_;
  WaitOptions options_;
  Clock::time_point start_ = Clock::now();
  const PollingWait* outer_;
};

/// Asked by check_interrupt() whether waits are to end: by a binding to a language that handles
/// signals, or a program with a window. It throws Interrupted, on any thread that waits.
using InterruptCheck = void (*)();

/// For the whole process; null: nobody. @return the one before
InterruptCheck set_interrupt_check(InterruptCheck check) noexcept;

/// For programs without such a check: while it lives, the first SIGINT makes check_interrupt()
/// throw on every thread, the second one ends the program. One object at a time.
class EndWaitsOnSigint {
 public:
  EndWaitsOnSigint();
  EndWaitsOnSigint(const EndWaitsOnSigint&) = delete;
  EndWaitsOnSigint& operator=(const EndWaitsOnSigint&) = delete;
  ~EndWaitsOnSigint();

 private:
  struct Before;
  std::unique_ptr<Before> before_;
};

/// Something that ends the waits of the threads that have entered it.
class WaitScope {
 public:
  WaitScope() = default;
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;
  virtual ~WaitScope() = default;

  /// On any thread. Throws when waits are to end.
  virtual void check() const = 0;
};

/// While it lives, check_interrupt() on this thread asks a scope too. Those entered before stay in
/// force.
class EnteredWaitScope {
 public:
  /// @param scope not null
  explicit EnteredWaitScope(std::shared_ptr<const WaitScope> scope) noexcept;
  EnteredWaitScope(const EnteredWaitScope&) = delete;
  EnteredWaitScope& operator=(const EnteredWaitScope&) = delete;
  ~EnteredWaitScope();

 private:
  friend void check_interrupt();
  std::shared_ptr<const WaitScope> scope_;
  const EnteredWaitScope* outer_;
};

/// The ranks of one run of threads, whose waits end together. Any thread may call anything.
class FailureScope final : public WaitScope {
 public:
  /// From now on check() throws PeerFailed with this text; the first call counts.
  void fail(std::string_view reason) noexcept;

  /// The same with Interrupted.
  void interrupt(std::string_view reason) noexcept;

  [[nodiscard]] bool has_ended() const noexcept { return end_ != End::none; }
  void check() const override {
    if (has_ended()) throw_end();
  }

  /// Calls `notify` when the scope ends, on the thread that ends it; now, if it has. It must not
  /// throw, nor call the scope. @return what keeps it in force: an object to hold
  [[nodiscard]] std::shared_ptr<void> on_end(std::function<void()> notify);

 private:
  enum class End { none, failed, interrupted };
  void end(End how, std::string_view reason) noexcept;
  [[noreturn]] void throw_end() const;

  mutable std::mutex mutex_;
  std::string reason_;
  std::atomic<End> end_ = End::none;
  std::vector<std::weak_ptr<std::function<void()>>> listeners_;
};

}  // namespace waybill
