#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "waybill/core/error.h"
#include "waybill/core/topology.h"
#include "waybill/core/wait.h"

namespace waybill {

/// Seconds that a wait may last unless the caller says otherwise.
inline constexpr double default_timeout_s = 60.0;

/// How ranks find each other: who am I, how many are we, and an exchange of a few KB. It is used to
/// set things up, never on the way of the data.
///
/// Collective calls come in the same order on all ranks. An object serves one thread at a time.
class Bootstrap {
 public:
  using Bytes = std::vector<std::byte>;

  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;
  virtual ~Bootstrap() = default;

  [[nodiscard]] Rank rank() const noexcept { return rank_; }
  [[nodiscard]] std::int32_t world_size() const noexcept { return world_size_; }
  [[nodiscard]] double timeout_s() const noexcept { return timeout_s_; }

  /// Collective: every rank gives some bytes (also none, also of different length) and gets those
  /// of all ranks, by rank. `operation` names the reason in errors.
  /// @throws Timeout naming a rank that did not call within timeout_s; PeerFailed naming one that
  ///   gave up; TransportError when the connection broke; Interrupted, which the others are told.
  ///   The object is unusable after an error, and says so.
  [[nodiscard]] std::vector<Bytes> all_gather(std::span<const std::byte> mine,
                                              std::string_view operation);

  /// Collective: returns when all ranks have called. @throws as all_gather
  void barrier(std::string_view operation);

  /// Says that this rank cannot go on. Ranks that wait for what it has not given, now or later,
  /// throw PeerFailed naming it and the reason at once, where the engine can tell them; an exchange
  /// to which it has given its bytes still ends well on them. Not collective, never waits. The
  /// object is unusable afterwards; a second call does nothing. Also called when an exchange
  /// throws.
  void fail(std::string_view reason) noexcept;

  /// For waits elsewhere. @throws PeerFailed (or what ended the run) when a rank is known to have
  ///   given up; an engine that hears of it only in exchanges throws nothing
  virtual void check_peers(std::string_view operation) const;

  /// Where ranks are threads of one run: what ends their waits together. Else null.
  [[nodiscard]] virtual std::shared_ptr<FailureScope> failure_scope() const;

 protected:
  /// @throws InvalidArgument unless 0 <= rank < world_size, and as check_timeout
  Bootstrap(std::int32_t rank, std::int32_t world_size, double timeout_s);

 private:
  virtual std::vector<Bytes> exchange(std::span<const std::byte> mine,
                                      std::string_view operation) = 0;

  /// Makes the reason known to the other ranks. Called at most once.
  virtual void tell_failure(std::string_view /*reason*/) noexcept {}

  /// Whether the others are told of a deadline that has passed; else each finds out by its own, and
  /// names who is silent.
  [[nodiscard]] virtual bool tells_timeouts() const noexcept { return true; }

  void end(const char* how, std::string_view reason) noexcept;

  std::string failure_;  ///< why the object is unusable; empty: it is not
  Rank rank_;
  std::int32_t world_size_;
  double timeout_s_;
};

/// all_gather of one plain value a rank. @throws TransportError when a rank sent another size
template <class Value>
[[nodiscard]] std::vector<Value> all_gather_value(Bootstrap& bootstrap, const Value& mine,
                                                  std::string_view operation) {
  static_assert(std::is_trivially_copyable_v<Value>);
  const auto all = bootstrap.all_gather(std::as_bytes(std::span(&mine, 1)), operation);
  std::vector<Value> values(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].size() != sizeof(Value)) {
      throw TransportError(concat(operation, ": rank ", r, " sent ", all[r].size(),
                                  " bytes, expected ", sizeof(Value)));
    }
    std::memcpy(&values[r], all[r].data(), sizeof(Value));
  }
  return values;
}

}  // namespace waybill
