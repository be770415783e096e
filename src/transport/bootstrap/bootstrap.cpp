#include "waybill/transport/bootstrap.h"

#include <pthread.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <utility>

#include "core/checks.h"
#include "core/printable.h"
#include "transport/bootstrap/wire.h"

namespace waybill {
namespace {

using Bytes = Bootstrap::Bytes;

constexpr std::size_t max_name_bytes = 255;  // the size fits into a byte

/// Puts the size of the operation's name and the name before the bytes of a rank.
Bytes with_name(std::string_view operation, std::span<const std::byte> mine) {
  const auto name = detail::bytes_of(operation.substr(0, max_name_bytes));
  Bytes all{static_cast<std::byte>(name.size())};
  all.insert(all.end(), name.begin(), name.end());
  all.insert(all.end(), mine.begin(), mine.end());
  return all;
}

/// Removes the name again. @throws TransportError for bytes that no rank has given
std::string take_name(Bytes& bytes, std::size_t rank, std::string_view operation) {
  const std::size_t size = bytes.empty() ? 0 : std::to_integer<std::size_t>(bytes.front());
  if (bytes.size() < 1 + size) {
    throw TransportError(concat(operation, ": the exchange returned ", bytes.size(),
                                " bytes of rank ", rank, ", which that rank has not given"));
  }
  std::string name(detail::text_of(bytes).substr(1, size));
  bytes.erase(bytes.begin(), bytes.begin() + 1 + static_cast<std::ptrdiff_t>(size));
  return name;
}

/// Returns the first rank on another host than rank 0; world_size: there is none.
std::size_t first_elsewhere(Bootstrap& bootstrap, std::string_view operation) {
  const auto hosts = detail::gather_texts(bootstrap, host_id(), operation);
  std::size_t r = 0;
  while (r < hosts.size() && hosts[r] == hosts[0]) ++r;
  return r;
}

class CallableBootstrap final : public Bootstrap {
 public:
  CallableBootstrap(std::int32_t rank, std::int32_t world_size, AllGather all_gather,
                    double timeout_s, TellFailure tell_failure)
      : Bootstrap(rank, world_size, timeout_s),
        all_gather_(std::move(all_gather)),
        tell_failure_(std::move(tell_failure)) {}

  void fail(std::string_view reason) noexcept override {
    if (!tell_failure_) return;
    try {
      std::exchange(tell_failure_, {})(reason);
    } catch (...) {  // NOLINT(bugprone-empty-catch): they find out at their deadline
    }
  }

 private:
  std::vector<Bytes> exchange(std::span<const std::byte> mine,
                              std::string_view /*operation*/) override {
    return all_gather_(Bytes(mine.begin(), mine.end()));
  }

  AllGather all_gather_;
  TellFailure tell_failure_;
};

}  // namespace

Bootstrap::Bootstrap(std::int32_t rank, std::int32_t world_size, double timeout_s)
    : rank_{rank}, world_size_(world_size), timeout_s_(timeout_s) {
  detail::check_range("Bootstrap", "world_size", world_size, 1, max_world_size);
  detail::check_range("Bootstrap", "rank", rank, 0, world_size - 1);
  check_timeout("Bootstrap", timeout_s);
}

/// Exchanges have only their order. Without the names, ranks that make two objects in different
/// orders would mix up their memory.
std::vector<Bootstrap::Bytes> Bootstrap::all_gather(std::span<const std::byte> mine,
                                                    std::string_view operation) {
  if (!end_.empty()) throw TransportError(concat(operation, ": the bootstrap is ", end_));
  std::vector<Bytes> all;
  try {
    ++num_exchanges_;
    all = exchange(with_name(operation, mine), operation);
  } catch (const Interrupted& error) {
    end_ = concat("unusable after an interrupt: ", error.what());
    fail(error.what());
    throw;
  } catch (const std::exception& error) {
    end_ = concat("unusable after a failure: ", error.what());
    throw;
  }
  if (std::ssize(all) != world_size_) {
    throw TransportError(concat(operation, ": the exchange returned ", all.size(),
                                " entries, expected ", world_size_));
  }
  const std::string_view own = operation.substr(0, max_name_bytes);
  std::vector<std::string> names;
  for (std::size_t r = 0; r < all.size(); ++r) names.push_back(take_name(all[r], r, operation));
  const auto other = std::ranges::find_if(names, [&](const auto& name) { return name != own; });
  if (other == names.end()) return all;
  throw Disagreement(concat(operation, ": ranks disagree in exchange ", num_exchanges_, ": rank ",
                            rank(), " calls ", own, ", rank ", other - names.begin(), " ",
                            detail::peer_text(*other),
                            "; expected calls that make, grow or free memory, and barriers, in the "
                            "same order on all ranks"));
}

void Bootstrap::barrier(std::string_view operation) { (void)all_gather({}, operation); }

void Bootstrap::fail(std::string_view /*reason*/) noexcept {}

void Bootstrap::check_peers(std::string_view /*operation*/) const {}

std::shared_ptr<FailureScope> Bootstrap::failure_scope() const { return nullptr; }

/// Returns WAYBILL_HOST_ID, by which parts of a machine become hosts; else the boot id of the
/// kernel, which the containers of a host share; without one, the name of the host.
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
  const auto troubles = detail::gather_texts(bootstrap, trouble, operation);
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

std::unique_ptr<Bootstrap> make_callable_bootstrap(std::int32_t rank, std::int32_t world_size,
                                                   AllGather all_gather, double timeout_s,
                                                   TellFailure tell_failure) {
  require(all_gather != nullptr, "make_callable_bootstrap: all_gather is empty");
  return std::make_unique<CallableBootstrap>(rank, world_size, std::move(all_gather), timeout_s,
                                             std::move(tell_failure));
}

}  // namespace waybill

namespace waybill::detail {

void throw_timeout(std::string_view operation, std::int32_t rank, std::int32_t peer,
                   std::uint64_t wanted, std::uint64_t seen, double seconds) {
  throw Timeout({.operation = std::string(operation),
                 .what = "exchange",
                 .rank = rank,
                 .peer = peer,
                 .wanted = wanted,
                 .seen = seen,
                 .seconds = seconds});
}

std::string peer_text(std::string_view text, std::size_t max_bytes) {
  std::string printable(text.substr(0, max_bytes));
  for (std::size_t i = 0; i < printable.size(); ++i) {
    const auto byte = static_cast<unsigned char>(printable[i]);
    const auto before = i == 0 ? 0U : static_cast<unsigned char>(printable[i - 1]);
    if (byte < 0x20 || byte == 0x7F) {
      printable[i] = ' ';
    } else if (before == 0xC2 && byte >= 0x80 && byte < 0xA0) {  // U+0080..U+009F
      printable[i - 1] = printable[i] = ' ';
    }
  }
  if (printable.size() < text.size()) printable += "...";
  return printable;
}

std::string quoted_or_none(std::string_view text) {
  if (text.empty()) return "none";
  return '"' + peer_text(text) + '"';
}

std::vector<std::string> gather_texts(Bootstrap& bootstrap, std::string_view mine,
                                      std::string_view operation) {
  std::vector<std::string> texts;
  for (const auto& bytes : bootstrap.all_gather(bytes_of(mine), operation)) {
    texts.emplace_back(text_of(bytes));
  }
  return texts;
}

std::uint32_t num_forks() noexcept {
  static std::atomic<std::uint32_t> forks{0};
  // Without memory for the handler children are not told apart.
  static const int told = pthread_atfork(nullptr, nullptr, [] { ++forks; });
  (void)told;
  return forks.load(std::memory_order_relaxed);
}

void OwnProcess::require_here(std::string_view operation, std::string_view what) const {
  if (is_here()) return;
  throw TransportError(concat(operation, ": the ", what,
                              " belongs to the process from which this one was forked, and no call "
                              "of it can be made here"));
}

void fill_random(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = getrandom(bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw TransportError(concat("cannot get random bytes: ", errno_text(errno)));
    }
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
}

void Descriptor::close() noexcept {
  if (is_open()) (void)::close(std::exchange(number_, -1));
}

}  // namespace waybill::detail
