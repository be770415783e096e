#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "waybill/core/error.h"
#include "waybill/core/topology.h"

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
  /// @throws Timeout naming a rank that did not call within timeout_s; TransportError when the
  ///   connection broke or a rank failed. The object is unusable after an error, and says so.
  [[nodiscard]] std::vector<Bytes> all_gather(std::span<const std::byte> mine,
                                              std::string_view operation);

  /// Collective: returns when all ranks have called. @throws as all_gather
  void barrier(std::string_view operation);

  /// Says that this rank cannot go on. Ranks that wait for what it has not given, now or later,
  /// throw PeerFailed naming it and the reason at once; an exchange to which it has given its
  /// bytes still ends well on them. Not collective, never waits. The object is unusable afterwards;
  /// a second call does nothing. Also called when an exchange throws.
  void fail(std::string_view reason) noexcept;

 protected:
  /// @throws InvalidArgument unless 0 <= rank < world_size and timeout_s > 0.
  Bootstrap(std::int32_t rank, std::int32_t world_size, double timeout_s);

 private:
  virtual std::vector<Bytes> exchange(std::span<const std::byte> mine,
                                      std::string_view operation) = 0;

  /// Makes the reason known to the other ranks. Called at most once.
  virtual void tell_failure(std::string_view /*reason*/) noexcept {}

  std::string failure_;  ///< empty: none
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
