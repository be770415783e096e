#include "waybill/planner/transfer.h"

#include <cstddef>

namespace waybill {
namespace {

constexpr std::string_view names[] = {"direct", "once_per_node", "relay"};

}  // namespace

std::string_view to_string(Transfer transfer) { return names[static_cast<std::size_t>(transfer)]; }

std::optional<Transfer> transfer_from_name(std::string_view name) {
  for (const Transfer transfer : {Transfer::direct, Transfer::once_per_node, Transfer::relay}) {
    if (name == to_string(transfer)) return transfer;
  }
  return std::nullopt;
}

}  // namespace waybill
