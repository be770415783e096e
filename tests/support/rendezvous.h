#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "waybill/transport/bootstrap.h"

/// What tests of rendezvous share: ports, callers that are no ranks, times.
namespace waybill::test {

/// Seconds since it was made.
class Stopwatch {
 public:
  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

inline void sleep_s(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

inline sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

/// A port that nobody listens on, and that the system gives to no caller.
inline std::uint16_t free_port() {
  std::random_device random;
  for (;;) {
    const auto port = static_cast<std::uint16_t>(10'000 + random() % 22'000);
    const sockaddr_in address = loopback(port);
    const int descriptor = socket(AF_INET, SOCK_STREAM, 0);
    const int bound =
        bind(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
    close(descriptor);
    if (bound == 0) return port;
  }
}

/// The bytes of a message as it is sent.
template <class Message>
std::array<std::byte, sizeof(Message)> encode(const Message& message) {
  return std::bit_cast<std::array<std::byte, sizeof(Message)>>(message);
}

/// Somebody who calls a port and says what the test wants.
class RawCaller {
 public:
  /// Calls until somebody listens, for 10 s at most.
  explicit RawCaller(std::uint16_t port) {
    const sockaddr_in address = loopback(port);
    for (const Stopwatch watch; watch.seconds() < 10; sleep_s(0.005)) {
      descriptor_ = socket(AF_INET, SOCK_STREAM, 0);
      if (::connect(descriptor_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0)
        return;
      close(std::exchange(descriptor_, -1));
    }
    ADD_FAILURE() << "nobody listens on port " << port;
  }
  RawCaller(RawCaller&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  RawCaller(const RawCaller&) = delete;
  RawCaller& operator=(const RawCaller&) = delete;
  ~RawCaller() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  void say(const void* bytes, std::size_t size) const {
    (void)send(descriptor_, bytes, size, MSG_NOSIGNAL);
  }
  void say(std::string_view text) const { say(text.data(), text.size()); }
  template <class Container>
  void say_bytes(const Container& bytes) const {
    say(bytes.data(), bytes.size());
  }

  /// What comes until it is hung up on, or for so many seconds.
  [[nodiscard]] std::string hear(double seconds) const {
    timeval patience{};
    patience.tv_sec = static_cast<time_t>(seconds);
    patience.tv_usec =
        static_cast<suseconds_t>((seconds - static_cast<double>(patience.tv_sec)) * 1e6);
    (void)setsockopt(descriptor_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    std::string all;
    char part[4096];
    for (;;) {
      const ssize_t n = recv(descriptor_, part, sizeof(part), 0);
      if (n <= 0) return all;
      all.append(part, static_cast<std::size_t>(n));
    }
  }

 private:
  int descriptor_ = -1;
};

/// What `call` throws; empty: nothing.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

inline ::testing::AssertionResult holds(const std::string& text, std::string_view part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << '"' << text << "\" does not say \"" << part << '"';
}

}  // namespace waybill::test
