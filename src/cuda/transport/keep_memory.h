#pragma once

#include <memory>

namespace waybill::cuda {

/// A deleter for memory that goes back only after a collective release, as other ranks may use it
/// or must free theirs at the same time; else it stays until the process ends.
struct FreeIfReleased {
  std::shared_ptr<void> memory;
  bool released = false;

  void operator()(void* begin);
};

/// The same memory with that deleter.
[[nodiscard]] std::shared_ptr<void> keep_until_released(std::shared_ptr<void> memory);

/// Says that all ranks have released what keep_until_released returned.
void note_release(const std::shared_ptr<void>& memory);

}  // namespace waybill::cuda
