#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "transport/bootstrap/wire.h"
#include "transport/share_memory.h"
#include "waybill/core/topology.h"
#include "waybill/core/wait.h"

namespace waybill {

/// Tells ranks that are processes of one host about each other: which rank has given up and why,
/// and whose process is gone, killed or not. Only a rank that waits pays for it.
class PeerStatus : public std::enable_shared_from_this<PeerStatus> {
 public:
  /// Collective. @throws TransportError on all ranks when shared memory cannot be had; Timeout
  explicit PeerStatus(Bootstrap& bootstrap);
  ~PeerStatus();

  /// This rank gives up; the first call counts.
  void fail(std::string_view reason) noexcept;

  /// This rank is about to end with a Timeout of its own: when it leaves then, the others do not
  /// report it as gone.
  void note_timeout() noexcept;

  /// A wait that another rank's signal ends calls it. @throws PeerFailed when a rank has given up,
  ///   or when `awaited` is gone and was so at an earlier check, after which the wait has polled
  ///   once more
  void check(std::string_view operation, Rank awaited);

  /// Returns the check for waits of a collective call, which needs all ranks: any that has been
  /// gone for a second ends it. A rank that is done may leave while the last ones still wait.
  [[nodiscard]] std::shared_ptr<const WaitScope> scope_of(std::string_view operation);

 private:
  class Scope;
  struct Block;
  using Clock = std::chrono::steady_clock;
  struct Peer {
    std::shared_ptr<Block> block;
    detail::SharedFile file;  ///< marked while its process exists
    Clock::time_point last_check{};
    std::optional<Clock::time_point> gone_since{};
  };

  void check_failed(std::string_view operation) const;
  void check_gone(std::string_view operation, std::size_t rank, std::chrono::milliseconds patience);

  detail::OwnProcess process_;
  std::size_t rank_;
  std::mutex mutex_;
  std::vector<Peer> peers_;  ///< [W]
};

/// Collective, for ranks that are processes of one host. @throws as PeerStatus
[[nodiscard]] inline std::shared_ptr<PeerStatus> make_peer_status(Bootstrap& bootstrap) {
  return std::make_shared<PeerStatus>(bootstrap);
}

}  // namespace waybill
