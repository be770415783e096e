#include "waybill/planner/transfer_mode.h"

#include <cstddef>

namespace waybill {
namespace {

constexpr std::string_view names[] = {"direct", "once_per_node", "relay"};

}  // namespace

std::string_view to_string(TransferMode transfer) {
  return names[static_cast<std::size_t>(transfer)];
}

std::optional<TransferMode> transfer_from_name(std::string_view name) {
  for (const TransferMode transfer :
       {TransferMode::direct, TransferMode::once_per_node, TransferMode::relay}) {
    if (name == to_string(transfer)) return transfer;
  }
  return std::nullopt;
}

}  // namespace waybill
