#include "transport/bootstrap/tcp/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>

#include "core/printable.h"
#include "waybill/core/error.h"
#include "waybill/core/wait.h"

namespace waybill::detail {
namespace {

constexpr double slice_s = 0.05;    // between two checks for an interrupt
constexpr double max_wait_s = 1e9;  // a clock cannot count more
constexpr double port_patience_s = 2.0;

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Empty: the name cannot be looked up just now.
Addresses resolve(const char* host, std::uint16_t port, int flags = 0) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host, std::to_string(port).c_str(), &hints, &list);
  if (error == EAI_AGAIN) return {nullptr, freeaddrinfo};
  if (error != 0) {
    throw TransportError(
        concat("tcp bootstrap: host ", host, " is not known: ", gai_strerror(error)));
  }
  return {list, freeaddrinfo};
}

std::string text_of(const sockaddr* address, socklen_t size, bool with_port) {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (getnameinfo(address, size, host.data(), host.size(), port.data(), port.size(),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "an unknown address";
  }
  if (!with_port) return host.data();
  const bool has_colons = address->sa_family == AF_INET6;
  return concat(has_colons ? "[" : "", host.data(), has_colons ? "]:" : ":", port.data());
}

/// @param ask getsockname for the own end of a connection, getpeername for the other
std::string end_of(const Socket& socket, decltype(&getsockname) ask) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  auto* const at = reinterpret_cast<sockaddr*>(&address);
  if (ask(socket.number(), at, &size) != 0) return {};
  return text_of(at, size, true);
}

/// Waits until the socket has room, or until the deadline.
bool can_write(const Socket& socket, const Deadline& deadline) {
  while (!deadline.passed()) {
    pollfd watched = watch(socket, POLLOUT);
    wait_for_any({&watched, 1}, deadline);
    if (watched.revents != 0) return true;
  }
  return false;
}

/// The last call of the system has moved nothing, but a later one may.
bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

template <class Value>
void set_option(const Socket& socket, int level, int option, const Value& value) {
  (void)setsockopt(socket.number(), level, option, &value, sizeof(value));
}

Socket open_for(const addrinfo& address) {
  return Socket(socket(address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC,
                       address.ai_protocol));
}

/// 0, or why it cannot listen there.
int try_listen(Socket& door, const addrinfo& address, bool everywhere) {
  door = open_for(address);
  if (!door.is_open()) return errno;
  set_option(door, SOL_SOCKET, SO_REUSEADDR, 1);
  if (everywhere && address.ai_family == AF_INET6) {
    set_option(door, IPPROTO_IPV6, IPV6_V6ONLY, 0);  // IPv4 too
  }
  if (bind(door.number(), address.ai_addr, address.ai_addrlen) != 0) return errno;
  return ::listen(door.number(), SOMAXCONN) == 0 ? 0 : errno;
}

/// Puts the IPv6 address of all interfaces first, as it accepts IPv4 as well.
std::vector<const addrinfo*> in_order(const Addresses& addresses, bool everywhere) {
  std::vector<const addrinfo*> list;
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) list.push_back(at);
  if (everywhere) {
    std::stable_partition(list.begin(), list.end(),
                          [](const addrinfo* a) { return a->ai_family == AF_INET6; });
  }
  return list;
}

/// Makes the socket connect from a given port.
bool bind_source(const Socket& socket, const addrinfo& to, std::uint16_t source_port) {
  sockaddr_storage source{};
  std::memcpy(&source, to.ai_addr, to.ai_addrlen);
  if (to.ai_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&source)->sin6_port = htons(source_port);
  } else {
    reinterpret_cast<sockaddr_in*>(&source)->sin_port = htons(source_port);
  }
  return bind(socket.number(), reinterpret_cast<sockaddr*>(&source), to.ai_addrlen) == 0;
}

}  // namespace

Deadline::Deadline(double seconds)
    : start_(Clock::now()),
      end_(start_ + std::chrono::duration_cast<Clock::duration>(
                        std::chrono::duration<double>(std::min(seconds, max_wait_s)))) {}

double Deadline::left_s() const {
  return std::max(0.0, std::chrono::duration<double>(end_ - Clock::now()).count());
}

void pause_for(double seconds, const Deadline& deadline) {
  const Deadline end(std::min(seconds, deadline.left_s()));
  while (!end.passed()) {
    check_interrupt();
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(0.02, end.left_s())));
  }
}

Socket Socket::listen(const std::string& host, std::uint16_t port, const Deadline& deadline) {
  const Deadline patience(std::min(port_patience_s, deadline.left_s()));
  const bool everywhere = listens_everywhere(host, addresses_of(host));
  for (;;) {
    const Addresses addresses =
        everywhere ? resolve(nullptr, port, AI_PASSIVE) : resolve(host.c_str(), port);
    int error = EAGAIN;
    for (const addrinfo* address : in_order(addresses, everywhere)) {
      Socket door;
      error = try_listen(door, *address, everywhere);
      if (error == 0) return door;
    }
    if (error != EADDRINUSE || patience.passed()) {
      throw TransportError(
          concat("tcp bootstrap: cannot listen on ", host, ":", port, ": ", errno_text(error),
                 error == EADDRINUSE ? "; expected a port that no other job uses" : ""));
    }
    pause_for(0.02, patience);
  }
}

std::optional<Socket> Socket::connect(const std::string& host, std::uint16_t port,
                                      const Deadline& deadline, std::uint16_t source_port) {
  const Addresses addresses = resolve(host.c_str(), port);
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    Socket result = open_for(*at);
    if (!result.is_open()) {
      if (errno != EMFILE && errno != ENFILE) continue;
      throw TransportError(concat("tcp bootstrap: cannot call ", host, ":", port, ": ",
                                  errno_text(errno), " (ulimit -n)"));
    }
    set_option(result, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(result, SOL_SOCKET, SO_REUSEADDR, 1);  // others may soon listen on its port
    if (source_port != 0 && !bind_source(result, *at, source_port)) continue;
    if (::connect(result.number(), at->ai_addr, at->ai_addrlen) == 0) return result;
    if (errno != EINPROGRESS || !can_write(result, deadline)) continue;
    int error = 0;
    socklen_t size = sizeof(error);
    (void)getsockopt(result.number(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error == 0) return result;
  }
  return std::nullopt;
}

Socket Socket::accept(int& error) const {
  const int client = accept4(number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  const bool is_full = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
  error = client < 0 && is_full ? errno : 0;
  Socket socket(client);
  if (socket.is_open()) set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  return socket;
}

std::ptrdiff_t Socket::send_some(std::span<const std::byte> bytes) const {
  const ssize_t sent = ::send(number(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  return sent >= 0 || would_block() ? std::max<ssize_t>(sent, 0) : -1;
}

std::ptrdiff_t Socket::receive_some(std::span<std::byte> bytes) const {
  const ssize_t got = recv(number(), bytes.data(), bytes.size(), 0);
  if (got > 0) return got;
  return got < 0 && would_block() ? 0 : -1;
}

bool Socket::send_now(std::span<const std::byte> bytes) const {
  return send_some(bytes) == std::ssize(bytes);
}

bool Socket::is_connected_to_itself() const {
  const std::string own = end_of(*this, getsockname);
  return !own.empty() && own == end_of(*this, getpeername);
}

void Socket::abort() noexcept {
  set_option(*this, SOL_SOCKET, SO_LINGER, linger{.l_onoff = 1, .l_linger = 0});
  close();
}

std::string Socket::peer_name() const {
  const std::string name = end_of(*this, getpeername);
  return name.empty() ? "an unknown address" : name;
}

std::vector<std::string> addresses_of(const std::string& host) {
  const Addresses addresses = resolve(host.c_str(), 0);
  std::vector<std::string> texts;
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    texts.push_back(text_of(at->ai_addr, at->ai_addrlen, false));
  }
  return texts;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

bool listens_everywhere(const std::string& host, const std::vector<std::string>& addresses) {
  const bool is_address = host.find_first_not_of("0123456789.") == std::string::npos ||
                          host.find(':') != std::string::npos;
  const bool means_loopback = host.starts_with("localhost") || host.starts_with("ip6-l");
  return !is_address && !means_loopback && !addresses.empty() &&
         std::ranges::all_of(addresses, is_loopback);
}

pollfd watch(const Socket& socket, short events) {
  return {.fd = socket.number(), .events = events, .revents = 0};
}

void wait_for_any(std::span<pollfd> sockets, const Deadline& deadline) {
  for (pollfd& socket : sockets) {
    socket.events |= POLLRDHUP;
    socket.revents = 0;
  }
  const double seconds = std::min(slice_s, deadline.left_s());
  (void)poll(sockets.data(), sockets.size(), static_cast<int>(std::ceil(seconds * 1000)));
  check_interrupt();
}

}  // namespace waybill::detail
