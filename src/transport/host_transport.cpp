#include "host_transport.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "waybill/core/at.h"

namespace waybill::detail {
namespace {

/// Then waits sleep in between: on a busy processor a yield may take long.
constexpr double seconds_of_yields = 0.001;

// Ranks may be processes: a lock beside the value would not be shared.
static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free);

}  // namespace

void HostTransport::put(const SymmetricBuffer& to, const PutRequest& piece) {
  std::byte* const place = place_of(to, piece);
  if (piece.size_bytes > 0) std::memcpy(place, piece.source, at(piece.size_bytes));
}

void HostTransport::signal(Rank peer, SignalSlot slot, std::uint64_t epoch) {
  // Pairs with the load in wait(): the puts before are visible after it.
  std::atomic_ref(*slot_of(peer, slot)).store(epoch, std::memory_order_release);
}

std::uint64_t HostTransport::wait(SignalSlot slot, std::uint64_t wanted, Rank peer,
                                  std::string_view operation) {
  check_slot(slot);
  const std::atomic_ref flag(slot.pad->local[slot.idx]);
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    const std::uint64_t seen = flag.load(std::memory_order_acquire);
    if (seen >= wanted) return seen;
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    if (waited.count() < seconds_of_yields && waited.count() < timeout_s()) {
      std::this_thread::yield();
      continue;
    }
    if (waited.count() > timeout_s()) {
      throw Timeout({.operation = std::string(operation),
                     .rank = to_int(rank()),
                     .peer = to_int(peer),
                     .wanted = wanted,
                     .seen = seen,
                     .seconds = waited.count(),
                     .peer_node = to_int(topology().node(peer)),
                     .peer_local = to_int(topology().local_rank(peer))});
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace waybill::detail
