#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

#include "waybill/core/at.h"
#include "waybill/transport/bootstraps.h"

namespace waybill {
namespace {

using detail::at;
using Bytes = Bootstrap::Bytes;

/// What the threads share. Round k is over when all ranks have given their bytes to it. Two slots
/// are enough: nobody begins round k + 2 before everybody has begun, hence left round k.
struct Meeting {
  explicit Meeting(std::int32_t world_size) : rounds(at(world_size)) {
    for (auto& slot : slots) slot.resize(at(world_size));
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::uint64_t> rounds;  ///< [W]: exchanges begun by each rank
  std::vector<Bytes> slots[2];        ///< [parity][W]
};

class ThreadBootstrap final : public Bootstrap {
 public:
  ThreadBootstrap(std::int32_t rank, std::int32_t world_size, double timeout_s,
                  std::shared_ptr<Meeting> meeting)
      : Bootstrap(rank, world_size, timeout_s), meeting_(std::move(meeting)) {}

 private:
  std::vector<Bytes> exchange(std::span<const std::byte> mine,
                              std::string_view operation) override {
    const auto me = at(to_int(rank()));
    std::unique_lock lock(meeting_->mutex);
    const std::uint64_t round = ++meeting_->rounds[me];
    auto& slot = meeting_->slots[round % 2];
    slot[me].assign(mine.begin(), mine.end());
    meeting_->changed.notify_all();
    const auto missing = [&] {
      std::int32_t r = 0;
      while (r < world_size() && meeting_->rounds[at(r)] >= round) ++r;
      return r;
    };
    const std::chrono::duration<double> timeout(timeout_s());
    if (!meeting_->changed.wait_for(lock, timeout, [&] { return missing() == world_size(); })) {
      const std::int32_t peer = missing();
      throw Timeout({.operation = std::string(operation),
                     .what = "exchange",
                     .rank = to_int(rank()),
                     .peer = peer,
                     .wanted = round,
                     .seen = meeting_->rounds[at(peer)],
                     .seconds = timeout_s()});
    }
    return slot;
  }

  std::shared_ptr<Meeting> meeting_;
};

}  // namespace

std::vector<std::unique_ptr<Bootstrap>> make_thread_bootstraps(std::int32_t world_size,
                                                               double timeout_s) {
  require(1 <= world_size && world_size <= max_world_size,
          "make_thread_bootstraps: world_size = ", world_size, ", expected 1..", max_world_size);
  const auto meeting = std::make_shared<Meeting>(world_size);
  std::vector<std::unique_ptr<Bootstrap>> all;
  for (std::int32_t r = 0; r < world_size; ++r) {
    all.push_back(std::make_unique<ThreadBootstrap>(r, world_size, timeout_s, meeting));
  }
  return all;
}

}  // namespace waybill
