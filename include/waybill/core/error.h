#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace waybill {

/// A value on its way into a text, whatever its type: a function that takes parts need not be a
/// template. It reads like operator<<. Strings and objects are not copied and have to outlive it.
class TextPart {
 public:
  template <class Value>
  TextPart(const Value& value) noexcept {  // NOLINT(google-explicit-constructor): any value is one
    if constexpr (std::same_as<Value, char> || std::same_as<Value, signed char> ||
                  std::same_as<Value, unsigned char>) {
      content_.natural = static_cast<unsigned char>(value);
      write_ = &write_character;
    } else if constexpr (std::signed_integral<Value> || std::same_as<Value, bool>) {
      content_.integer = value;
      write_ = &write_integer;
    } else if constexpr (std::unsigned_integral<Value>) {
      content_.natural = value;
      write_ = &write_natural;
    } else if constexpr (std::same_as<Value, double> || std::same_as<Value, float>) {
      content_.real = static_cast<double>(value);
      write_ = &write_real;
    } else if constexpr (std::is_convertible_v<const Value&, std::string_view>) {
      const std::string_view text = value;
      content_.object = text.data();
      size_ = text.size();
      write_ = &write_text;
    } else {
      content_.object = &value;
      write_ = &write_object<Value>;
    }
  }

  /// As `out << value` writes it.
  void write(std::ostream& out) const { write_(out, *this); }

 private:
  static void write_integer(std::ostream& out, const TextPart& part);
  static void write_natural(std::ostream& out, const TextPart& part);
  static void write_real(std::ostream& out, const TextPart& part);
  static void write_character(std::ostream& out, const TextPart& part);
  static void write_text(std::ostream& out, const TextPart& part);
  template <class Value>
  static void write_object(std::ostream& out, const TextPart& part) {
    out << *static_cast<const Value*>(part.content_.object);
  }

  union Content {
    std::int64_t integer;
    std::uint64_t natural;
    double real;
    const void* object;
  };

  Content content_;
  std::size_t size_ = 0;  // bytes of a text
  void (*write_)(std::ostream& out, const TextPart& part);
};

namespace detail {
[[nodiscard]] std::string join_parts(std::initializer_list<TextPart> parts);
}

/// The parts, anything with operator<<, one after another without separators.
template <class... Parts>
[[nodiscard]] std::string concat(const Parts&... parts) {
  return detail::join_parts({TextPart(parts)...});
}

/// Base of everything the library throws. Whatever its text quotes from files, names and arguments
/// is printable(): a terminal only shows it.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& text);
};

/// The caller passed something wrong. The text names function, argument, got and expected.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// Ranks made different collective calls. The text names the operation, two ranks and what
/// differs. The object that was called is unusable afterwards.
class Disagreement : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// The request is valid, but this build cannot serve it. The text lists what it can do.
class Unsupported : public Error {
 public:
  using Error::Error;
};

/// A file could not be read, parsed or written. The text names the file and the position, in one
/// line.
class IoError : public Error {
 public:
  explicit IoError(const std::string& text);
};

/// The machinery between ranks failed; the text says what was being done.
class TransportError : public Error {
 public:
  using Error::Error;
};

/// Another rank failed, was interrupted or has died. The text names it and says why.
class PeerFailed : public TransportError {
 public:
  using TransportError::TransportError;
};

/// A wait that the user ended (Ctrl-C).
class Interrupted : public Error {
 public:
  using Error::Error;
};

/// A wait that reached its deadline: who waited for whom, and for what.
struct TimeoutInfo {
  std::string operation;         ///< "dispatch"
  std::string what = "signal";   ///< the things that were counted: "signal", "exchange"
  std::int32_t rank = 0;         ///< the one that waited
  std::int32_t peer = 0;         ///< the one it waited for
  std::uint64_t wanted = 0;      ///< the least count that would have ended the wait
  std::uint64_t seen = 0;        ///< the last count seen
  double seconds = 0;            ///< how long it waited
  std::int32_t peer_node = -1;   ///< -1: not known
  std::int32_t peer_local = -1;  ///< the peer's index inside its node
  bool in_call = false;          ///< in a collective call: ranks may be in different ones
};

/// A rank did not come before the deadline.
class Timeout : public Error {
 public:
  explicit Timeout(TimeoutInfo missed);
  [[nodiscard]] const TimeoutInfo& missed() const noexcept { return missed_; }

 private:
  TimeoutInfo missed_;
};

/// A defect of this library, never of the caller.
class InternalError : public Error {
 public:
  using Error::Error;
};

namespace detail {
[[noreturn, gnu::cold]] void throw_parts(std::initializer_list<TextPart> parts);
}

/// Throws InvalidArgument with the joined parts, as concat joins them.
template <class... Parts>
[[noreturn]] void throw_invalid(const Parts&... parts) {
  detail::throw_parts({TextPart(parts)...});
}

/// Checks a caller's argument: `require(n >= 0, "f: n = ", n, ", expected >= 0")`.
/// The text is built only on failure. Throws InvalidArgument.
template <class... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]] {
    detail::throw_parts({TextPart(parts)...});
  }
}

}  // namespace waybill
