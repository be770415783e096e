#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/bootstrap/tcp/exchange.h"
#include "transport/tcp_greeter.h"
#include "transport/bootstrap/tcp/socket.h"

namespace waybill::detail {

/// One line on stderr for each caller that was hung up on, until there are too many.
class RefusalLog {
 public:
  RefusalLog() = default;
  RefusalLog(const RefusalLog&) = delete;
  RefusalLog& operator=(const RefusalLog&) = delete;
  ~RefusalLog();  ///< says how many more there were
  void line(std::string_view caller, std::string_view why);

 private:
  std::int64_t count_ = 0;
};

/// Rank 0's door: serves all callers at once, until every rank is here. Callers that are not known
/// yet have a deadline for their hello and can neither prolong the wait nor take the last
/// descriptor.
class Reception {
 public:
  /// @throws TransportError when the process may not open enough descriptors for all ranks
  Reception(Socket door, std::int32_t world_size, std::string job_id, std::string secret);

  /// Returns the connected ranks, [W], by rank; that of rank 0 is not open.
  /// @throws Timeout, PeerFailed: those that have come are told, and those that come within a few
  ///   seconds; TransportError when there are no descriptors
  [[nodiscard]] std::vector<TcpPeer> admit_all(const Deadline& deadline);

  /// For a rank 0 that cannot start: tells the others why, as they come, until the deadline.
  void turn_all_away(std::string_view why, const Deadline& deadline);

 private:
  struct Caller {
    Socket socket;
    Greeter greeter;
    Deadline deadline;
  };

  void serve(const Deadline& deadline);
  void hear(Caller& caller);
  void admit(Caller& caller);
  void hang_up(Caller& caller, std::string_view why);
  void watch(std::int32_t rank);
  void take_callers();
  void make_room(int error);
  void forget_closed();
  [[nodiscard]] std::int32_t first_missing() const;
  void tell_verdict();
  void explain(const Deadline& deadline);

  Socket door_;
  Admission admission_;
  std::vector<TcpPeer> peers_;   ///< [W]
  std::vector<bool> watched_;    ///< [W]: connected, and neither gone nor turned away
  std::int32_t num_here_ = 1;    ///< ranks that have called, rank 0 included
  std::size_t max_callers_ = 0;  ///< that are not known yet
  std::vector<Caller> callers_;  ///< the oldest first
  std::optional<Frame> verdict_;
  RefusalLog log_;
};

}  // namespace waybill::detail
