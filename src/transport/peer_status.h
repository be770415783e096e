#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/share_memory.h"
#include "waybill/core/topology.h"
#include "waybill/core/wait.h"

namespace waybill {

/// The status of a rank, in memory that all ranks of a host have mapped. Zeros: it runs.
struct PeerStatusBlock {
  static constexpr std::uint32_t runs = 0, timed_out = 1, failed = 2, left = 3;
  std::atomic<std::uint32_t> state;
  std::int32_t process;  ///< the rank's; 0: nobody can check whether it exists
  char reason[504];      ///< with `failed`; written before the state
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

/// Tells ranks that are processes of one host about each other: which rank has given up and why,
/// and whose process is gone, killed or not. Only a rank that waits pays for it.
class PeerStatus : public std::enable_shared_from_this<PeerStatus> {
 public:
  /// @param blocks [W], mapped
  /// @param files [W]: a rank's file is marked while its process exists
  PeerStatus(Rank rank, std::vector<std::shared_ptr<void>> blocks,
             std::vector<detail::SharedFile> files);
  ~PeerStatus();

  /// This rank gives up; the first call counts.
  void fail(std::string_view reason) noexcept;

  /// This rank is about to end with a Timeout of its own: when it leaves then, the others do not
  /// report it as gone.
  void note_timeout() noexcept;

  /// A wait that another rank's signal ends calls it. @throws PeerFailed when a rank has given up,
  /// or
  ///   when `awaited` is gone and was so at an earlier check, after which the wait has polled once
  ///   more
  void check(std::string_view operation, Rank awaited);

  /// Returns the check for waits of a collective call, which needs all ranks: any that has been
  /// gone for a second ends it. A rank that is done may leave while the last ones still wait.
  [[nodiscard]] std::shared_ptr<const WaitScope> scope_of(std::string_view operation);

 private:
  class Scope;
  using Clock = std::chrono::steady_clock;
  struct PeerCheck {
    Clock::time_point last{};
    Clock::time_point gone_since{};
    bool gone = false;
  };

  [[nodiscard]] PeerStatusBlock& block(std::size_t rank) const;
  void check_failed(std::string_view operation) const;
  void check_gone(std::string_view operation, std::size_t rank, std::chrono::milliseconds patience);

  std::size_t rank_;
  std::vector<std::shared_ptr<void>> blocks_;
  std::vector<detail::SharedFile> files_;
  std::mutex mutex_;
  std::vector<PeerCheck> checks_;  ///< [W]
};

/// Collective, for ranks that are processes of one host. @throws TransportError on all ranks when
///   shared memory cannot be had; Timeout
[[nodiscard]] std::shared_ptr<PeerStatus> make_peer_status(Bootstrap& bootstrap);

}  // namespace waybill
