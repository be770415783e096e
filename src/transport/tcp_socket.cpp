#include "tcp_socket.h"

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

constexpr double slice_s = 0.05;        // between two looks for an interrupt
constexpr double longest_wait_s = 1e9;  // what a clock can count
constexpr double port_patience_s = 2.0;

struct FreeAddresses {
  void operator()(addrinfo* list) const noexcept { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

/// Null: the name cannot be looked up just now.
Addresses resolve(const char* host, std::uint16_t port, int flags = 0) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host, std::to_string(port).c_str(), &hints, &list);
  if (error == EAI_AGAIN) return nullptr;
  if (error != 0) {
    throw TransportError(
        concat("tcp bootstrap: host ", host, " is not known: ", gai_strerror(error)));
  }
  return Addresses(list);
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

/// Its own end, or the other one.
struct End {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  [[nodiscard]] sockaddr* get() { return reinterpret_cast<sockaddr*>(&address); }
};

/// Waits until the socket can be written, or the deadline.
bool can_write(const Socket& socket, const Deadline& deadline) {
  while (!deadline.passed()) {
    PollSet set;
    (void)set.add(socket, PollSet::to_write);
    set.wait(deadline);
    if (set.is_ready(0)) return true;
  }
  return false;
}

void prepare(int descriptor) {
  const int on = 1;
  (void)setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

void set_option(const Socket& socket, int level, int option, int value) {
  (void)setsockopt(socket.descriptor(), level, option, &value, sizeof(value));
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
  if (bind(door.descriptor(), address.ai_addr, address.ai_addrlen) != 0) return errno;
  return ::listen(door.descriptor(), SOMAXCONN) == 0 ? 0 : errno;
}

/// Of the addresses of all interfaces the one of IPv6, which takes IPv4 as well, comes first.
std::vector<const addrinfo*> in_order(const Addresses& addresses, bool everywhere) {
  std::vector<const addrinfo*> list;
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) list.push_back(at);
  if (everywhere) {
    std::stable_partition(list.begin(), list.end(),
                          [](const addrinfo* a) { return a->ai_family == AF_INET6; });
  }
  return list;
}

/// A call from a port that is given.
bool bind_source(const Socket& socket, const addrinfo& to, std::uint16_t source_port) {
  End source;
  std::memcpy(source.get(), to.ai_addr, to.ai_addrlen);
  if (to.ai_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(source.get())->sin6_port = htons(source_port);
  } else {
    reinterpret_cast<sockaddr_in*>(source.get())->sin_port = htons(source_port);
  }
  return bind(socket.descriptor(), source.get(), to.ai_addrlen) == 0;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

}  // namespace

Deadline::Deadline(double seconds)
    : start_(Clock::now()),
      end_(start_ + std::chrono::duration_cast<Clock::duration>(
                        std::chrono::duration<double>(std::min(seconds, longest_wait_s)))) {}

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

void Socket::close() noexcept {
  if (descriptor_ >= 0) (void)::close(std::exchange(descriptor_, -1));
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
    prepare(result.descriptor());
    set_option(result, SOL_SOCKET, SO_REUSEADDR, 1);  // its port can be listened on soon after
    if (source_port != 0 && !bind_source(result, *at, source_port)) continue;
    if (::connect(result.descriptor(), at->ai_addr, at->ai_addrlen) == 0) return result;
    if (errno != EINPROGRESS || !can_write(result, deadline)) continue;
    int error = 0;
    socklen_t size = sizeof(error);
    (void)getsockopt(result.descriptor(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error == 0) return result;
  }
  return std::nullopt;
}

Socket::Accepted Socket::accept() const {
  const int caller = accept4(descriptor_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (caller >= 0) {
    prepare(caller);
    return {.caller = Socket(caller), .error = 0};
  }
  const bool no_room = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
  return {.caller = {}, .error = no_room ? errno : 0};
}

IoResult Socket::send_some(std::span<const std::byte> bytes) const {
  const ssize_t sent = ::send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (sent >= 0) return {IoStatus::complete, static_cast<std::size_t>(sent)};
  const bool later = errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  return {later ? IoStatus::would_block : IoStatus::closed, 0};
}

IoResult Socket::receive_some(std::span<std::byte> bytes) const {
  const ssize_t got = recv(descriptor_, bytes.data(), bytes.size(), 0);
  if (got > 0) return {IoStatus::complete, static_cast<std::size_t>(got)};
  const bool later = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  return {later ? IoStatus::would_block : IoStatus::closed, 0};
}

bool Socket::send_now(std::span<const std::byte> bytes) const {
  const IoResult sent = send_some(bytes);
  return sent.status == IoStatus::complete && sent.num_bytes == bytes.size();
}

bool Socket::is_connected_to_itself() const {
  End own;
  End peer;
  return getsockname(descriptor_, own.get(), &own.size) == 0 &&
         getpeername(descriptor_, peer.get(), &peer.size) == 0 && own.size == peer.size &&
         text_of(own.get(), own.size, true) == text_of(peer.get(), peer.size, true);
}

void Socket::abort() noexcept {
  const linger at_once{.l_onoff = 1, .l_linger = 0};
  (void)setsockopt(descriptor_, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  close();
}

std::string Socket::peer_name() const {
  End peer;
  if (getpeername(descriptor_, peer.get(), &peer.size) != 0) return "an unknown address";
  return text_of(peer.get(), peer.size, true);
}

std::vector<std::string> addresses_of(const std::string& host) {
  const Addresses addresses = resolve(host.c_str(), 0);
  std::vector<std::string> texts;
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    texts.push_back(text_of(at->ai_addr, at->ai_addrlen, false));
  }
  return texts;
}

bool listens_everywhere(const std::string& host, const std::vector<std::string>& addresses) {
  const bool is_address = host.find_first_not_of("0123456789.") == std::string::npos ||
                          host.find(':') != std::string::npos;
  const bool means_loopback = host.starts_with("localhost") || host.starts_with("ip6-l");
  return !is_address && !means_loopback && !addresses.empty() &&
         std::ranges::all_of(addresses, is_loopback);
}

std::size_t PollSet::add(const Socket& socket, int wants) {
  entries_.push_back({socket.descriptor(), wants, false});
  return entries_.size() - 1;
}

void PollSet::wait(const Deadline& deadline) {
  std::vector<pollfd> waiting;
  for (const Entry& entry : entries_) {
    int events = POLLRDHUP;
    if ((entry.wants & to_read) != 0) events |= POLLIN;
    if ((entry.wants & to_write) != 0) events |= POLLOUT;
    waiting.push_back({.fd = entry.descriptor, .events = static_cast<short>(events), .revents = 0});
  }
  const double seconds = std::min(slice_s, deadline.left_s());
  const int found =
      poll(waiting.data(), waiting.size(), static_cast<int>(std::ceil(seconds * 1000)));
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].ready = found > 0 && waiting[i].revents != 0;
  }
  check_interrupt();
}

}  // namespace waybill::detail
