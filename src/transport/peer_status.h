#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "waybill/core/topology.h"
#include "waybill/core/wait.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {

/// What a rank says of itself, in memory that all ranks of a host have mapped. Zeros: it runs.
struct PeerStatusBlock {
  enum State : std::uint32_t { runs, timed_out, failed, left };
  std::atomic<std::uint32_t> state;
  std::int32_t process;  ///< of the rank; 0: nobody can tell whether it is there
  char reason[504];      ///< of `failed`; written before the state
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

/// What ranks that are processes of one host know of each other: who has given up and why, and
/// whose process is gone, killed or not. Costs nothing but where somebody waits.
class PeerStatus : public std::enable_shared_from_this<PeerStatus> {
 public:
  /// Whether a rank's process is there.
  using IsThere = std::function<bool(std::int32_t rank)>;

  /// @param blocks [W], mapped; the own one is written
  /// @param is_there asked about other ranks with a process number
  PeerStatus(Rank rank, std::vector<std::shared_ptr<void>> blocks, IsThere is_there);
  PeerStatus(const PeerStatus&) = delete;
  PeerStatus& operator=(const PeerStatus&) = delete;
  ~PeerStatus();

  /// Says that this rank gives up; the first call counts.
  void fail(std::string_view reason) noexcept;

  /// Says that this rank is about to end with a Timeout of its own: when it leaves then, it is not
  /// one of those that are gone.
  void note_timeout() noexcept;

  /// For a wait that another rank's signal ends. @throws PeerFailed when a rank has given up, or
  ///   when `awaited` is gone and was so at an earlier look, after which the wait has looked for
  ///   the signal once more
  void check(std::string_view operation, Rank awaited);

  /// The same for waits of a collective call, in which all ranks are needed: any that has been gone
  /// for a second ends it. A rank that has what it came for may leave while the last ones are told.
  [[nodiscard]] std::shared_ptr<const WaitScope> scope_of(std::string_view operation);

 private:
  class Scope;
  using Clock = std::chrono::steady_clock;
  struct Look {
    Clock::time_point last{};
    Clock::time_point gone_since{};
    bool gone = false;
  };

  [[nodiscard]] PeerStatusBlock& block(std::size_t rank) const;
  void check_failed(std::string_view operation) const;
  void check_gone(std::string_view operation, std::size_t rank, std::chrono::milliseconds patience);

  std::size_t rank_;
  std::vector<std::shared_ptr<void>> blocks_;
  IsThere is_there_;
  std::mutex mutex_;
  std::vector<Look> looks_;  ///< [W]
};

/// Collective, for ranks that are processes of one host. @throws TransportError on all ranks when
///   shared memory cannot be had; Timeout
[[nodiscard]] std::shared_ptr<PeerStatus> make_peer_status(Bootstrap& bootstrap);

}  // namespace waybill
