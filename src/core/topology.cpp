#include "waybill/core/topology.h"

#include <ostream>

#include "waybill/core/error.h"
#include "waybill/core/link_speeds.h"

namespace waybill {

std::ostream& operator<<(std::ostream& out, Rank rank) { return out << to_int(rank); }

void LinkSpeeds::check(const char* who) const {
  const auto positive = [&](const char* name, double speed) {
    require(makes_sense(speed), who, ": ", name, " = ", speed, ", expected ", least, " to ", most,
            " bytes per second");
  };
  positive("nvlink_bytes_per_second", nvlink_bytes_per_second);
  positive("network_bytes_per_second", network_bytes_per_second);
  positive("block_bytes_per_second", block_bytes_per_second);
}

}  // namespace waybill
