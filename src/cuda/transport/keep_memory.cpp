#include "keep_memory.h"

#include <mutex>
#include <utility>
#include <vector>

namespace waybill::cuda {
namespace {

void keep_for_good(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<void>>;  // lives longer than all else
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace

void FreeIfReleased::operator()(void* /*begin*/) {
  if (!released) keep_for_good(std::move(memory));
  memory.reset();
}

std::shared_ptr<void> keep_until_released(std::shared_ptr<void> memory) {
  void* const begin = memory.get();
  return {begin, FreeIfReleased{std::move(memory)}};
}

void note_release(const std::shared_ptr<void>& memory) {
  if (auto* const keeper = std::get_deleter<FreeIfReleased>(memory)) keeper->released = true;
}

}  // namespace waybill::cuda
