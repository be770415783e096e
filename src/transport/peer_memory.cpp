#include "transport/peer_memory.h"

#include <cstdio>
#include <cstring>
#include <span>
#include <vector>

#include "transport/bootstrap/wire.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

constexpr const char* variable = "WAYBILL_PEER_ACCESS";

/// Why all ranks use the host's memory: the first that needs it; empty: none does.
std::string first_trouble(Bootstrap& bootstrap, std::string_view who, const std::string& trouble) {
  const auto texts = bootstrap.all_gather(std::as_bytes(std::span(trouble)), who);
  for (std::size_t r = 0; r < texts.size(); ++r) {
    if (texts[r].empty()) continue;
    const std::string text(reinterpret_cast<const char*>(texts[r].data()), texts[r].size());
    return concat("rank ", r, ": ", detail::peer_text(text));
  }
  return {};
}

}  // namespace

PeerAccessWish peer_access_wish(const char* text) {
  if (text == nullptr || *text == '\0') return PeerAccessWish::any;
  if (std::strcmp(text, "none") == 0) return PeerAccessWish::none;
  require(std::strcmp(text, "required") == 0, variable, " = \"", detail::peer_text(text),
          "\", expected none or required");
  return PeerAccessWish::required;
}

PeerMemory agree_on_peer_memory(Bootstrap& bootstrap, std::string_view who, PeerAccessWish wish,
                                const std::string& trouble, const std::string& refused) {
  const std::string mine = wish == PeerAccessWish::none ? concat(variable, " = none") : trouble;
  const std::string why = first_trouble(bootstrap, who, mine);
  // All ranks hear all of this: those that may not go on do not leave the others waiting.
  const std::string forbids =
      wish == PeerAccessWish::required ? concat(variable, " = required") : refused;
  const std::string forbidden = first_trouble(bootstrap, who, forbids);
  if (why.empty()) return PeerMemory::device;
  if (!forbidden.empty()) {
    throw Unsupported(concat(who, ": GPUs without access to each other's memory (", why,
                             "), and the host's cannot be used instead (", forbidden, ")"));
  }
  if (to_int(bootstrap.rank()) == 0) {
    (void)std::fputs(
        concat("waybill: ", who,
               ": rows go through pinned memory of the host, at what PCIe gives "
               "and not NVLink, as GPUs have no access to each other's memory (",
               why, "); ", variable, "=required makes this an error, waybill doctor says more\n")
            .c_str(),
        stderr);
  }
  return PeerMemory::host;
}

}  // namespace waybill
