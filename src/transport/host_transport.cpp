#include "host_transport.h"

#include <atomic>
#include <cstring>
#include <string>

#include "waybill/core/wait.h"

namespace waybill::detail {
namespace {

// Ranks may be processes: a lock beside the value would not be shared.
static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free);

}  // namespace

void HostTransport::put(const SymmetricBuffer& to, const PutRequest& piece) {
  std::byte* const place = place_of(to, piece);
  if (piece.size_bytes > 0) std::memcpy(place, piece.source, piece.size_bytes);
}

void HostTransport::signal(Rank peer, SignalSlot slot, std::uint64_t epoch) {
  // Pairs with the load in wait(): the puts before are visible after it.
  std::atomic_ref(*slot_of(peer, slot)).store(epoch, std::memory_order_release);
}

std::uint64_t HostTransport::wait(SignalSlot slot, std::uint64_t wanted, Rank peer,
                                  std::string_view operation) {
  check_slot(slot);
  require_usable(operation);
  const std::atomic_ref flag(slot.pad->local[slot.idx]);
  std::uint64_t seen = flag.load(std::memory_order_acquire);
  if (seen >= wanted) return seen;
  try {
    return poll(flag, wanted, peer, operation);
  } catch (const Interrupted& error) {
    give_up("an interrupt: ", error.what());
    throw;
  }
}

std::uint64_t HostTransport::poll(const std::atomic_ref<std::uint64_t>& flag, std::uint64_t wanted,
                                  Rank peer, std::string_view operation) {
  std::uint64_t seen = flag.load(std::memory_order_acquire);
  PollingWait wait(timeout_s(), {.check = [&] { check_peers(operation, peer); },
                                 .gives_turn = true,
                                 .num_waiters = topology().world_size});
  while (seen < wanted) {
    if (!wait.pause()) {
      note_timeout();
      throw Timeout({.operation = std::string(operation),
                     .rank = to_int(rank()),
                     .peer = to_int(peer),
                     .wanted = wanted,
                     .seen = seen,
                     .seconds = wait.waited_s(),
                     .peer_node = to_int(topology().node(peer)),
                     .peer_local = to_int(topology().local_rank(peer))});
    }
    seen = flag.load(std::memory_order_acquire);
  }
  return seen;
}

}  // namespace waybill::detail
