#include "waybill/transport/peer_transport.h"

#include <type_traits>
#include <utility>

#include "waybill/core/at.h"

namespace waybill {
namespace {

using detail::at;

/// Ranks that are set up differently would wait for each other: that is said before.
Topology topology_of(Bootstrap& bootstrap, std::int32_t ranks_per_node) {
  const Setting settings[] = {{"waybill version", WAYBILL_VERSION},
                              {"ranks_per_node", concat(ranks_per_node)}};
  require_same(bootstrap, "world", settings);
  const std::int32_t world = bootstrap.world_size();
  return {world, ranks_per_node == 0 ? world : ranks_per_node};
}

}  // namespace

PeerTransport::PeerTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node)
    : Transport(bootstrap->rank(), topology_of(*bootstrap, ranks_per_node), bootstrap->timeout_s()),
      bootstrap_(std::move(bootstrap)) {}

SymmetricBuffer PeerTransport::allocate(std::int64_t size_bytes, std::string_view name) {
  require(size_bytes >= 0, "allocate: size_bytes = ", size_bytes, ", expected >= 0");
  SymmetricBuffer buffer;
  buffer.size_bytes = size_bytes;
  share(buffer, size_bytes, name);
  return buffer;
}

SignalPad PeerTransport::allocate_signals(std::int64_t count, std::string_view name) {
  require(count >= 0, "allocate_signals: count = ", count, ", expected >= 0");
  SignalPad pad;
  pad.count = count;
  share(pad, count * static_cast<std::int64_t>(sizeof(std::uint64_t)), name);
  return pad;
}

void PeerTransport::release(SymmetricBuffer& buffer) { give_back(buffer); }

void PeerTransport::release(SignalPad& pad) { give_back(pad); }

void PeerTransport::abandon(std::vector<std::shared_ptr<void>> memory) {
  abandoned_.insert(abandoned_.end(), memory.begin(), memory.end());
}

std::uint64_t* PeerTransport::slot_of(Rank peer, SignalSlot slot) const {
  check_slot(slot);
  const auto r = at(to_int(peer));
  require(r < slot.pad->memory.size(), "signal: peer = ", peer, ", expected 0..",
          topology().world_size - 1);
  auto* const base = static_cast<std::uint64_t*>(slot.pad->memory[r].get());
  return base == nullptr ? nullptr : base + slot.idx;
}

std::byte* PeerTransport::place_of(const SymmetricBuffer& to, const PutRequest& piece) const {
  check_piece(to, piece);
  auto* const base = static_cast<std::byte*>(to.memory[at(to_int(piece.peer))].get());
  return base == nullptr ? nullptr : base + piece.dst_offset_bytes;
}

void PeerTransport::free_parts(Parts parts) { parts.clear(); }

template <class Symmetric>
void PeerTransport::share(Symmetric& result, std::int64_t size_bytes, std::string_view name) {
  using Element = std::remove_pointer_t<decltype(result.local)>;
  result.memory = make_parts(size_bytes, name);
  for (std::int32_t r = 0; r < topology().world_size; ++r) {
    auto* const part = static_cast<Element*>(result.memory[at(r)].get());
    result.peers.push_back(reach(Rank{r}) == Reach::network ? nullptr : part);
  }
  result.local = result.peers[at(to_int(rank()))];
}

/// Freeing device memory waits for the device, on which a kernel may wait for a rank that has yet
/// to launch its own: so nobody goes on before the memory of all is free.
template <class Symmetric>
void PeerTransport::give_back(Symmetric& memory) {
  barrier("release");
  free_parts(std::exchange(memory, {}).memory);
  barrier("release");
}

}  // namespace waybill
