#include "tcp_socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>

#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const noexcept { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Addresses resolve(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) {
    throw TransportError(
        concat("tcp bootstrap: host ", host, " is not known: ", gai_strerror(error)));
  }
  return Addresses(list);
}

/// Waits until the socket can be read (or written), or the deadline.
bool ready(int descriptor, short events, const Deadline& deadline) {
  for (;;) {
    pollfd waiting{.fd = descriptor, .events = events, .revents = 0};
    const int found = poll(&waiting, 1, deadline.left_ms());
    if (found > 0) return true;
    if (found == 0 && deadline.passed()) return false;
    if (found < 0 && errno != EINTR) return true;  // the next call on the socket says why
  }
}

void prepare(int descriptor) {
  const int on = 1;
  (void)setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  (void)fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  (void)fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

int Deadline::left_ms() const {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(end_ - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, std::numeric_limits<int>::max()));
}

Socket::~Socket() {
  if (descriptor_ >= 0) close(descriptor_);
}

Socket Socket::listen(const std::string& host, std::uint16_t port) {
  const Addresses addresses = resolve(host, port);
  std::string why;
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    Socket result(socket(at->ai_family, at->ai_socktype, at->ai_protocol));
    if (!result.is_open()) continue;
    const int on = 1;
    (void)setsockopt(result.descriptor(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(result.descriptor(), at->ai_addr, at->ai_addrlen) == 0 &&
        ::listen(result.descriptor(), SOMAXCONN) == 0) {
      prepare(result.descriptor());
      return result;
    }
    why = std::strerror(errno);  // NOLINT(concurrency-mt-unsafe): for a text
  }
  throw TransportError(concat("tcp bootstrap: cannot listen on ", host, ":", port, ": ", why));
}

std::optional<Socket> Socket::connect(const std::string& host, std::uint16_t port,
                                      const Deadline& deadline) {
  const Addresses addresses = resolve(host, port);
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    Socket result(socket(at->ai_family, at->ai_socktype, at->ai_protocol));
    if (!result.is_open()) continue;
    prepare(result.descriptor());
    if (::connect(result.descriptor(), at->ai_addr, at->ai_addrlen) == 0) return result;
    if (errno != EINPROGRESS || !ready(result.descriptor(), POLLOUT, deadline)) continue;
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(result.descriptor(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error == 0) return result;
  }
  return std::nullopt;
}

std::optional<Socket> Socket::accept(const Deadline& deadline) const {
  while (ready(descriptor_, POLLIN, deadline)) {
    const int caller = ::accept(descriptor_, nullptr, nullptr);
    if (caller >= 0) {
      prepare(caller);
      return Socket(caller);
    }
    if (!would_block() && errno != ECONNABORTED) break;
  }
  return std::nullopt;
}

Moved Socket::send(std::span<const std::byte> bytes, const Deadline& deadline) const {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    } else if (!would_block()) {
      return Moved::closed;
    } else if (!ready(descriptor_, POLLOUT, deadline)) {
      return Moved::deadline;
    }
  }
  return Moved::all;
}

Moved Socket::receive(std::span<std::byte> bytes, const Deadline& deadline) const {
  while (!bytes.empty()) {
    const ssize_t got = recv(descriptor_, bytes.data(), bytes.size(), 0);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    } else if (got == 0 || !would_block()) {
      return Moved::closed;
    } else if (!ready(descriptor_, POLLIN, deadline)) {
      return Moved::deadline;
    }
  }
  return Moved::all;
}

}  // namespace waybill::detail
