#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "waybill/core/at.h"
#include "waybill/transport/share_memory.h"
#include "waybill/transport/transport.h"

namespace waybill {
namespace {

using detail::at;

constexpr std::int64_t alignment_bytes = 256;
constexpr int yields_before_sleep = 2000;

/// Zeros, on a 256-byte boundary; pages that nobody writes cost nothing.
std::shared_ptr<void> make_block(std::int64_t size_bytes) {
  std::size_t room = at(size_bytes + alignment_bytes);
  std::shared_ptr<void> block(std::calloc(room, 1), std::free);
  if (block == nullptr) throw std::bad_alloc();
  void* first = block.get();
  std::align(alignment_bytes, at(size_bytes), first, room);
  return {block, first};
}

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Bootstrap> bootstrap, Topology topology)
      : Transport(bootstrap->rank(), topology, bootstrap->timeout_s()),
        bootstrap_(std::move(bootstrap)) {}

  SymmetricBuffer allocate(std::int64_t size_bytes, std::string_view name) override {
    require(size_bytes >= 0, "allocate: size_bytes = ", size_bytes, ", expected >= 0");
    SymmetricBuffer buffer;
    buffer.size_bytes = size_bytes;
    share(buffer, size_bytes, name);
    return buffer;
  }

  SignalPad allocate_signals(std::int64_t count, std::string_view name) override {
    require(count >= 0, "allocate_signals: count = ", count, ", expected >= 0");
    SignalPad pad;
    pad.count = count;
    share(pad, count * static_cast<std::int64_t>(sizeof(std::uint64_t)), name);
    return pad;
  }

  void release(SymmetricBuffer& buffer) override { give_back(buffer); }

  void release(SignalPad& pad) override { give_back(pad); }

  void abandon(std::vector<std::shared_ptr<void>> memory) override {
    abandoned_.insert(abandoned_.end(), memory.begin(), memory.end());
  }

  void put(const SymmetricBuffer& to, const PutRequest& piece) override {
    check_piece(to, piece);
    if (piece.size_bytes == 0) return;
    auto* const base = static_cast<std::byte*>(to.memory[at(to_int(piece.peer))].get());
    std::memcpy(base + piece.dst_offset_bytes, piece.source, at(piece.size_bytes));
  }

  void signal(Rank peer, SignalSlot slot, std::uint64_t epoch) override {
    check_slot(slot);
    const auto r = at(to_int(peer));
    require(r < slot.pad->memory.size(), "signal: peer = ", peer, ", expected 0..",
            topology().world_size - 1);
    auto* const base = static_cast<std::uint64_t*>(slot.pad->memory[r].get());
    // Pairs with the load in wait(): the puts before are visible after it.
    std::atomic_ref(base[slot.idx]).store(epoch, std::memory_order_release);
  }

  std::uint64_t wait(SignalSlot slot, std::uint64_t wanted, Rank peer,
                     std::string_view operation) override {
    check_slot(slot);
    const std::atomic_ref flag(slot.pad->local[slot.idx]);
    const auto start = std::chrono::steady_clock::now();
    for (int tries = 0;; ++tries) {
      const std::uint64_t seen = flag.load(std::memory_order_acquire);
      if (seen >= wanted) return seen;
      if (tries < yields_before_sleep) {
        std::this_thread::yield();
        continue;
      }
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
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

  void quiet() override {}  // a put has arrived when it returns

  void barrier(std::string_view operation) override { bootstrap_->barrier(operation); }

 private:
  template <class Symmetric>
  void share(Symmetric& result, std::int64_t size_bytes, std::string_view name) {
    using Element = std::remove_pointer_t<decltype(result.local)>;
    result.memory = share_memory(*bootstrap_, make_block(size_bytes), size_bytes, name);
    for (std::int32_t r = 0; r < topology().world_size; ++r) {
      auto* const part = static_cast<Element*>(result.memory[at(r)].get());
      result.peers.push_back(reach(Rank{r}) == Reach::network ? nullptr : part);
    }
    result.local = result.peers[at(to_int(rank()))];
  }

  template <class Symmetric>
  void give_back(Symmetric& memory) {
    barrier("release");
    memory = {};
    barrier("release");
  }

  std::shared_ptr<Bootstrap> bootstrap_;
  std::vector<std::shared_ptr<void>> abandoned_;
};

}  // namespace

std::unique_ptr<Transport> make_thread_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                 std::int32_t ranks_per_node) {
  require(bootstrap != nullptr, "make_thread_transport: bootstrap is null");
  const std::int32_t world = bootstrap->world_size();
  const Topology topology{world, ranks_per_node == 0 ? world : ranks_per_node};
  return std::make_unique<ThreadTransport>(std::move(bootstrap), topology);
}

}  // namespace waybill
