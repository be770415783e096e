#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

#include "waybill/core/wait.h"
#include "waybill/transport/bootstraps.h"

namespace waybill {
namespace {

using Bytes = Bootstrap::Bytes;

/// What the threads share. Round k is over when all ranks have given their bytes to it. Two slots
/// are enough: nobody begins round k + 2 before everybody has begun, hence left round k.
struct Meeting {
  explicit Meeting(std::int32_t world_size) : rounds(world_size) {
    for (auto& slot : slots) slot.resize(world_size);
    ended = scope->on_end([changed = changed] { changed->notify_all(); });
  }

  const std::shared_ptr<FailureScope> scope = std::make_shared<FailureScope>();
  const std::shared_ptr<std::condition_variable> changed =  // the scope may outlive the rest
      std::make_shared<std::condition_variable>();
  std::shared_ptr<void> ended;
  std::mutex mutex;
  std::vector<std::uint64_t> rounds;  ///< [W]: exchanges begun by each rank
  std::int32_t num_given[2] = {};     ///< [parity]: ranks that have begun the newest round of it
  std::uint64_t last_complete = 0;    ///< the last round that all ranks have begun
  std::vector<Bytes> slots[2];        ///< [parity][W]
};

constexpr double check_every_s = 0.02;

class ThreadBootstrap final : public Bootstrap {
 public:
  ThreadBootstrap(std::int32_t rank, std::int32_t world_size, double timeout_s,
                  std::shared_ptr<Meeting> meeting)
      : Bootstrap(rank, world_size, timeout_s), meeting_(std::move(meeting)) {}

  void fail(std::string_view reason) noexcept override {
    try {
      meeting_->scope->fail(concat("rank ", rank(), " failed: ", reason));
    } catch (const std::exception&) {
      meeting_->scope->fail(reason);
    }
  }

  void check_peers(std::string_view operation) const override {
    if (!meeting_->scope->has_ended()) return;
    try {
      meeting_->scope->check();
    } catch (const PeerFailed& error) {
      throw PeerFailed(concat(operation, ": ", error.what()));
    }
  }

  [[nodiscard]] std::shared_ptr<FailureScope> failure_scope() const override {
    return meeting_->scope;
  }

 private:
  std::vector<Bytes> exchange(std::span<const std::byte> mine,
                              std::string_view operation) override {
    const std::size_t me = to_int(rank());
    std::unique_lock lock(meeting_->mutex);
    const std::uint64_t round = ++meeting_->rounds[me];
    auto& slot = meeting_->slots[round % 2];
    slot[me].assign(mine.begin(), mine.end());
    // One wakes all: if each woke the others, they would look W^2 times.
    if (std::int32_t& given = meeting_->num_given[round % 2]; ++given == world_size()) {
      given = 0;
      meeting_->last_complete = round;
      meeting_->changed->notify_all();
    }
    await_all(round, lock, operation);
    return slot;
  }

  void await_all(std::uint64_t round, std::unique_lock<std::mutex>& lock,
                 std::string_view operation) const {
    const PollingWait wait(timeout_s());  // its clock; a condition ends the pauses
    double next_check_s = check_every_s;
    while (meeting_->last_complete < round) {
      const double waited_s = wait.waited_s();
      if (waited_s >= timeout_s()) throw_timeout(round, waited_s, operation);
      meeting_->changed->wait_for(
          lock, std::chrono::duration<double>(std::min(check_every_s, timeout_s() - waited_s)));
      if (meeting_->last_complete >= round) return;
      check_peers(operation);
      if (wait.waited_s() < next_check_s) continue;
      next_check_s = wait.waited_s() + check_every_s;
      lock.unlock();  // what is asked may take other locks
      check_interrupt();
      lock.lock();
    }
  }

  [[noreturn]] void throw_timeout(std::uint64_t round, double waited_s,
                                  std::string_view operation) const {
    const std::int32_t peer = missing(round);
    throw Timeout({.operation = std::string(operation),
                   .what = "exchange",
                   .rank = to_int(rank()),
                   .peer = peer,
                   .wanted = round,
                   .seen = meeting_->rounds[peer],
                   .seconds = waited_s});
  }

  /// The first rank that has not begun a round, of which there is one.
  [[nodiscard]] std::int32_t missing(std::uint64_t round) const {
    std::int32_t r = 0;
    while (meeting_->rounds[r] >= round) ++r;
    return r;
  }

  std::shared_ptr<Meeting> meeting_;
};

}  // namespace

std::vector<std::unique_ptr<Bootstrap>> make_thread_bootstraps(std::int32_t world_size,
                                                               double timeout_s) {
  require(1 <= world_size && world_size <= max_world_size,
          "make_thread_bootstraps: world_size = ", world_size, ", expected 1..", max_world_size);
  check_timeout("make_thread_bootstraps", timeout_s);
  const auto meeting = std::make_shared<Meeting>(world_size);
  std::vector<std::unique_ptr<Bootstrap>> all;
  for (std::int32_t r = 0; r < world_size; ++r) {
    all.push_back(std::make_unique<ThreadBootstrap>(r, world_size, timeout_s, meeting));
  }
  return all;
}

}  // namespace waybill
