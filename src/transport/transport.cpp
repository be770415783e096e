#include "transport/transport.h"

namespace waybill {

Transport::Transport(Rank rank, Topology topology, double timeout_s)
    : rank_(rank), topology_(topology), timeout_s_(timeout_s) {
  topology.check();
  require(0 <= to_int(rank) && to_int(rank) < topology.world_size, "Transport: rank = ", rank,
          ", expected 0..", topology.world_size - 1);
}

Reach Transport::reach(Rank peer) const {
  require(0 <= to_int(peer) && to_int(peer) < topology_.world_size, "reach: peer = ", peer,
          ", expected 0..", topology_.world_size - 1);
  if (peer == rank_) return Reach::self;
  return topology_.node(peer) == topology_.node(rank_) ? Reach::load_store : Reach::network;
}

void Transport::put_batch(const SymmetricBuffer& to, std::span<const PutRequest> pieces) {
  for (const PutRequest& piece : pieces) put(to, piece);
}

void Transport::put_signal(const SymmetricBuffer& to, const PutRequest& piece, SignalSlot slot,
                           std::uint64_t epoch) {
  put(to, piece);
  signal(piece.peer, slot, epoch);
}

void Transport::fail(std::string_view /*reason*/) noexcept {}

void Transport::note_unwinding() noexcept {}

void Transport::check_peers(std::string_view /*operation*/, Rank /*awaited*/) {}

void Transport::note_timeout() noexcept {}

void Transport::check_piece(const SymmetricBuffer& to, const PutRequest& piece) const {
  const std::int32_t peer = to_int(piece.peer);
  require(0 <= peer && peer < topology_.world_size, "put: peer = ", peer, ", expected 0..",
          topology_.world_size - 1);
  require(piece.size_bytes >= 0 && piece.dst_offset_bytes >= 0 &&
              piece.dst_offset_bytes <= to.size_bytes - piece.size_bytes,
          "put: bytes ", piece.dst_offset_bytes, " + ", piece.size_bytes,
          ", expected to fit the buffer's ", to.size_bytes);
  require(piece.source != nullptr || piece.size_bytes == 0, "put: source is null");
}

void Transport::check_slot(SignalSlot slot) const {
  require(slot.pad != nullptr, "signal: the slot has no pad");
  require(0 <= slot.idx && slot.idx < slot.pad->count, "signal: idx = ", slot.idx, ", expected 0..",
          slot.pad->count - 1);
}

}  // namespace waybill
