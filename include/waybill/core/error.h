#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "waybill/core/text_part.h"

namespace waybill {

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
  std::string what = "signal";   ///< what was counted: "signal", "exchange"
  std::int32_t rank = 0;         ///< the one that waited
  std::int32_t peer = 0;         ///< the one it waited for
  std::uint64_t wanted = 0;      ///< the least count that would have ended the wait
  std::uint64_t seen = 0;        ///< the last count seen
  double seconds = 0;            ///< how long it waited
  std::int32_t peer_node = -1;   ///< -1: not known
  std::int32_t peer_local = -1;  ///< the peer's index inside its node
  bool in_call = false;          ///< of a collective call: ranks may be in different ones
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
