#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "waybill/transport/bootstrap.h"

// All bootstraps use these: limits of the bytes that ranks send each other, messages, and texts of
// other ranks.
namespace waybill::detail {

/// The longest reason that one rank gives another, in bytes.
inline constexpr std::size_t max_reason_bytes = 2000;
inline constexpr std::size_t max_job_id_bytes = 120;
/// A rank may give so much to one exchange.
inline constexpr std::size_t max_entry_bytes = std::size_t{64} << 20;

/// Makes the text of another rank fit for a message: at most max_bytes, and spaces for bytes that a
/// terminal acts on.
[[nodiscard]] std::string peer_text(std::string_view text,
                                    std::size_t max_bytes = max_reason_bytes);

/// Quotes the peer_text() of it; "none" for an empty text.
[[nodiscard]] std::string quoted_or_none(std::string_view text);

/// Collective: gathers a text of every rank.
[[nodiscard]] std::vector<std::string> gather_texts(Bootstrap& bootstrap, std::string_view mine,
                                                    std::string_view operation);

/// @throws Timeout: `rank` waited for exchange `wanted` of `peer`, and has seen exchange `seen`
[[noreturn]] void throw_timeout(std::string_view operation, std::int32_t rank, std::int32_t peer,
                                std::uint64_t wanted, std::uint64_t seen, double seconds);

/// Fills the bytes with the kernel's random numbers. @throws TransportError
void fill_random(std::span<std::byte> bytes);

[[nodiscard]] inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}
[[nodiscard]] inline std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Forks that made this process, as far as anyone has asked before them.
[[nodiscard]] std::uint32_t num_forks() noexcept;

/// Made with a world's memory, files and connections: these are not a child's that is forked later,
/// which has them, too.
class OwnProcess {
 public:
  [[nodiscard]] bool is_here() const noexcept { return num_forks_ == num_forks(); }
  /// @throws TransportError in a child
  void require_here(std::string_view operation, std::string_view what) const;

 private:
  std::uint32_t num_forks_ = num_forks();
};

/// Owns a file descriptor; below 0: none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() { close(); }

  void close() noexcept;
  [[nodiscard]] int number() const noexcept { return number_; }
  [[nodiscard]] bool is_open() const noexcept { return number_ >= 0; }

 private:
  int number_ = -1;
};

/// Ranks send messages as they lie in memory: little-endian and without padding.
template <class Message>
[[nodiscard]] std::span<const std::byte> bytes_in(const Message& message) {
  static_assert(std::has_unique_object_representations_v<Message> &&
                std::endian::native == std::endian::little);
  return std::as_bytes(std::span(&message, 1));
}

/// The part of a message whose bytes are still to come.
template <class Message>
[[nodiscard]] std::span<std::byte> room_in(Message& message, std::size_t filled) {
  return std::as_writable_bytes(std::span(&message, 1)).subspan(filled);
}

}  // namespace waybill::detail
