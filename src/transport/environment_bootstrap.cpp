#include <charconv>
#include <string_view>

#include "tcp_bootstrap.h"
#include "waybill/transport/bootstraps.h"

namespace waybill {
namespace {

using detail::TcpPlace;

constexpr std::string_view tcp_scheme = "tcp://";
constexpr std::string_view file_scheme = "file://";

[[noreturn]] void refuse_place(const std::string& place) {
  throw_invalid("make_environment_bootstrap: rendezvous = \"", place,
                "\", expected tcp://HOST:PORT, tcp://[ADDRESS]:PORT or file:///FOLDER (set "
                "WAYBILL_RENDEZVOUS, or MASTER_ADDR and MASTER_PORT)");
}

/// "HOST:PORT"; an IPv6 address, which has colons itself, needs brackets: "[::1]:PORT".
TcpPlace read_tcp_place(const LaunchEnvironment& environment) {
  const std::string place = environment.rendezvous.substr(tcp_scheme.size());
  const auto colon = place.rfind(':');
  std::uint16_t port = 0;
  bool ok = colon != std::string::npos && colon > 0;
  if (ok) {
    const char* end = place.data() + place.size();
    const auto parsed = std::from_chars(place.data() + colon + 1, end, port);
    ok = parsed.ec == std::errc{} && parsed.ptr == end && port > 0;
  }
  std::string host = place.substr(0, ok ? colon : 0);
  const bool in_brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (in_brackets) host = host.substr(1, host.size() - 2);
  ok = ok && (in_brackets || host.find_first_of(":[]") == std::string::npos) &&
       host.find_first_of("[]") == std::string::npos;
  if (!ok) refuse_place(environment.rendezvous);
  return {host, port, environment.job};
}

}  // namespace

std::unique_ptr<Bootstrap> make_environment_bootstrap(const LaunchEnvironment& environment,
                                                      double timeout_s) {
  const std::string& place = environment.rendezvous;
  if (environment.world_size == 1) {
    return std::move(make_thread_bootstraps(1, timeout_s).front());
  }
  if (place.starts_with(tcp_scheme)) {
    const auto [host, port, job] = read_tcp_place(environment);
    return make_tcp_bootstrap(environment.rank, environment.world_size, host, port, timeout_s, job);
  }
  // file://FOLDER would be another folder wherever a rank has been started.
  if (place.starts_with(file_scheme) && place.substr(file_scheme.size()).starts_with('/')) {
    return make_file_bootstrap(environment.rank, environment.world_size,
                               place.substr(file_scheme.size()), timeout_s, environment.job);
  }
  refuse_place(place);
}

void report_failed_start(const LaunchEnvironment& environment, std::string_view reason,
                         double patience_s) noexcept {
  if (environment.world_size <= 1) return;
  try {
    if (environment.rendezvous.starts_with(tcp_scheme)) {
      detail::tell_tcp_failure(environment.rank, environment.world_size,
                               read_tcp_place(environment), reason, patience_s);
    } else if (environment.rendezvous.starts_with(file_scheme)) {
      make_environment_bootstrap(environment, patience_s)->fail(reason);
    }
  } catch (const std::exception&) {
    // The others find out by their deadlines.
  }
}

}  // namespace waybill
