#include "host_transport.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "waybill/core/wait.h"
#include "waybill/transport/bootstrap.h"

namespace waybill::detail {
namespace {

// Ranks may be processes, which would not share a lock that stands next to the value.
static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free);

constexpr std::int64_t alignment_bytes = 256;
constexpr std::int64_t min_mapped_bytes = 64 << 10;

/// Makes zeros on a 256-byte boundary; pages that nobody writes cost nothing. Large blocks are
/// mapped here, as calloc would write zeros into memory of a thread's arena.
std::shared_ptr<void> make_block(std::int64_t size_bytes) {
  if (size_bytes >= min_mapped_bytes) {
    const std::size_t bytes = size_bytes;
    void* const first =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (first == MAP_FAILED) throw std::bad_alloc();
    return {first, [bytes](void* block) { (void)munmap(block, bytes); }};
  }
  std::size_t room = size_bytes + alignment_bytes;
  std::shared_ptr<void> block(std::calloc(room, 1), std::free);
  if (block == nullptr) throw std::bad_alloc();
  void* first = block.get();
  std::align(alignment_bytes, size_bytes, first, room);
  return {block, first};
}

}  // namespace

HostTransport::HostTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node,
                             bool are_processes)
    : PeerTransport(std::move(bootstrap), ranks_per_node) {
  if (!are_processes) return;
  memory_.emplace(this->bootstrap());
  require_one_host(this->bootstrap(), "make_process_transport");
  watch_peers(make_peer_status(this->bootstrap()));
}

PeerTransport::Parts HostTransport::make_parts(std::int64_t size_bytes, std::string_view name) {
  if (memory_) return memory_->make(bootstrap(), size_bytes, name);
  return share_memory(bootstrap(), make_block(size_bytes), size_bytes, name);
}

void HostTransport::put(const SymmetricBuffer& to, const PutRequest& piece) {
  std::byte* const address = address_of(to, piece);
  if (piece.size_bytes > 0) std::memcpy(address, piece.source, piece.size_bytes);
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
  PollingWait wait(timeout_s(), {.check = [&] { check_peers(operation, peer); },
                                 .gives_turn = true,
                                 .num_waiters = topology().world_size});
  try {
    while ((seen = flag.load(std::memory_order_acquire)) < wanted) {
      if (wait.pause()) continue;
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
    return seen;
  } catch (const Interrupted& error) {
    give_up("an interrupt: ", error.what());
    throw;
  }
}

}  // namespace waybill::detail

namespace waybill {

std::unique_ptr<Transport> make_thread_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                 std::int32_t ranks_per_node) {
  require(bootstrap != nullptr, "make_thread_transport: bootstrap is null");
  return std::make_unique<detail::HostTransport>(std::move(bootstrap), ranks_per_node, false);
}

std::unique_ptr<Transport> make_process_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                  std::int32_t ranks_per_node) {
  require(bootstrap != nullptr, "make_process_transport: bootstrap is null");
  return std::make_unique<detail::HostTransport>(std::move(bootstrap), ranks_per_node, true);
}

}  // namespace waybill
