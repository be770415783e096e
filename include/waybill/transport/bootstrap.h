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

/// How ranks find each other: their numbers, and an exchange of a few KB. It is used to
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
  /// of all ranks, by rank. `operation` names the reason in errors, and ranks compare it.
  /// @throws Disagreement on all ranks when they do not name the same operation; the object stays
  ///   usable. Timeout naming a rank that did not call within timeout_s; PeerFailed naming one that
  ///   gave up; TransportError when the connection broke; Interrupted, which the others are told.
  ///   Afterwards the object is unusable, and says so.
  [[nodiscard]] std::vector<Bytes> all_gather(std::span<const std::byte> mine,
                                              std::string_view operation);

  /// Collective: returns when all ranks have called. @throws as all_gather
  void barrier(std::string_view operation);

  /// Tells the other ranks that this one gives up, and why: what they wait for here ends with
  /// PeerFailed, where the engine can tell them. The first call counts. Between processes that is
  /// what this rank has not given yet: an exchange to which it has given its bytes ends well on the
  /// others. Not collective, never waits. The object is unusable afterwards.
  virtual void fail(std::string_view reason) noexcept;

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

  Rank rank_;
  std::int32_t world_size_;
  double timeout_s_;
  std::uint64_t num_exchanges_ = 0;
  std::string end_;  ///< why the object is unusable
};

/// all_gather of one plain value per rank. @throws TransportError when a rank sent another size
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
