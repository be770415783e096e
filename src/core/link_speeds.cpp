#include "waybill/core/link_speeds.h"

#include <cmath>

#include "waybill/core/error.h"

namespace waybill {

void LinkSpeeds::check(const char* who) const {
  const auto positive = [&](const char* name, double speed) {
    require(std::isfinite(speed) && speed > 0, who, ": ", name, " = ", speed,
            ", expected a finite number above 0");
  };
  positive("nvlink_bytes_per_second", nvlink_bytes_per_second);
  positive("network_bytes_per_second", network_bytes_per_second);
  positive("block_bytes_per_second", block_bytes_per_second);
}

}  // namespace waybill
