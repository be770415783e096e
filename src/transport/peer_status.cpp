#include "transport/peer_status.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

namespace waybill {
namespace {

using namespace std::chrono_literals;

constexpr auto look_every = 80ms;
constexpr auto patience_of_collectives = 1000ms;

/// What another process wrote, without what a terminal would obey.
std::string text_of(const char* reason, std::size_t size) {
  std::string text(reason, std::find(reason, reason + size, '\0'));
  for (char& c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (code < 0x20 || code == 0x7f) c = ' ';
  }
  return text;
}

}  // namespace

class PeerStatus::Scope final : public WaitScope {
 public:
  Scope(std::shared_ptr<PeerStatus> status, std::string_view operation)
      : status_(std::move(status)), operation_(operation) {}

  void check() const override {
    status_->check_failed(operation_);
    for (std::size_t r = 0; r < status_->blocks_.size(); ++r) {
      status_->check_gone(operation_, r, patience_of_collectives);
    }
  }

 private:
  std::shared_ptr<PeerStatus> status_;
  std::string operation_;
};

PeerStatus::PeerStatus(Rank rank, std::vector<std::shared_ptr<void>> blocks, IsThere is_there)
    : rank_(to_int(rank)),
      blocks_(std::move(blocks)),
      is_there_(std::move(is_there)),
      looks_(blocks_.size()) {}

PeerStatus::~PeerStatus() {
  std::uint32_t runs = PeerStatusBlock::runs;
  block(rank_).state.compare_exchange_strong(runs, PeerStatusBlock::left);
}

PeerStatusBlock& PeerStatus::block(std::size_t rank) const {
  return *static_cast<PeerStatusBlock*>(blocks_[rank].get());
}

void PeerStatus::fail(std::string_view reason) noexcept {
  const std::lock_guard lock(mutex_);
  PeerStatusBlock& mine = block(rank_);
  if (mine.state == PeerStatusBlock::failed) return;
  const std::size_t size = std::min(reason.size(), sizeof(mine.reason) - 1);
  reason.copy(mine.reason, size);
  mine.reason[size] = '\0';
  mine.state.store(PeerStatusBlock::failed, std::memory_order_release);
}

void PeerStatus::note_timeout() noexcept {
  std::uint32_t runs = PeerStatusBlock::runs;
  block(rank_).state.compare_exchange_strong(runs, PeerStatusBlock::timed_out);
}

void PeerStatus::check_failed(std::string_view operation) const {
  for (std::size_t r = 0; r < blocks_.size(); ++r) {
    const PeerStatusBlock& theirs = block(r);
    if (r == rank_ || theirs.state.load(std::memory_order_acquire) != PeerStatusBlock::failed) {
      continue;
    }
    throw PeerFailed(concat(operation, ": rank ", r,
                            " failed: ", text_of(theirs.reason, sizeof(theirs.reason))));
  }
}

void PeerStatus::check_gone(std::string_view operation, std::size_t rank,
                            std::chrono::milliseconds patience) {
  const PeerStatusBlock& theirs = block(rank);
  if (rank == rank_ || theirs.process == 0 || theirs.process == getpid()) return;
  const std::lock_guard lock(mutex_);
  Look& look = looks_[rank];
  const auto now = Clock::now();
  if (now - look.last < look_every) return;
  look.last = now;
  const bool left = theirs.state == PeerStatusBlock::left;
  if (!left && is_there_(static_cast<std::int32_t>(rank))) return;
  if (theirs.state == PeerStatusBlock::timed_out) return;
  if (!std::exchange(look.gone, true)) {  // what it did before is looked for once more
    look.gone_since = now;
    return;
  }
  if (now - look.gone_since < patience) return;
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
