#pragma once

#include <cstdint>

namespace waybill::detail {

/// Counts the calls that go into recordings (CUDA graphs). A replay runs all of one, however often:
/// with an odd number of them the calls that have run and those that were made drift apart, modulo
/// two, by which windows are chosen.
class CaptureLog {
 public:
  /// Asked before a call that goes to recording `capture` (Executor::capture; 0: none, it runs).
  /// @return whether they may have drifted apart: before the first call of each recording, and
  ///   before calls outside once a recording has had an odd number
  [[nodiscard]] bool may_be_off(std::uint64_t capture) {
    const bool first = capture != capture_;
    if (first) {
      has_odd_ = has_odd_ || num_calls_ % 2 != 0;
      num_calls_ = 0;
      capture_ = capture;
    }
    return capture == 0 ? has_odd_ : first;
  }

  /// A call has been made.
  void count() { num_calls_ += capture_ != 0 ? 1 : 0; }

 private:
  std::uint64_t capture_ = 0;
  std::uint64_t num_calls_ = 0;  ///< in it
  bool has_odd_ = false;
};

}  // namespace waybill::detail
