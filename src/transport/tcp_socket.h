#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace waybill::detail {

/// When waiting ends.
class Deadline {
 public:
  explicit Deadline(double seconds)
      : start_(Clock::now()),
        end_(start_ +
             std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}
  [[nodiscard]] bool passed() const { return Clock::now() >= end_; }
  [[nodiscard]] double waited_s() const {
    return std::chrono::duration<double>(Clock::now() - start_).count();
  }
  /// For poll(): milliseconds left, at least 0.
  [[nodiscard]] int left_ms() const;

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_;
  Clock::time_point end_;
};

/// How an attempt to move bytes ended.
enum class Moved : std::uint8_t { all, deadline, closed };

/// A TCP socket that owns its descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Socket();

  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  [[nodiscard]] bool is_open() const noexcept { return descriptor_ >= 0; }

  /// @throws TransportError when the port cannot be had.
  [[nodiscard]] static Socket listen(const std::string& host, std::uint16_t port);
  /// Nullopt: nobody listens (yet). @throws TransportError when the name is not known.
  [[nodiscard]] static std::optional<Socket> connect(const std::string& host, std::uint16_t port,
                                                     const Deadline& deadline);
  /// Nullopt: nobody called.
  [[nodiscard]] std::optional<Socket> accept(const Deadline& deadline) const;

  [[nodiscard]] Moved send(std::span<const std::byte> bytes, const Deadline& deadline) const;
  [[nodiscard]] Moved receive(std::span<std::byte> bytes, const Deadline& deadline) const;

 private:
  int descriptor_ = -1;
};

}  // namespace waybill::detail
