#pragma once

#include <cstdint>

namespace waybill::cuda {

/// Puts of one step that are on their way.
struct PathCount {
  std::int32_t step;
  unsigned puts;        ///< or PathCounts::is_whole_step
  std::uint32_t begun;  ///< pieces that the group had begun behind them
};

/// What a group of threads has put and not yet counted, in order: so the next puts begin before the
/// last ones have arrived. All threads of the group go through it alike; whoever notes something
/// synchronizes before it is taken.
class PathCounts {
 public:
  static constexpr unsigned most = 16;
  static constexpr unsigned is_whole_step = 0;  ///< of which no other group has put

  /// @param memory shared, of the group: [most]
  __device__ explicit PathCounts(PathCount* memory) : memory_(memory) {}

  [[nodiscard]] __device__ bool is_empty() const { return first_ == behind_; }

  /// More puts of a step. @return false: there is no room
  __device__ bool note(std::int32_t step, unsigned puts, std::uint32_t begun) {
    if (is_empty() || step != step_) {
      if (behind_ - first_ == most) return false;
      step_ = step;
      puts_ = 0;
      ++behind_;
    }
    puts_ += puts;
    memory_[(behind_ - 1) % most] = {step, puts_, begun};  // all threads write the same
    return true;
  }

  /// Whether the first have arrived when all pieces but the last `few` have.
  [[nodiscard]] __device__ bool is_due(std::uint32_t begun, std::uint32_t few) const {
    return !is_empty() && begun - memory_[first_ % most].begun >= few;
  }

  /// @pre not empty
  __device__ PathCount take() { return memory_[first_++ % most]; }

 private:
  PathCount* const memory_;
  unsigned first_ = 0;
  unsigned behind_ = 0;
  std::int32_t step_ = -1;  ///< of the last
  unsigned puts_ = 0;       ///< of the last
};

}  // namespace waybill::cuda
