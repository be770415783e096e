#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "core/checks.h"
#include "transport/bootstrap/wire.h"
#include "waybill/core/wait.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {
namespace {

using Bytes = Bootstrap::Bytes;

/// The threads share the rounds. Round k is over when all ranks have given their bytes to it. Two
/// slots suffice: no rank begins round k + 2 before all have begun round k + 1 and so left round k.
struct SharedRounds {
  explicit SharedRounds(std::int32_t world_size) : begun(world_size) {
    for (auto& slot : slots) slot.resize(world_size);
    ended = scope->on_end([changed = changed] { changed->notify_all(); });
  }

  const std::shared_ptr<FailureScope> scope = std::make_shared<FailureScope>();
  const std::shared_ptr<std::condition_variable> changed =  // the scope may outlive the rest
      std::make_shared<std::condition_variable>();
  std::shared_ptr<void> ended;
  std::mutex mutex;
  std::vector<std::uint64_t> begun;  ///< [W]: exchanges begun by each rank
  std::int32_t num_given[2] = {};    ///< [parity]: ranks that have begun the newest round of it
  std::uint64_t last_complete = 0;   ///< the last round that all ranks have begun
  std::vector<Bytes> slots[2];       ///< [parity][W]
};

constexpr double check_every_s = 0.02;

class ThreadBootstrap final : public Bootstrap {
 public:
  ThreadBootstrap(std::int32_t rank, std::int32_t world_size, double timeout_s,
                  std::shared_ptr<SharedRounds> shared)
      : Bootstrap(rank, world_size, timeout_s), rounds_(std::move(shared)) {}

  void fail(std::string_view reason) noexcept override {
    try {
      rounds_->scope->fail(concat("rank ", rank(), " failed: ", reason));
    } catch (const std::exception&) {
      rounds_->scope->fail(reason);
    }
  }

  void check_peers(std::string_view operation) const override {
    if (!rounds_->scope->has_ended()) return;
    try {
      rounds_->scope->check();
    } catch (const PeerFailed& error) {
      throw PeerFailed(concat(operation, ": ", error.what()));
    }
  }

  [[nodiscard]] std::shared_ptr<FailureScope> failure_scope() const override {
    return rounds_->scope;
  }

 private:
  std::vector<Bytes> exchange(std::span<const std::byte> mine,
                              std::string_view operation) override {
    const std::size_t me = to_int(rank());
    std::unique_lock lock(rounds_->mutex);
    const std::uint64_t round = ++rounds_->begun[me];
    auto& slot = rounds_->slots[round % 2];
    slot[me].assign(mine.begin(), mine.end());
    // The last rank wakes all: if each woke the others, there would be W^2 wake-ups.
    if (std::int32_t& given = rounds_->num_given[round % 2]; ++given == world_size()) {
      given = 0;
      rounds_->last_complete = round;
      rounds_->changed->notify_all();
    }
    await_all(round, lock, operation);
    return slot;
  }

  void await_all(std::uint64_t round, std::unique_lock<std::mutex>& lock,
                 std::string_view operation) const {
    const PollingWait wait(timeout_s());  // only its clock; the condition ends the pauses
    double next_check_s = check_every_s;
    while (rounds_->last_complete < round) {
      const double waited_s = wait.waited_s();
      if (waited_s >= timeout_s()) {
        const std::int32_t peer = missing(round);
        detail::throw_timeout(operation, to_int(rank()), peer, round, rounds_->begun[peer],
                              waited_s);
      }
      rounds_->changed->wait_for(
          lock, std::chrono::duration<double>(std::min(check_every_s, timeout_s() - waited_s)));
      if (rounds_->last_complete >= round) return;
      check_peers(operation);
      if (wait.waited_s() < next_check_s) continue;
      next_check_s = wait.waited_s() + check_every_s;
      lock.unlock();  // the check may take other locks
      check_interrupt();
      lock.lock();
    }
  }

  /// Returns the first rank that has not begun a round. @pre there is one
  [[nodiscard]] std::int32_t missing(std::uint64_t round) const {
    std::int32_t r = 0;
    while (rounds_->begun[r] >= round) ++r;
    return r;
  }

  std::shared_ptr<SharedRounds> rounds_;
};

}  // namespace

std::vector<std::unique_ptr<Bootstrap>> make_thread_bootstraps(std::int32_t world_size,
                                                               double timeout_s) {
  detail::check_range("make_thread_bootstraps", "world_size", world_size, 1, max_world_size);
  check_timeout("make_thread_bootstraps", timeout_s);
  const auto shared = std::make_shared<SharedRounds>(world_size);
  std::vector<std::unique_ptr<Bootstrap>> all;
  for (std::int32_t r = 0; r < world_size; ++r) {
    all.push_back(std::make_unique<ThreadBootstrap>(r, world_size, timeout_s, shared));
  }
  return all;
}

}  // namespace waybill
