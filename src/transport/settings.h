#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/transport/bootstrap.h"

namespace waybill {

class Transport;

/// Something that must be the same on all ranks, as text.
struct Setting {
  std::string name;
  std::string value;
};

/// Collective: every rank says how it is set up, the same names in the same order.
/// @throws InvalidArgument on all ranks when one differs: "who: rank 3 with ranks_per_node = 4,
///   the others 2, expected the same on all ranks"; Timeout, TransportError
void require_same(Bootstrap& bootstrap, std::string_view who, std::span<const Setting> mine);

/// Collective, for what ranks make together: `check` looks at this rank's arguments and returns its
/// settings. What it throws on one rank all are told, so that nobody waits for that rank.
/// @throws what `check` does; else InvalidArgument as require_same
void agree_on_settings(Transport& transport, std::string_view who,
                       const std::function<std::vector<Setting>()>& check);

}  // namespace waybill
