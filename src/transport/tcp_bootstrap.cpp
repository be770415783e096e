#include "tcp_bootstrap.h"

#include <utility>

#include "hmac.h"
#include "tcp_caller.h"
#include "transport/bootstrap/tcp/exchange.h"
#include "transport/bootstrap/tcp/rendezvous.h"
#include "waybill/transport/bootstraps.h"

namespace waybill {
namespace {

using detail::Deadline;
using detail::Reception;
using detail::Socket;
using detail::TcpExchange;
using detail::TcpPeer;
using detail::TcpPlace;

detail::Call call_of(std::int32_t rank, std::int32_t world_size, const TcpPlace& place) {
  return {.host = place.host,
          .port = place.port,
          .rank = rank,
          .world_size = world_size,
          .job_id = place.job.id,
          .secret = place.job.secret};
}

std::vector<TcpPeer> connect(std::int32_t rank, std::int32_t world_size, const TcpPlace& place,
                             double timeout_s) {
  if (world_size == 1) return {};
  if (!place.job.secret.empty()) {  // a rank without HMAC says so before it calls
    (void)detail::hmac_sha256(place.job.secret, {});
  }
  const Deadline deadline(timeout_s);
  if (rank == 0) {
    Reception reception(Socket::listen(place.host, place.port, deadline), world_size, place.job.id,
                        place.job.secret);
    return reception.admit_all(deadline);
  }
  std::vector<TcpPeer> root;
  root.emplace_back(detail::call_rank_0(call_of(rank, world_size, place), deadline),
                    TcpExchange::max_frame_bytes(rank, world_size));
  return root;
}

class TcpBootstrap final : public Bootstrap {
 public:
  TcpBootstrap(std::int32_t rank, std::int32_t world_size, const TcpPlace& place, double timeout_s)
      : Bootstrap(rank, world_size, timeout_s),
        exchange_(rank, world_size, connect(rank, world_size, place, timeout_s), timeout_s) {}

  void fail(std::string_view reason) noexcept override {
    if (has_failed_) return;
    has_failed_ = true;
    exchange_.tell_failure(reason);
  }

 private:
  std::vector<Bytes> exchange(std::span<const std::byte> mine,
                              std::string_view operation) override {
    if (has_failed_) {
      throw TransportError(concat(operation, ": the bootstrap is unusable: this rank gave up"));
    }
    try {
      return exchange_.run(mine, operation);
    } catch (const std::exception& error) {
      fail(error.what());
      throw;
    }
  }

  TcpExchange exchange_;
  bool has_failed_ = false;
};

void check(const TcpPlace& place, std::int32_t world_size) {
  require(!place.host.empty(), "make_tcp_bootstrap: host is empty");
  require(place.port != 0 || world_size == 1, "make_tcp_bootstrap: port = 0, expected 1..65535");
  require(place.job.id.size() <= detail::max_job_id_bytes, "make_tcp_bootstrap: job.id has ",
          place.job.id.size(), " bytes, expected at most ", detail::max_job_id_bytes);
  require(place.job.id.find('\0') == std::string::npos, "make_tcp_bootstrap: job.id has a zero");
}

}  // namespace

namespace detail {

void tell_tcp_failure(std::int32_t rank, std::int32_t world_size, const TcpPlace& place,
                      std::string_view reason, double patience_s) {
  if (rank != 0)
    return make_tcp_bootstrap(rank, world_size, place.host, place.port, patience_s, place.job)
        ->fail(reason);
  const Deadline deadline(patience_s);
  Reception reception(Socket::listen(place.host, place.port, deadline), world_size, place.job.id,
                      place.job.secret);
  reception.turn_all_away(concat("rank 0 failed: ", reason), deadline);
}

}  // namespace detail

std::unique_ptr<Bootstrap> make_tcp_bootstrap(std::int32_t rank, std::int32_t world_size,
                                              const std::string& host, std::uint16_t port,
                                              double timeout_s, const JobIdentity& job) {
  const TcpPlace place{host, port, job};
  check(place, world_size);
  return std::make_unique<TcpBootstrap>(rank, world_size, place, timeout_s);
}

}  // namespace waybill
