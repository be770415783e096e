#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "waybill/transport/bootstrap.h"

namespace waybill {

/// Where the symmetric memory of GPU ranks of one host lies.
enum class PeerMemory : std::uint8_t {
  device,  ///< in that of their GPUs, which reach each other
  host,    ///< in pinned memory of the host, which all GPUs reach
};

/// What WAYBILL_PEER_ACCESS says: "none" is as if GPUs had no access to each other, "required" is
/// an error where they have not. Without it they are taken as they are.
enum class PeerAccessWish : std::uint8_t { any, none, required };

/// @param text null: the variable is not set. @throws InvalidArgument for another text
[[nodiscard]] PeerAccessWish peer_access_wish(const char* text);

/// Collective: the same for all ranks, the host if any of them needs it. Rank 0 then prints a line
/// that says why, and what it costs.
/// @param trouble what this rank's GPU cannot reach; empty: it reaches all
/// @param refused why this kind of world cannot use the host's memory; empty: it can
/// @throws Unsupported on all ranks where one would need it and a wish or `refused` forbids it;
///   Timeout
[[nodiscard]] PeerMemory agree_on_peer_memory(Bootstrap& bootstrap, std::string_view who,
                                              PeerAccessWish wish, const std::string& trouble,
                                              const std::string& refused = {});

}  // namespace waybill
