#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "waybill/transport/bootstrap.h"

// All bootstraps use these: limits of the bytes that ranks send each other, fields in them, and
// texts of other ranks.
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
[[nodiscard]] std::string peer_text(std::span<const std::byte> text);

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

// Fields lie one after another, little-endian and without padding. Each function moves the span to
// the next field.

inline void put_bytes(std::span<std::byte>& to, std::span<const std::byte> from) {
  std::ranges::copy(from, to.begin());
  to = to.subspan(from.size());
}

template <class Number>
void put_number(std::span<std::byte>& to, Number value) {
  for (std::size_t i = 0; i < sizeof(value); ++i) {
    to[i] = static_cast<std::byte>(value >> (8 * i) & 0xFF);
  }
  to = to.subspan(sizeof(value));
}

template <std::size_t Size>
std::array<std::byte, Size> take_bytes(std::span<const std::byte>& from) {
  std::array<std::byte, Size> bytes{};
  std::ranges::copy(from.first(Size), bytes.begin());
  from = from.subspan(Size);
  return bytes;
}

template <class Number>
Number take_number(std::span<const std::byte>& from) {
  Number value = 0;
  for (std::size_t i = 0; i < sizeof(value); ++i) {
    value |= static_cast<Number>(std::to_integer<Number>(from[i]) << (8 * i));
  }
  from = from.subspan(sizeof(value));
  return value;
}

}  // namespace waybill::detail
