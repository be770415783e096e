#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace waybill {

/// How rows of K and V reach the ranks that need them. Rows of Q, and what belongs to them
/// backward, always go straight.
enum class TransferMode : std::uint8_t {
  direct,         ///< from home to each rank
  once_per_node,  ///< over the network once to each other node, there to the rank with the home's
                  ///< local index where several ranks need them; it forwards over NVLink
  relay,          ///< by the planner's relay schedule; once per node over the network
};

/// "direct", "once_per_node", "relay".
[[nodiscard]] std::string_view to_string(TransferMode transfer);

/// The inverse; nothing for another name.
[[nodiscard]] std::optional<TransferMode> transfer_from_name(std::string_view name);

}  // namespace waybill
