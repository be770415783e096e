#pragma once

#include <span>
#include <string>
#include <string_view>

#include "waybill/transport/bootstrap.h"

namespace waybill {

/// Something that must be the same on all ranks, as text.
struct Setting {
  std::string name;
  std::string value;
};

/// Collective: every rank says how it is set up, the same names in the same order.
/// @throws InvalidArgument on all ranks when one differs: "who: rank 3 with ranks_per_node = 4,
///   the others 2, expected the same on all ranks"; Timeout, TransportError
void require_same(Bootstrap& bootstrap, std::string_view who, std::span<const Setting> mine);

}  // namespace waybill
