#include <charconv>
#include <string_view>

#include "waybill/transport/bootstraps.h"

namespace waybill {
namespace {

constexpr std::string_view tcp_scheme = "tcp://";
constexpr std::string_view file_scheme = "file://";

std::unique_ptr<Bootstrap> from_tcp(const LaunchEnvironment& environment, double timeout_s) {
  const std::string place = environment.rendezvous.substr(tcp_scheme.size());
  const auto colon = place.rfind(':');
  std::uint16_t port = 0;
  bool ok = colon != std::string::npos && colon > 0;
  if (ok) {
    const char* end = place.data() + place.size();
    const auto parsed = std::from_chars(place.data() + colon + 1, end, port);
    ok = parsed.ec == std::errc{} && parsed.ptr == end && port > 0;
  }
  require(ok, "make_environment_bootstrap: rendezvous = \"", environment.rendezvous,
          "\", expected tcp://HOST:PORT");
  return make_tcp_bootstrap(environment.rank, environment.world_size, place.substr(0, colon), port,
                            timeout_s);
}

}  // namespace

std::unique_ptr<Bootstrap> make_environment_bootstrap(const LaunchEnvironment& environment,
                                                      double timeout_s) {
  const std::string& place = environment.rendezvous;
  if (environment.world_size == 1) {
    return std::move(make_thread_bootstraps(1, timeout_s).front());
  }
  if (place.starts_with(tcp_scheme)) return from_tcp(environment, timeout_s);
  if (place.starts_with(file_scheme)) {
    return make_file_bootstrap(environment.rank, environment.world_size,
                               place.substr(file_scheme.size()), timeout_s);
  }
  throw_invalid("make_environment_bootstrap: rendezvous = \"", place,
                "\", expected tcp://HOST:PORT or file:///FOLDER (set WAYBILL_RENDEZVOUS, or "
                "MASTER_ADDR and MASTER_PORT)");
}

}  // namespace waybill
