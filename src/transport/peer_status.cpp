#include "transport/peer_status.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "transport/bootstrap/wire.h"

namespace waybill {
namespace {

using namespace std::chrono_literals;

constexpr auto check_every = 80ms;
constexpr auto patience_of_collectives = 1000ms;

}  // namespace

/// The status of a rank, in memory that all ranks of a host have mapped. Zeros: it runs.
struct PeerStatus::Block {
  static constexpr std::uint32_t runs = 0, timed_out = 1, failed = 2, left = 3;
  std::atomic<std::uint32_t> state;
  std::int32_t process;  ///< the rank's; 0: nobody can check whether it exists
  char reason[504];      ///< with `failed`; written before the state

  /// Does nothing unless it runs.
  void end_as(std::uint32_t end) noexcept {
    std::uint32_t expected = runs;
    state.compare_exchange_strong(expected, end);
  }
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

class PeerStatus::Scope final : public WaitScope {
 public:
  Scope(std::shared_ptr<PeerStatus> status, std::string_view operation)
      : status_(std::move(status)), operation_(operation) {}

  void check() const override {
    status_->check_failed(operation_);
    for (std::size_t r = 0; r < status_->peers_.size(); ++r) {
      status_->check_gone(operation_, r, patience_of_collectives);
    }
  }

 private:
  std::shared_ptr<PeerStatus> status_;
  std::string operation_;
};

PeerStatus::PeerStatus(Bootstrap& bootstrap) : rank_(to_int(bootstrap.rank())) {
  const std::string operation = "peer status";
  constexpr auto size = std::int64_t{sizeof(Block)};
  detail::ProcessMemory memory(bootstrap);
  auto files = memory.open(bootstrap, operation);
  run_collectively(bootstrap, operation, [&] { files[rank_].reserve(size); });
  run_collectively(bootstrap, operation, [&] {
    for (detail::SharedFile& file : files) {
      auto block = std::static_pointer_cast<Block>(file.map(size));
      peers_.push_back({std::move(block), std::move(file)});
    }
    if (peers_[rank_].file.mark()) peers_[rank_].block->process = getpid();
  });
}

PeerStatus::~PeerStatus() {
  if (process_.is_here()) peers_[rank_].block->end_as(Block::left);
}

void PeerStatus::fail(std::string_view reason) noexcept {
  if (!process_.is_here()) return;
  const std::lock_guard lock(mutex_);
  Block& mine = *peers_[rank_].block;
  if (mine.state == Block::failed) return;
  const std::size_t size = std::min(reason.size(), sizeof(mine.reason) - 1);
  reason.copy(mine.reason, size);
  mine.reason[size] = '\0';
  mine.state.store(Block::failed, std::memory_order_release);
}

void PeerStatus::note_timeout() noexcept {
  if (process_.is_here()) peers_[rank_].block->end_as(Block::timed_out);
}

void PeerStatus::check_failed(std::string_view operation) const {
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    const Block& theirs = *peers_[r].block;
    if (r == rank_ || theirs.state.load(std::memory_order_acquire) != Block::failed) {
      continue;
    }
    const std::string_view reason(theirs.reason, strnlen(theirs.reason, sizeof(theirs.reason)));
    throw PeerFailed(concat(operation, ": rank ", r, " failed: ", detail::peer_text(reason)));
  }
}

void PeerStatus::check_gone(std::string_view operation, std::size_t rank,
                            std::chrono::milliseconds patience) {
  Peer& peer = peers_[rank];
  const Block& theirs = *peer.block;
  if (rank == rank_ || theirs.process == 0 || theirs.process == getpid()) return;
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  if (now - peer.last_check < check_every) return;
  peer.last_check = now;
  const bool left = theirs.state == Block::left;
  if (!left && peer.file.is_marked()) return;
  if (theirs.state == Block::timed_out) return;
  if (!peer.gone_since) {  // the wait polls once more for what it did before
    peer.gone_since = now;
    return;
  }
  if (now - *peer.gone_since < patience) return;
  throw PeerFailed(concat(operation, ": rank ", rank, " is gone: ",
                          left ? "it has left the world of process " : "the end of process ",
                          theirs.process));
}

void PeerStatus::check(std::string_view operation, Rank awaited) {
  check_failed(operation);
  check_gone(operation, to_int(awaited), 0ms);
}

std::shared_ptr<const WaitScope> PeerStatus::scope_of(std::string_view operation) {
  return std::make_shared<Scope>(shared_from_this(), operation);
}

}  // namespace waybill
