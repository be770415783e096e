#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace waybill {

/// Memory of one size on every rank, and where the ranks' parts are seen from here. It lives until
/// the last rank that holds it lets go, so a rank that leaves early takes nothing from the others.
struct SymmetricBuffer {
  std::string name;  ///< as it was allocated; the same on all ranks
  std::int64_t size_bytes = 0;
  std::byte* local = nullptr;
  std::vector<std::byte*> peers;  ///< [W]: `local` for this rank, null where reach is network
  /// What keeps the parts alive: [W], null for one that is not mapped here; then the table, if any.
  std::vector<std::shared_ptr<void>> memory;
  /// GPU worlds: [W] where the parts are mapped, in memory of this rank's device, for kernels. Made
  /// with the memory, and neither changed nor moved as long as that lives.
  std::byte* const* table = nullptr;
};

/// Counters that other ranks raise: on every rank `count` epochs, 0 at first, that only grow.
struct SignalPad {
  std::string name;
  std::int64_t count = 0;
  std::uint64_t* local = nullptr;
  std::vector<std::uint64_t*> peers;  ///< [W], as above
  std::vector<std::shared_ptr<void>> memory;
  std::uint64_t* const* table = nullptr;
};

}  // namespace waybill
