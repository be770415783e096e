#include "transport/peer_transport.h"

#include <cstdio>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

#include "transport/bootstrap/wire.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

/// Ranks that are set up differently would wait for each other for ever, so they compare first.
Topology topology_of(Bootstrap& bootstrap, std::int32_t ranks_per_node) {
  const Setting settings[] = {{"waybill version", WAYBILL_VERSION},
                              {"ranks_per_node", concat(ranks_per_node)}};
  require_same(bootstrap, "world", settings);
  const std::int32_t world = bootstrap.world_size();
  return {world, ranks_per_node == 0 ? world : ranks_per_node};
}

constexpr const char* variable = "WAYBILL_PEER_ACCESS";

/// Returns the first text of a rank that is not empty, with the rank; else an empty one.
std::string first_text(Bootstrap& bootstrap, std::string_view operation, const std::string& mine) {
  const auto texts = detail::gather_texts(bootstrap, mine, operation);
  for (std::size_t r = 0; r < texts.size(); ++r) {
    if (!texts[r].empty()) return concat("rank ", r, ": ", detail::peer_text(texts[r]));
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
  const std::string why = first_text(bootstrap, who, mine);
  // All ranks learn all of this, so all of them throw, or none.
  const std::string forbids =
      wish == PeerAccessWish::required ? concat(variable, " = required") : refused;
  const std::string forbidden = first_text(bootstrap, who, forbids);
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

PeerTransport::PeerTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node)
    : Transport(bootstrap->rank(), topology_of(*bootstrap, ranks_per_node), bootstrap->timeout_s()),
      bootstrap_(std::move(bootstrap)) {}

void PeerTransport::require_usable(std::string_view operation) const {
  process_.require_here(operation, "world");
  if (failure_.empty()) return;
  throw TransportError(concat(operation, ": the world is unusable after ", failure_));
}

template <class Work>
void PeerTransport::run_collective(std::string_view operation, Work&& work) {
  require_usable(operation);
  check_peers(operation, rank());
  std::optional<EnteredWaitScope> entered;
  if (status_ != nullptr) entered.emplace(status_->scope_of(operation));
  try {
    std::forward<Work>(work)();
  } catch (const Timeout&) {
    note_timeout();
    throw;
  } catch (const Interrupted& error) {
    give_up("an interrupt: ", error.what());
    throw;
  }
}

void PeerTransport::barrier(std::string_view operation) {
  run_collective(operation, [&] { bootstrap_->barrier(operation); });
}

void PeerTransport::require_same(std::string_view who, std::span<const Setting> mine) {
  run_collective(who, [&] { waybill::require_same(*bootstrap_, who, mine); });
}

void PeerTransport::fail(std::string_view reason) noexcept { give_up("a failure: ", reason); }

void PeerTransport::give_up(const char* after, std::string_view reason) noexcept {
  if (!failure_.empty()) return;
  try {
    failure_ = concat(after, reason);
  } catch (const std::exception&) {
    failure_ = "no memory";  // short enough to need none
  }
  if (status_ != nullptr) status_->fail(reason);
  bootstrap_->fail(reason);
}

void PeerTransport::check_peers(std::string_view operation, Rank awaited) {
  bootstrap_->check_peers(operation);
  if (status_ != nullptr) status_->check(operation, awaited);
}

void PeerTransport::note_timeout() noexcept {
  if (status_ != nullptr) status_->note_timeout();
}

SymmetricBuffer PeerTransport::allocate(std::int64_t size_bytes, std::string_view name) {
  require(size_bytes >= 0, "allocate: size_bytes = ", size_bytes, ", expected >= 0");
  SymmetricBuffer buffer;
  buffer.name = name;
  buffer.size_bytes = size_bytes;
  share(buffer, size_bytes);
  return buffer;
}

SignalPad PeerTransport::allocate_signals(std::int64_t count, std::string_view name) {
  require(count >= 0, "allocate_signals: count = ", count, ", expected >= 0");
  SignalPad pad;
  pad.name = name;
  pad.count = count;
  share(pad, count * static_cast<std::int64_t>(sizeof(std::uint64_t)));
  return pad;
}

void PeerTransport::release(SymmetricBuffer& buffer) { give_back(buffer); }

void PeerTransport::release(SignalPad& pad) { give_back(pad); }

void PeerTransport::defer_release(std::vector<std::shared_ptr<void>> memory) {
  const std::lock_guard lock(deferred_mutex_);
  deferred_.insert(deferred_.end(), memory.begin(), memory.end());
}

std::uint64_t* PeerTransport::slot_of(Rank peer, SignalSlot slot) const {
  check_slot(slot);
  const std::size_t r = to_int(peer);
  require(r < slot.pad->peers.size(), "signal: peer = ", peer, ", expected 0..",
          topology().world_size - 1);
  auto* const base = static_cast<std::uint64_t*>(slot.pad->memory[r].get());
  return base == nullptr ? nullptr : base + slot.idx;
}

std::byte* PeerTransport::address_of(const SymmetricBuffer& to, const PutRequest& piece) const {
  check_piece(to, piece);
  auto* const base = static_cast<std::byte*>(to.memory[to_int(piece.peer)].get());
  return base == nullptr ? nullptr : base + piece.dst_offset_bytes;
}

template <class Symmetric>
void PeerTransport::share(Symmetric& result, std::int64_t size_bytes) {
  using Element = std::remove_pointer_t<decltype(result.local)>;
  std::shared_ptr<void> table;
  run_collective(concat("allocate(", result.name, ")"), [&] {
    result.memory = make_parts(size_bytes, result.name);
    table = make_table(result.memory, result.name);
  });
  for (std::int32_t r = 0; r < topology().world_size; ++r) {
    auto* const part = static_cast<Element*>(result.memory[r].get());
    result.peers.push_back(reach(Rank{r}) == Reach::network ? nullptr : part);
  }
  result.local = result.peers[to_int(rank())];
  result.table = static_cast<Element* const*>(table.get());
  if (table != nullptr) result.memory.push_back(std::move(table));
}

/// Freeing device memory waits for the device, on which a kernel may wait for a rank that has yet
/// to launch its own. So no rank goes on before the memory of all is free.
template <class Symmetric>
void PeerTransport::give_back(Symmetric& memory) {
  if (memory.memory.empty()) return;  // never allocated, on no rank
  const std::string operation = concat("release(", memory.name, ")");
  run_collective(operation, [&] {
    bootstrap_->barrier(operation);
    free_parts(std::exchange(memory, {}).memory);
    bootstrap_->barrier(operation);
  });
}

}  // namespace waybill
