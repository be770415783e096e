#pragma once

#include <cstddef>
#include <cstdint>

namespace waybill::cuda {

/// A part of symmetric memory on each rank: where the memory lies, by a table on the device that
/// lives as long as it does (SymmetricBuffer::table), and how far the part is from there.
/// docs/decisions/device_tables.md
template <class T>
struct Peers {
  std::byte* const* bases;  ///< [ranks]
  std::int64_t offset;      ///< bytes
};

/// The same where a load would be waited for: the first ranks' parts are in the parameters of the
/// kernel themselves, beside its other constants; those of further ranks come from the table.
inline constexpr std::int32_t max_near_peers = 64;
template <class T>
struct NearPeers {
  T* near[max_near_peers];
  Peers<T> all;
};

/// @param bases SymmetricBuffer::table or SignalPad::table, from some rank on
template <class T, class Element>
Peers<T> peers_of(Element* const* bases, std::int64_t offset_bytes) {
  return {reinterpret_cast<std::byte* const*>(bases), offset_bytes};
}

/// @param memory SymmetricBuffer or SignalPad; of its ranks `count` from `first` on
template <class T, class Symmetric>
NearPeers<T> near_peers_of(const Symmetric& memory, std::int64_t offset_bytes, std::int32_t first,
                           std::int32_t count) {
  NearPeers<T> peers{{}, peers_of<T>(memory.table + first, offset_bytes)};
  for (std::int32_t i = 0; i < count && i < max_near_peers; ++i) {
    const std::int32_t rank = first + i;
    void* const base = memory.memory[static_cast<std::size_t>(rank)].get();
    if (base == nullptr) continue;  // not mapped here
    peers.near[i] = reinterpret_cast<T*>(static_cast<std::byte*>(base) + offset_bytes);
  }
  return peers;
}

}  // namespace waybill::cuda
