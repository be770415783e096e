// What scripts/test_two_hosts.sh runs as each rank: meets the others as the environment says, and
// exchanges bytes of which it checks every one.
//
//   two_hosts EXCHANGES BYTES TIMEOUT_S      0: all were right
//   two_hosts forever BYTES TIMEOUT_S        3: an error ended it, and is printed with the seconds
//                                            since the last exchange
//   two_hosts process-world BYTES TIMEOUT_S  3: a world in host memory is refused

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <set>
#include <string>
#include <vector>

#include "waybill/core/error.h"
#include "waybill/runtime/world.h"
#include "waybill/transport/bootstrap.h"

namespace {

using namespace waybill;
using Clock = std::chrono::steady_clock;

std::byte value_of(std::size_t rank, std::int64_t round, std::size_t i) {
  return static_cast<std::byte>(rank * 37 + static_cast<std::size_t>(round) * 11 + i);
}

void exchange(Bootstrap& bootstrap, std::int64_t round, std::size_t bytes) {
  std::vector<std::byte> mine(bytes);
  const auto me = static_cast<std::size_t>(to_int(bootstrap.rank()));
  for (std::size_t i = 0; i < bytes; ++i) mine[i] = value_of(me, round, i);
  const auto all = bootstrap.all_gather(mine, "exchange");
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].size() != bytes) throw InternalError(concat("bytes of rank ", r));
    for (std::size_t i = 0; i < bytes; ++i) {
      if (all[r][i] != value_of(r, round, i)) throw InternalError(concat("a byte of rank ", r));
    }
  }
}

/// How many hosts the ranks say that they are on.
std::size_t num_hosts(Bootstrap& bootstrap) {
  const std::string mine = host_id();
  std::set<std::string> hosts;
  for (const auto& bytes : bootstrap.all_gather(std::as_bytes(std::span(mine)), "hosts")) {
    hosts.emplace(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return hosts.size();
}

int run(const std::string& what, std::size_t bytes, double timeout_s) {
  const LaunchEnvironment environment = read_launch_environment();
  Clock::time_point last = Clock::now();
  try {
    const std::shared_ptr<Bootstrap> bootstrap = make_environment_bootstrap(environment, timeout_s);
    const std::size_t hosts = num_hosts(*bootstrap);
    if (what == "process-world") (void)make_process_world(bootstrap);
    const std::int64_t count = what == "forever" ? INT64_MAX : std::stoll(what);
    for (std::int64_t round = 0; round < count; ++round) {
      exchange(*bootstrap, round, bytes);
      if (round == 0) std::cout << concat("rank ", bootstrap->rank(), " has met\n") << std::flush;
      last = Clock::now();
    }
    std::cout << concat("rank ", bootstrap->rank(), ": ", count, " exchanges with ", hosts,
                        " hosts\n");
    return 0;
  } catch (const std::exception& error) {
    const double seconds = std::chrono::duration<double>(Clock::now() - last).count();
    std::cout << concat("rank ", environment.rank, " after ", seconds, " s: ", error.what(), "\n");
    return 3;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: two_hosts EXCHANGES|forever|process-world BYTES TIMEOUT_S\n";
    return 2;
  }
  return run(argv[1], std::stoul(argv[2]), std::stod(argv[3]));
}
