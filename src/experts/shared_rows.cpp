#include "shared_rows.h"

#include <map>
#include <mutex>
#include <optional>
#include <utility>

namespace waybill::detail {
namespace {

struct Shared {
  explicit Shared(const std::shared_ptr<void>& of) : memory(of) {}

  /// Not memory that came to lie at the same address later.
  [[nodiscard]] bool is_of(const std::shared_ptr<void>& other) const {
    return !memory.owner_before(other) && !other.owner_before(memory);
  }

  std::weak_ptr<void> memory;
  std::mutex mutex;  ///< held while the rows are made
  std::optional<ExpertRows> rows;
};

class SharedRows {
 public:
  std::shared_ptr<Shared> get(const std::shared_ptr<void>& memory, std::uint64_t epoch) {
    const std::lock_guard lock(mutex_);
    std::weak_ptr<Shared>& place = calls_[{memory.get(), epoch}];
    std::shared_ptr<Shared> shared = place.lock();
    if (shared != nullptr && shared->is_of(memory)) return shared;
    shared = std::make_shared<Shared>(memory);
    place = shared;
    std::erase_if(calls_, [](const auto& call) { return call.second.expired(); });
    return shared;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<const void*, std::uint64_t>, std::weak_ptr<Shared>> calls_;
};

SharedRows& shared_rows() {
  static SharedRows rows;
  return rows;
}

}  // namespace

std::shared_ptr<const ExpertRows> share_rows(const std::shared_ptr<void>& memory,
                                             std::uint64_t epoch,
                                             const std::function<ExpertRows()>& make) {
  std::shared_ptr<Shared> shared = shared_rows().get(memory, epoch);
  const std::lock_guard lock(shared->mutex);
  if (!shared->rows) shared->rows = make();
  const ExpertRows* const rows = &*shared->rows;
  return {std::move(shared), rows};
}

}  // namespace waybill::detail
