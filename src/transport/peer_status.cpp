#include "transport/peer_status.h"

#include <unistd.h>

#include <algorithm>
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

PeerStatus::PeerStatus(Rank rank, std::vector<std::shared_ptr<void>> blocks,
                       std::vector<detail::SharedFile> files)
    : rank_(to_int(rank)),
      blocks_(std::move(blocks)),
      files_(std::move(files)),
      checks_(blocks_.size()) {}

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
    const std::string_view reason(theirs.reason, strnlen(theirs.reason, sizeof(theirs.reason)));
    throw PeerFailed(concat(operation, ": rank ", r, " failed: ", detail::peer_text(reason)));
  }
}

void PeerStatus::check_gone(std::string_view operation, std::size_t rank,
                            std::chrono::milliseconds patience) {
  const PeerStatusBlock& theirs = block(rank);
  if (rank == rank_ || theirs.process == 0 || theirs.process == getpid()) return;
  const std::lock_guard lock(mutex_);
  PeerCheck& check = checks_[rank];
  const auto now = Clock::now();
  if (now - check.last < check_every) return;
  check.last = now;
  const bool left = theirs.state == PeerStatusBlock::left;
  if (!left && files_[rank].is_marked()) return;
  if (theirs.state == PeerStatusBlock::timed_out) return;
  if (!std::exchange(check.gone, true)) {  // the wait polls once more for what it did before
    check.gone_since = now;
    return;
  }
  if (now - check.gone_since < patience) return;
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

std::shared_ptr<PeerStatus> make_peer_status(Bootstrap& bootstrap) {
  const std::string operation = "peer status";
  constexpr auto size = std::int64_t{sizeof(PeerStatusBlock)};
  const std::size_t me = to_int(bootstrap.rank());
  detail::ProcessMemory memory(bootstrap);
  auto files = memory.open(bootstrap, operation);
  std::vector<std::shared_ptr<void>> blocks;
  run_collectively(bootstrap, operation, [&] { files[me].reserve(size); });
  run_collectively(bootstrap, operation, [&] {
    for (const detail::SharedFile& file : files) blocks.push_back(file.map(size));
    if (files[me].mark()) static_cast<PeerStatusBlock*>(blocks[me].get())->process = getpid();
  });
  return std::make_shared<PeerStatus>(bootstrap.rank(), std::move(blocks), std::move(files));
}

}  // namespace waybill
