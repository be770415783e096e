#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "waybill/core/error.h"

namespace waybill {

/// Another rank failed, was interrupted or is gone. The text names it and says why.
class PeerFailed : public TransportError {
 public:
  using TransportError::TransportError;
};

/// A wait that the user ended (Ctrl-C).
class Interrupted : public Error {
 public:
  using Error::Error;
};

/// Asked by every wait of the host. Throws Interrupted when the user wants the program to stop, or
/// what the scope of this thread throws (a rank of run_ranks_as_threads whose peer failed).
void check_interrupt();

/// A polling wait of the host: `while (!done()) if (!wait.pause()) throw Timeout(...)`.
class PollingWait {
 public:
  /// @param timeout_s may be infinity
  /// @param yields_s so long it yields and does not sleep
  explicit PollingWait(double timeout_s, double yields_s = 0.001);

  /// Yields at first, then sleeps 50 us, later up to 1 ms; calls check_interrupt() at least every
  /// 20 ms. @return false once timeout_s are over. @throws as check_interrupt
  bool pause();

  [[nodiscard]] double waited_s() const;

 private:
  using Clock = std::chrono::steady_clock;

  double timeout_s_;
  double yields_s_;
  double next_check_s_;
  Clock::time_point start_ = Clock::now();
};

/// Who else knows when waits are to end, asked by check_interrupt(): a binding to a language that
/// handles signals, a program with a window. It throws Interrupted, on any thread that waits.
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

/// Ends the waits of several threads together, such as those of the ranks of one run. Any thread
/// may call anything.
class WaitScope {
 public:
  /// From now on check() throws PeerFailed with this text; the first call counts.
  void fail(std::string_view reason) noexcept;

  /// The same with Interrupted.
  void interrupt(std::string_view reason) noexcept;

  [[nodiscard]] bool has_ended() const noexcept { return end_ != End::none; }
  void check() const {
    if (has_ended()) throw_end();
  }

 private:
  enum class End { none, failed, interrupted };
  void end(End how, std::string_view reason) noexcept;
  [[noreturn]] void throw_end() const;

  mutable std::mutex mutex_;
  std::string reason_;
  std::atomic<End> end_ = End::none;
};

/// While it lives, check_interrupt() on this thread asks a scope too, before all else.
class EnteredWaitScope {
 public:
  explicit EnteredWaitScope(std::shared_ptr<const WaitScope> scope) noexcept;
  EnteredWaitScope(const EnteredWaitScope&) = delete;
  EnteredWaitScope& operator=(const EnteredWaitScope&) = delete;
  ~EnteredWaitScope();

 private:
  std::shared_ptr<const WaitScope> before_;
};

}  // namespace waybill
