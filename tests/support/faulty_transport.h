#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "core/to_size.h"
#include "transport/transport.h"
#include "waybill/core/random.h"

namespace waybill::test {

/// What a network may do within what the seam promises, and what it may not. Shares are 0..1.
struct NetworkFaults {
  std::uint64_t seed = 1;
  double delay_share = 0.2;  ///< of pieces and signals
  std::int64_t max_delay_us = 300;
  bool reorder = true;           ///< puts between two signals arrive in any order
  double duplicate_share = 0.2;  ///< puts that arrive twice, signals that are raised twice
  /// From this rank to that one, after so many puts and signals the link is dead. -1: never.
  std::int32_t drop_to = -1;
  std::int64_t drop_after = 0;
  /// This rank stops at its n-th put or signal, on whatever link. -1: never.
  std::int64_t stop_at = -1;
};

struct RankStopped : std::runtime_error {
  RankStopped() : std::runtime_error("this rank was stopped") {}
};

/// Another transport whose links to other nodes are slow and out of order. Pieces leave their
/// sources when they arrive, not when put() returns.
class FaultyTransport final : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, NetworkFaults faults)
      : Transport(inner->rank(), inner->topology(), inner->timeout_s()),
        inner_(std::move(inner)),
        faults_(faults),
        random_(faults.seed * 1000 + waybill::detail::to_size(to_int(rank()))),
        links_(topology().world_size),
        courier_([this] { deliver_all(); }) {}

  ~FaultyTransport() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    courier_.join();
  }

  SymmetricBuffer allocate(std::int64_t size_bytes, std::string_view name) override {
    return inner_->allocate(size_bytes, name);
  }
  SignalPad allocate_signals(std::int64_t count, std::string_view name) override {
    return inner_->allocate_signals(count, name);
  }
  void release(SymmetricBuffer& buffer) override { inner_->release(buffer); }
  void release(SignalPad& pad) override { inner_->release(pad); }
  void defer_release(std::vector<std::shared_ptr<void>> memory) override {
    inner_->defer_release(std::move(memory));
  }

  void put(const SymmetricBuffer& to, const PutRequest& piece) override {
    count_step();
    if (reach(piece.peer) != Reach::network) return inner_->put(to, piece);
    const std::lock_guard lock(mutex_);
    Link& link = links_[to_int(piece.peer)];
    if (!is_alive(link, piece.peer)) return;
    link.open.push_back({std::make_shared<SymmetricBuffer>(to), piece, {}, {}, 0});
  }

  void signal(Rank peer, SignalSlot slot, std::uint64_t epoch) override {
    count_step();
    if (reach(peer) != Reach::network) return inner_->signal(peer, slot, epoch);
    const std::lock_guard lock(mutex_);
    Link& link = links_[to_int(peer)];
    close(link);
    if (!is_alive(link, peer)) return;
    const Event event{{}, {.peer = peer}, std::make_shared<SignalPad>(*slot.pad), slot.idx, epoch};
    link.queue.push_back(event);
    if (random_.uniform_double() < faults_.duplicate_share) link.queue.push_back(event);
    changed_.notify_all();
  }

  std::uint64_t wait(SignalSlot slot, std::uint64_t wanted, Rank peer,
                     std::string_view operation) override {
    return inner_->wait(slot, wanted, peer, operation);
  }

  void quiet() override {
    std::unique_lock lock(mutex_);
    for (Link& link : links_) close(link);
    changed_.notify_all();
    changed_.wait(lock, [this] {
      return std::ranges::all_of(links_, [](const Link& link) { return link.queue.empty(); });
    });
  }

  void barrier(std::string_view operation) override { inner_->barrier(operation); }
  void require_same(std::string_view who, std::span<const Setting> mine) override {
    inner_->require_same(who, mine);
  }

  [[nodiscard]] std::int64_t num_steps() const { return steps_; }

 private:
  /// A put, or a signal where `pad` is there.
  struct Event {
    std::shared_ptr<SymmetricBuffer> buffer;
    PutRequest piece;
    std::shared_ptr<SignalPad> pad;
    std::int64_t idx = 0;
    std::uint64_t epoch = 0;
  };
  struct Link {
    std::vector<Event> open;  ///< puts since the last signal
    std::deque<Event> queue;
    std::int64_t num_events = 0;
  };

  void count_step() {
    if (steps_ == faults_.stop_at) throw RankStopped();
    ++steps_;
  }

  bool is_alive(Link& link, Rank peer) const {
    return to_int(peer) != faults_.drop_to || link.num_events++ < faults_.drop_after;
  }

  /// What was put before may arrive from now on.
  void close(Link& link) {
    const std::size_t count = link.open.size();
    for (std::size_t i = 0; i < count; ++i) {
      if (random_.uniform_double() < faults_.duplicate_share) link.open.push_back(link.open[i]);
    }
    for (std::size_t i = link.open.size(); faults_.reorder && i > 1; --i) {
      std::swap(link.open[i - 1], link.open[random_.below(static_cast<std::int64_t>(i))]);
    }
    link.queue.insert(link.queue.end(), link.open.begin(), link.open.end());
    link.open.clear();
  }

  /// Some link's next event, until the end.
  void deliver_all() {
    std::unique_lock lock(mutex_);
    for (;;) {
      std::vector<Link*> busy;
      for (Link& link : links_) {
        if (!link.queue.empty()) busy.push_back(&link);
      }
      if (busy.empty()) {
        changed_.notify_all();
        if (closing_) return;
        changed_.wait(lock);
        continue;
      }
      Link& link = *busy[random_.below(std::ssize(busy))];
      const Event event = link.queue.front();
      const bool late = random_.uniform_double() < faults_.delay_share;
      const std::int64_t delay_us = late ? random_.below(faults_.max_delay_us + 1) : 0;
      lock.unlock();
      if (late) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      if (event.pad != nullptr) {
        inner_->signal(event.piece.peer, {event.pad.get(), event.idx}, event.epoch);
      } else {
        inner_->put(*event.buffer, event.piece);
      }
      lock.lock();
      link.queue.pop_front();
    }
  }

  std::unique_ptr<Transport> inner_;
  const NetworkFaults faults_;
  std::int64_t steps_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  Random random_;
  std::vector<Link> links_;
  bool closing_ = false;
  std::thread courier_;
};

}  // namespace waybill::test
