#pragma once

#include <chrono>

#include "transport/bootstrap/wire.h"

struct pollfd;  // <poll.h>

namespace waybill::detail {

/// Says when a wait ends.
class Deadline {
 public:
  explicit Deadline(double seconds);
  [[nodiscard]] bool passed() const { return Clock::now() >= end_; }
  [[nodiscard]] double waited_s() const {
    return std::chrono::duration<double>(Clock::now() - start_).count();
  }
  /// At least 0.
  [[nodiscard]] double left_s() const;

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_;
  Clock::time_point end_;
};

/// Sleeps, but not past an interrupt or the deadline. It does not poll: time alone ends it.
void pause_for(double seconds, const Deadline& deadline);

/// A TCP socket that owns its descriptor and never blocks.
class Socket : public Descriptor {
 public:
  using Descriptor::Descriptor;

  /// Listens on the addresses of the host, or on all of this machine if listens_everywhere(). It
  /// retries a port in use for a while, as a client may hold it for a moment.
  /// @throws TransportError when the port cannot be had
  [[nodiscard]] static Socket listen(const std::string& host, std::uint16_t port,
                                     const Deadline& deadline);
  /// Nullopt: nobody listens (yet).
  /// @param source_port the own port; 0: the system chooses it
  /// @throws TransportError when the name is not known
  [[nodiscard]] static std::optional<Socket> connect(const std::string& host, std::uint16_t port,
                                                     const Deadline& deadline,
                                                     std::uint16_t source_port = 0);

  /// Not open: no client waits, or `error` says why this process cannot accept it (EMFILE and the
  /// like; else 0).
  [[nodiscard]] Socket accept(int& error) const;

  // These return how many bytes moved; 0: the call would block; below 0: the connection is closed.
  [[nodiscard]] std::ptrdiff_t send_some(std::span<const std::byte> bytes) const;
  [[nodiscard]] std::ptrdiff_t receive_some(std::span<std::byte> bytes) const;

  /// Sends a few bytes at once, which an empty buffer takes whole; false: it does not.
  [[nodiscard]] bool send_now(std::span<const std::byte> bytes) const;

  /// A client of a port of its own machine on which nobody listens may get this very port as its
  /// own, and then has connected to itself (TCP's simultaneous open).
  [[nodiscard]] bool is_connected_to_itself() const;
  /// Closes it and frees the port at once.
  void abort() noexcept;

  /// "127.0.0.1:4711".
  [[nodiscard]] std::string peer_name() const;
};

/// Says whether rank 0 must listen on all addresses of its machine: `host` is a name, no address
/// and not "localhost", but here it has only loopback addresses (127.0.1.1 on Debian), where ranks
/// of other hosts would not find rank 0.
[[nodiscard]] bool listens_everywhere(const std::string& host,
                                      const std::vector<std::string>& addresses);

[[nodiscard]] bool is_loopback(const std::string& address);

/// Returns the addresses of a name on this machine as texts. @throws TransportError for an unknown
///   name
[[nodiscard]] std::vector<std::string> addresses_of(const std::string& host);

/// Watches a socket for POLLIN, POLLOUT or both (0: for the end of the connection alone).
[[nodiscard]] pollfd watch(const Socket& socket, short events);

/// Waits at most 50 ms, or until the deadline, and sets `revents` of those that are ready. It
/// always notices the end of a connection. @throws as check_interrupt
void wait_for_any(std::span<pollfd> sockets, const Deadline& deadline);

}  // namespace waybill::detail
