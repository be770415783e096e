#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace waybill::detail {

/// When waiting ends.
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

/// Sleeps, but not past an interrupt or the deadline. No polling: what ends it is time alone.
void pause_for(double seconds, const Deadline& deadline);

/// How an attempt to move bytes ended.
enum class IoStatus : std::uint8_t { complete, would_block, closed };

struct IoResult {
  IoStatus status = IoStatus::complete;
  std::size_t num_bytes = 0;  ///< moved; > 0 when complete
};

/// A TCP socket that owns its descriptor and never blocks.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Socket() { close(); }

  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  [[nodiscard]] bool is_open() const noexcept { return descriptor_ >= 0; }
  void close() noexcept;

  /// On the addresses of the host, or on all of this machine where listens_everywhere(). A port
  /// that is in use is tried again for a while: a caller may hold it for a moment.
  /// @throws TransportError when the port cannot be had
  [[nodiscard]] static Socket listen(const std::string& host, std::uint16_t port,
                                     const Deadline& deadline);
  /// Nullopt: nobody listens (yet).
  /// @param source_port to call from; 0: any, which the system chooses
  /// @throws TransportError when the name is not known
  [[nodiscard]] static std::optional<Socket> connect(const std::string& host, std::uint16_t port,
                                                     const Deadline& deadline,
                                                     std::uint16_t source_port = 0);

  struct Accepted;
  [[nodiscard]] Accepted accept() const;

  [[nodiscard]] IoResult send_some(std::span<const std::byte> bytes) const;
  [[nodiscard]] IoResult receive_some(std::span<std::byte> bytes) const;
  /// All of a few bytes at once, as an empty buffer takes them; false: it does not.
  [[nodiscard]] bool send_now(std::span<const std::byte> bytes) const;

  /// Who calls a port of its own machine on which nobody listens may be given this very port as its
  /// own, and then has called itself (TCP's simultaneous open).
  [[nodiscard]] bool is_connected_to_itself() const;
  /// Closes it so that the port is free at once.
  void abort() noexcept;

  /// "127.0.0.1:4711".
  [[nodiscard]] std::string peer_name() const;

 private:
  int descriptor_ = -1;
};

struct Socket::Accepted {
  Socket caller;  ///< not open: nobody calls, or there is an error
  int error = 0;  ///< EMFILE and the like: a caller is there, but cannot be taken
};

/// Whether rank 0 has to listen on all addresses of its machine: `host` is a name, no address and
/// not "localhost", but here it stands for a loopback address only (127.0.1.1 on Debian), where the
/// ranks of other hosts would not find it.
[[nodiscard]] bool listens_everywhere(const std::string& host,
                                      const std::vector<std::string>& addresses);

/// The addresses that a name stands for here, as texts. @throws TransportError for an unknown one
[[nodiscard]] std::vector<std::string> addresses_of(const std::string& host);

/// Sockets to wait for.
class PollSet {
 public:
  enum Wants : std::uint8_t { hang_up = 0, to_read = 1, to_write = 2 };

  /// @param wants a sum of Wants. Hang-ups are always noticed.
  /// @return its index
  std::size_t add(const Socket& socket, int wants);

  /// At most 50 ms, or until the deadline. Afterwards is_ready() says for which sockets there is
  /// something to do. @throws as check_interrupt
  void wait(const Deadline& deadline);

  [[nodiscard]] bool is_ready(std::size_t idx) const { return entries_[idx].ready; }

 private:
  struct Entry {
    int descriptor;
    int wants;
    bool ready;
  };
  std::vector<Entry> entries_;
};

}  // namespace waybill::detail
