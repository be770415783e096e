#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "waybill/transport/launch_environment.h"

namespace waybill::detail {

/// Where ranks meet over TCP, and which they are.
struct TcpPlace {
  std::string host;
  std::uint16_t port = 0;
  JobIdentity job;
};

/// A rank that cannot start goes there and says why. @throws whatever keeps it from that
void tell_tcp_failure(std::int32_t rank, std::int32_t world_size, const TcpPlace& place,
                      std::string_view reason, double patience_s);

}  // namespace waybill::detail
