#include <array>
#include <thread>

#include "tcp_socket.h"
#include "waybill/core/at.h"
#include "waybill/transport/bootstraps.h"

namespace waybill {
namespace {

using detail::at;
using detail::Deadline;
using detail::Moved;
using detail::Socket;
using Bytes = Bootstrap::Bytes;

constexpr std::uint64_t greeting = 0x7761'7962'696C'6C31;  // says that a waybill rank is calling
constexpr std::uint64_t max_frame_bytes = std::uint64_t{1} << 30;
constexpr double verdict_grace_s = 1.0;  // rank 0's deadline may have begun later than ours

enum class Kind : std::uint32_t { data, silent, gone };

/// Goes before the bytes of an exchange. For `silent` and `gone` there are none: `rank` is the rank
/// that rank 0 missed, `round` the last exchange it took part in.
struct Header {
  std::uint64_t greeting = waybill::greeting;
  std::uint64_t round = 0;
  Kind kind = Kind::data;
  std::int32_t rank = 0;
  std::uint64_t size_bytes = 0;
};

std::span<const std::byte> bytes_of(const Header& header) {
  return std::as_bytes(std::span(&header, 1));
}

Moved send_frame(const Socket& to, Header header, std::span<const std::byte> bytes,
                 const Deadline& deadline) {
  header.size_bytes = bytes.size();
  const Moved moved = to.send(bytes_of(header), deadline);
  return moved == Moved::all ? to.send(bytes, deadline) : moved;
}

Moved receive_frame(const Socket& from, Header& header, Bytes& bytes, const Deadline& deadline) {
  Moved moved = from.receive(std::as_writable_bytes(std::span(&header, 1)), deadline);
  if (moved != Moved::all) return moved;
  if (header.greeting != greeting || header.size_bytes > max_frame_bytes) return Moved::closed;
  bytes.resize(header.size_bytes);
  return from.receive(bytes, deadline);
}

/// All entries in one run of bytes: the sizes, then the entries.
Bytes pack(const std::vector<Bytes>& all) {
  Bytes packed;
  for (const Bytes& entry : all) {
    const std::uint64_t size = entry.size();
    const auto bytes = std::as_bytes(std::span(&size, 1));
    packed.insert(packed.end(), bytes.begin(), bytes.end());
  }
  for (const Bytes& entry : all) packed.insert(packed.end(), entry.begin(), entry.end());
  return packed;
}

std::vector<Bytes> unpack(std::span<const std::byte> packed, std::int32_t num_entries) {
  std::vector<Bytes> all(at(num_entries));
  std::size_t next = at(num_entries) * sizeof(std::uint64_t);
  for (std::size_t r = 0; r < all.size(); ++r) {
    std::uint64_t size = 0;
    if (packed.size() < next) break;
    std::memcpy(&size, packed.data() + r * sizeof(size), sizeof(size));
    if (size > packed.size() - next)
      throw TransportError("tcp bootstrap: rank 0 sent a torn table");
    const auto entry = packed.subspan(next, size);
    all[r].assign(entry.begin(), entry.end());
    next += size;
  }
  return all;
}

class TcpBootstrap final : public Bootstrap {
 public:
  TcpBootstrap(std::int32_t rank, std::int32_t world_size, const std::string& host,
               std::uint16_t port, double timeout_s)
      : Bootstrap(rank, world_size, timeout_s), peers_(at(rank == 0 ? world_size : 1)) {
    if (world_size == 1) return;
    const Deadline deadline(timeout_s);
    if (rank == 0) {
      accept_all(Socket::listen(host, port), deadline);
    } else {
      connect(host, port, deadline);
    }
  }

 private:
  [[noreturn]] void miss(Kind kind, std::int32_t peer, std::uint64_t seen, double seconds,
                         std::string_view operation) const {
    if (kind == Kind::gone) {
      throw TransportError(concat(operation, ": rank ", peer, " left (seen by rank ", rank(),
                                  " in exchange ", round_, ", it took part in ", seen, ")"));
    }
    throw Timeout({.operation = std::string(operation),
                   .what = "exchange",
                   .rank = to_int(rank()),
                   .peer = peer,
                   .wanted = round_,
                   .seen = seen,
                   .seconds = seconds});
  }

  /// Rank 0: whoever calls says which rank it is. Callers that are no ranks are hung up on.
  void accept_all(const Socket& door, const Deadline& deadline) {
    std::int32_t missing = world_size() - 1;
    while (missing > 0) {
      auto caller = door.accept(deadline);
      if (!caller) {
        std::int32_t peer = 1;
        while (peers_[at(peer)].is_open()) ++peer;
        miss(Kind::silent, peer, 0, deadline.waited_s(), "tcp bootstrap: connect");
      }
      Header hello;
      Bytes nothing;
      const Deadline patience(std::min(1.0, timeout_s()));
      if (receive_frame(*caller, hello, nothing, patience) != Moved::all) continue;
      if (static_cast<std::int32_t>(hello.round) != world_size() || hello.rank <= 0 ||
          hello.rank >= world_size() || peers_[at(hello.rank)].is_open()) {
        throw TransportError(concat("tcp bootstrap: a caller is rank ", hello.rank, " of ",
                                    hello.round, ", expected a new rank of ", world_size()));
      }
      peers_[at(hello.rank)] = std::move(*caller);
      --missing;
    }
  }

  void connect(const std::string& host, std::uint16_t port, const Deadline& deadline) {
    const Header hello{.round = static_cast<std::uint64_t>(world_size()), .rank = to_int(rank())};
    for (;;) {
      auto root = Socket::connect(host, port, deadline);
      if (root && send_frame(*root, hello, {}, deadline) == Moved::all) {
        peers_[0] = std::move(*root);
        return;
      }
      if (deadline.passed()) {
        miss(Kind::silent, 0, 0, deadline.waited_s(), "tcp bootstrap: connect");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

  std::vector<Bytes> exchange(std::span<const std::byte> mine,
                              std::string_view operation) override {
    ++round_;
    if (world_size() == 1) return {Bytes(mine.begin(), mine.end())};
    return rank() == Rank{0} ? gather_and_answer(mine, operation) : send_and_wait(mine, operation);
  }

  std::vector<Bytes> gather_and_answer(std::span<const std::byte> mine,
                                       std::string_view operation) {
    const Deadline deadline(timeout_s());
    std::vector<Bytes> all(at(world_size()));
    all[0].assign(mine.begin(), mine.end());
    for (std::int32_t r = 1; r < world_size(); ++r) {
      Header header;
      const Moved moved = receive_frame(peers_[at(r)], header, all[at(r)], deadline);
      if (moved == Moved::all && header.round == round_) continue;
      const Kind verdict = moved == Moved::deadline ? Kind::silent : Kind::gone;
      tell_all({.round = round_ - 1, .kind = verdict, .rank = r}, {});
      miss(verdict, r, round_ - 1, deadline.waited_s(), operation);
    }
    tell_all({.round = round_}, pack(all));
    return all;
  }

  /// A rank that cannot be told finds out by itself.
  void tell_all(const Header& header, std::span<const std::byte> bytes) const {
    const Deadline deadline(timeout_s());
    for (std::int32_t r = 1; r < world_size(); ++r) {
      (void)send_frame(peers_[at(r)], header, bytes, deadline);
    }
  }

  std::vector<Bytes> send_and_wait(std::span<const std::byte> mine, std::string_view operation) {
    const Deadline deadline(timeout_s() + verdict_grace_s);
    const Header header{.round = round_, .rank = to_int(rank())};
    Moved moved = send_frame(peers_[0], header, mine, deadline);
    Header answer;
    Bytes packed;
    if (moved == Moved::all) moved = receive_frame(peers_[0], answer, packed, deadline);
    if (moved != Moved::all) {
      const Kind verdict = moved == Moved::deadline ? Kind::silent : Kind::gone;
      miss(verdict, 0, round_ - 1, deadline.waited_s(), operation);
    }
    if (answer.kind != Kind::data) {
      miss(answer.kind, answer.rank, answer.round, deadline.waited_s(), operation);
    }
    return unpack(packed, world_size());
  }

  std::vector<Socket> peers_;  ///< rank 0: [W], by rank; others: rank 0 alone
  std::uint64_t round_ = 0;
};

}  // namespace

std::unique_ptr<Bootstrap> make_tcp_bootstrap(std::int32_t rank, std::int32_t world_size,
                                              const std::string& host, std::uint16_t port,
                                              double timeout_s) {
  require(!host.empty(), "make_tcp_bootstrap: host is empty");
  require(port != 0 || world_size == 1, "make_tcp_bootstrap: port = 0, expected 1..65535");
  return std::make_unique<TcpBootstrap>(rank, world_size, host, port, timeout_s);
}

}  // namespace waybill
