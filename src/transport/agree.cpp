#include "waybill/transport/agree.h"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <span>
#include <vector>

#include "transport/bootstrap/wire.h"

namespace waybill {
namespace {

std::vector<std::string> gather_texts(Bootstrap& bootstrap, std::string_view mine,
                                      std::string_view operation) {
  std::vector<std::string> texts;
  for (const auto& bytes : bootstrap.all_gather(std::as_bytes(std::span(mine)), operation)) {
    texts.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return texts;
}

/// The first rank on another host than rank 0; world_size: there is none.
std::size_t first_elsewhere(Bootstrap& bootstrap, std::string_view operation) {
  const auto hosts = gather_texts(bootstrap, host_id(), operation);
  std::size_t r = 0;
  while (r < hosts.size() && hosts[r] == hosts[0]) ++r;
  return r;
}

}  // namespace

/// WAYBILL_HOST_ID, where parts of a machine are to be hosts of their own. Else that of the running
/// kernel, which containers of a host have too; where there is none, the name of the host.
std::string host_id() {
  const char* const forced = std::getenv("WAYBILL_HOST_ID");
  if (forced != nullptr && *forced != '\0') return std::string(forced).substr(0, 256);
  std::string id;
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  if (std::getline(boot, id) && !id.empty()) return id;
  std::array<char, 256> name{};
  (void)gethostname(name.data(), name.size() - 1);
  return name.data();
}

void agree(Bootstrap& bootstrap, std::string_view trouble, std::string_view operation) {
  const auto troubles = gather_texts(bootstrap, trouble, operation);
  for (std::size_t r = 0; r < troubles.size(); ++r) {
    if (troubles[r].empty()) continue;
    throw PeerFailed(concat(operation, ": rank ", r, " failed: ", detail::peer_text(troubles[r])));
  }
}

bool on_one_host(Bootstrap& bootstrap) {
  return first_elsewhere(bootstrap, "on_one_host") ==
         static_cast<std::size_t>(bootstrap.world_size());
}

void require_one_host(Bootstrap& bootstrap, std::string_view who) {
  const std::size_t r = first_elsewhere(bootstrap, who);
  if (r == static_cast<std::size_t>(bootstrap.world_size())) return;
  throw Unsupported(
      concat(who, ": rank ", r, " is on another host than rank 0, expected all on one"));
}

}  // namespace waybill
