#include "transport/bootstrap/tcp/rendezvous.h"

#include <dirent.h>
#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>

#include "core/printable.h"

namespace waybill::detail {
namespace {

constexpr double hello_patience_s = 5.0;
constexpr double reject_patience_s = 5.0;   // late ranks still learn why there is no job
constexpr double answer_patience_s = 10.0;  // then a client connects again
constexpr double min_pause_s = 0.01;
constexpr double max_pause_s = 0.1;
constexpr std::int64_t max_clients = 1024;
constexpr std::size_t max_accepts_at_once = 64;
constexpr std::int64_t max_log_lines = 20;

std::int64_t num_open_descriptors() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), closedir);
  if (folder == nullptr) return 64;                  // no /proc: more than most programs have
  std::int64_t count = -3;                           // ".", ".." and the folder itself
  while (readdir(folder.get()) != nullptr) ++count;  // NOLINT(concurrency-mt-unsafe): its own DIR
  return count;
}

std::int64_t descriptor_limit() {
  rlimit limit{};
  constexpr std::int64_t plenty = 1 << 20;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return plenty;
  return static_cast<std::int64_t>(std::min<rlim_t>(limit.rlim_cur, plenty));
}

/// Clients may use half of the descriptors that the ranks leave.
std::size_t max_clients_of(std::int32_t world_size) {
  const std::int64_t limit = descriptor_limit();
  const std::int64_t open = num_open_descriptors();
  const std::int64_t left = limit - open - (world_size - 1);
  if (left < 1) {
    throw TransportError(concat("tcp bootstrap: rank 0 of ", world_size, " needs ", world_size,
                                " descriptors, but ", open, " of ", limit,
                                " are open, expected a higher limit (ulimit -n)"));
  }
  return static_cast<std::size_t>(std::clamp<std::int64_t>(left / 2, 1, max_clients));
}

/// Fills the bytes; false: the server closed the connection, or the deadline has passed.
bool receive_all(const Socket& from, std::span<std::byte> bytes, const Deadline& deadline) {
  while (!bytes.empty()) {
    const std::ptrdiff_t received = from.receive_some(bytes);
    if (received < 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(received));
    if (received > 0) continue;
    if (deadline.passed()) return false;
    pollfd watched = watch(from, POLLIN);
    wait_for_any({&watched, 1}, deadline);
  }
  return true;
}

/// True: rank 0 has accepted this rank. False: nobody answered, or the connection ended early.
bool shake_hands(const Socket& socket, const TcpJob& job, const Deadline& deadline) {
  const Deadline patience(std::min(answer_patience_s, deadline.left_s()));
  const Hello hello = hello_of(job);
  if (!socket.send_now(bytes_in(hello))) return false;
  std::optional<Nonce> nonce;
  Answer answer;
  while (receive_all(socket, room_in(answer, 0), patience)) {
    const auto proof = reply_to(answer, job, hello, nonce);
    if (!proof) return true;
    if (!socket.send_now(bytes_in(*proof))) return false;
  }
  return false;
}

/// Rank 0's part of the rendezvous: it serves all clients at once until every rank is connected.
/// Clients that have not said who they are have a deadline for their hello; they can neither
/// prolong the wait nor use up the descriptors that ranks need.
class RendezvousServer {
 public:
  /// @param job rank 0's own
  /// @throws TransportError when nobody can listen there, or the process may not open enough
  ///   descriptors for all ranks
  RendezvousServer(const TcpJob& job, const Deadline& deadline)
      : listener_(Socket::listen(job.host, job.port, deadline)),
        job_(job),
        peers_(job.world_size),
        is_connected_(job.world_size, false),
        is_watched_(job.world_size, false),
        max_clients_(max_clients_of(job.world_size)) {
    clients_.reserve(max_clients_ + 1);
  }
  RendezvousServer(const RendezvousServer&) = delete;
  RendezvousServer& operator=(const RendezvousServer&) = delete;

  ~RendezvousServer() {
    if (num_disconnected_ <= max_log_lines) return;
    (void)std::fputs(
        concat("waybill: rank 0 hung up on ", num_disconnected_ - max_log_lines, " more callers\n")
            .c_str(),
        stderr);
  }

  /// Returns the connected ranks, [W], by rank; that of rank 0 is not open.
  /// @throws Timeout, PeerFailed: the server sends them to the connected ranks, and to those that
  ///   connect within a few seconds; TransportError when there are no descriptors
  [[nodiscard]] std::vector<TcpPeer> accept_all(const Deadline& deadline) {
    while (num_ranks_ < job_.world_size && !verdict_) {
      if (deadline.passed()) {
        const auto missing = std::find(is_connected_.begin() + 1, is_connected_.end(), false);
        const auto rank = static_cast<std::int32_t>(missing - is_connected_.begin());
        verdict_ = verdict_frame(FrameKind::silent, rank, 0);
        break;
      }
      try {
        serve(deadline);
      } catch (const std::exception& error) {
        verdict_ = verdict_frame(FrameKind::failed, 0, 0, error.what());
        send_verdict();
        throw;
      }
    }
    if (verdict_) throw_verdict(deadline);
    forget_closed();
    for (Client& client : clients_) disconnect(client, "all ranks are here");
    return std::move(peers_);
  }

  /// Rank 0 cannot start: rejects all ranks for this reason as they connect, until the deadline.
  void reject_all(std::string_view why, const Deadline& deadline) {
    failure_ = why;
    while (num_ranks_ < job_.world_size && !deadline.passed()) serve(deadline);
  }

 private:
  /// A connection whose handshake is not over.
  struct Client {
    Socket socket;
    ServerHandshake handshake;
    Deadline deadline;
  };

  /// Ranks that come late would find nobody and wait until their own deadline.
  [[noreturn]] void throw_verdict(const Deadline& deadline) {
    const auto peer = static_cast<std::int32_t>(verdict_->header.rank);
    const double waited = deadline.waited_s();
    send_verdict();
    if (verdict_->header.kind == FrameKind::silent) {
      throw_timeout("tcp bootstrap: connect", 0, peer, 1, 0, waited);
    }
    const std::string reason = peer_text(text_of(verdict_->bytes));
    const std::string what = reason.empty() ? concat("rank ", peer, " left")
                                            : concat("rank ", peer, " failed: ", reason);
    reject_all(what, Deadline(std::min(reject_patience_s, deadline.left_s())));
    throw PeerFailed("tcp bootstrap: connect: " + what);
  }

  /// Serves every client and rank once. It reads from clients before it accepts new ones, which may
  /// disconnect the oldest.
  void serve(const Deadline& deadline) {
    std::vector<pollfd> watched;
    for (const Client& client : clients_) {
      watched.push_back(watch(client.socket, POLLIN));
    }
    std::vector<std::int32_t> ranks;
    for (std::int32_t r = 1; r < job_.world_size; ++r) {
      if (!is_watched_[r]) continue;
      const bool has_frame = peers_[r].frame() != nullptr;
      watched.push_back(watch(peers_[r].socket(), has_frame ? 0 : POLLIN));
      ranks.push_back(r);
    }
    watched.push_back(watch(listener_, POLLIN));
    wait_for_any(watched, deadline);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (watched[clients_.size() + i].revents != 0) check_rank(ranks[i]);
    }
    for (std::size_t i = 0; i < clients_.size(); ++i) {
      Client& client = clients_[i];
      if (watched[i].revents != 0) read_from(client);
      if (client.socket.is_open() && client.deadline.passed()) {
        disconnect(client, "it has not said who it is");
      }
    }
    forget_closed();
    if (watched.back().revents != 0) accept_clients();
  }

  void read_from(Client& client) {
    while (client.socket.is_open()) {
      const std::ptrdiff_t received = client.socket.receive_some(client.handshake.room());
      if (received == 0) return;
      if (received < 0) return disconnect(client, "it hung up itself");
      switch (
          client.handshake.add(static_cast<std::size_t>(received), job_, is_connected_, failure_)) {
        case AnswerKind::none:
          break;
        case AnswerKind::prove:
          if (!client.socket.send_now(bytes_in(client.handshake.answer()))) {
            return disconnect(client, "it does not accept the answer");
          }
          break;
        case AnswerKind::accepted:
          return accept_rank(client);
        case AnswerKind::rejected:
          if (client.handshake.why() == failure_) ++num_ranks_;
          (void)client.socket.send_now(bytes_in(client.handshake.answer()));
          return disconnect(client, client.handshake.why());
        case AnswerKind::stranger:
          return disconnect(client, client.handshake.why());
      }
    }
  }

  void accept_rank(Client& client) {
    if (!client.socket.send_now(bytes_in(client.handshake.answer()))) {
      return disconnect(client, "it does not accept the answer");
    }
    const std::int32_t r = client.handshake.rank();
    peers_[r] = TcpPeer(std::exchange(client.socket, Socket()),
                        TcpBootstrap::max_frame_bytes(0, job_.world_size));
    is_connected_[r] = true;
    is_watched_[r] = true;
    ++num_ranks_;
  }

  void disconnect(Client& client, std::string_view why) {
    if (++num_disconnected_ <= max_log_lines) {
      (void)std::fputs(
          concat("waybill: rank 0 hung up on ", client.socket.peer_name(), ": ", why, "\n").c_str(),
          stderr);
    }
    client.socket.close();
  }

  /// A connected rank may have begun its first exchange, failed or died.
  void check_rank(std::int32_t rank) {
    TcpPeer& peer = peers_[rank];
    const bool had_frame = peer.frame() != nullptr;
    peer.read();
    const Frame* const frame = peer.frame();
    std::optional<std::string> reason;
    if (frame != nullptr && frame->header.kind == FrameKind::failed) {
      reason = peer_text(text_of(frame->bytes));
    } else if (had_frame) {  // the news is that it closed the connection
      reason = peer.last_reason().value_or("");
    } else if (peer.is_gone()) {
      reason = "";
    }
    if (!reason) return;
    is_watched_[rank] = false;
    if (!verdict_) {
      verdict_ =
          verdict_frame(reason->empty() ? FrameKind::left : FrameKind::failed, rank, 0, *reason);
    }
  }

  void accept_clients() {
    for (std::size_t i = 0; i < std::min(max_accepts_at_once, max_clients_ / 2 + 1); ++i) {
      int error = 0;
      Socket socket = listener_.accept(error);
      if (error != 0) return free_descriptor(error);
      if (!socket.is_open()) return;
      if (clients_.size() >= max_clients_) {
        disconnect(clients_.front(), "too many callers that have not said who they are");
        forget_closed();
      }
      clients_.push_back({std::move(socket), {}, Deadline(hello_patience_s)});
      read_from(clients_.back());  // a rank sends its hello at once
    }
    forget_closed();
  }

  /// The next client waits in the queue of the system until there is a descriptor for it.
  void free_descriptor(int error) {
    if (clients_.empty()) {
      throw TransportError(concat("tcp bootstrap: rank 0 cannot take a caller: ", errno_text(error),
                                  ", ", num_open_descriptors(), " of ", descriptor_limit(),
                                  " descriptors are open (ulimit -n)"));
    }
    disconnect(clients_.front(), "rank 0 has no descriptor left");
    forget_closed();
  }

  void forget_closed() {
    std::erase_if(clients_, [](const Client& client) { return !client.socket.is_open(); });
  }

  void send_verdict() {
    for (TcpPeer& peer : peers_) peer.write_now(*verdict_);
  }

  Socket listener_;
  const TcpJob& job_;
  std::vector<TcpPeer> peers_;      ///< [W]
  std::vector<bool> is_connected_;  ///< [W]: the ranks that have been accepted
  std::vector<bool> is_watched_;    ///< [W]: connected, and not known to have failed or left
  std::int32_t num_ranks_ = 1;      ///< ranks that have been accepted or rejected, rank 0 included
  std::string failure_;             ///< not empty: all ranks are rejected for this reason
  std::size_t max_clients_;
  std::vector<Client> clients_;  ///< the oldest first
  std::optional<Frame> verdict_;
  std::int64_t num_disconnected_ = 0;
};

Socket connect_to_rank_0(const TcpJob& job, const Deadline& deadline, std::uint16_t source_port) {
  double pause_s = min_pause_s;
  for (;;) {
    auto socket =
        Socket::connect(job.host, job.port, deadline, std::exchange(source_port, std::uint16_t{0}));
    if (socket && socket->is_connected_to_itself()) {
      socket->abort();
    } else if (socket && shake_hands(*socket, job, deadline)) {
      return std::move(*socket);
    }
    socket.reset();
    if (deadline.passed()) {
      throw_timeout("tcp bootstrap: connect", job.rank, 0, 1, 0, deadline.waited_s());
    }
    pause_for(pause_s, deadline);
    pause_s = std::min(max_pause_s, pause_s * 1.5);
  }
}

}  // namespace

std::vector<TcpPeer> connect(const TcpJob& job, double timeout_s, std::uint16_t source_port) {
  if (job.world_size == 1) return {};
  if (!job.job.secret.empty()) {  // a rank without HMAC fails before it connects
    (void)hmac_sha256(job.job.secret, {});
  }
  const Deadline deadline(timeout_s);
  if (job.rank == 0) return RendezvousServer(job, deadline).accept_all(deadline);
  std::vector<TcpPeer> root;
  root.emplace_back(connect_to_rank_0(job, deadline, source_port),
                    TcpBootstrap::max_frame_bytes(job.rank, job.world_size));
  return root;
}

void report_failure(const TcpJob& job, std::string_view reason, double patience_s) {
  if (job.rank != 0) {
    return make_tcp_bootstrap(job.rank, job.world_size, job.host, job.port, patience_s, job.job)
        ->fail(reason);
  }
  const Deadline deadline(patience_s);
  RendezvousServer(job, deadline).reject_all(concat("rank 0 failed: ", reason), deadline);
}

}  // namespace waybill::detail

namespace waybill {

std::unique_ptr<Bootstrap> make_tcp_bootstrap(std::int32_t rank, std::int32_t world_size,
                                              const std::string& host, std::uint16_t port,
                                              double timeout_s, const JobIdentity& job) {
  require(!host.empty(), "make_tcp_bootstrap: host is empty");
  require(port != 0 || world_size == 1, "make_tcp_bootstrap: port = 0, expected 1..65535");
  require(job.id.size() <= detail::max_job_id_bytes, "make_tcp_bootstrap: job.id has ",
          job.id.size(), " bytes, expected at most ", detail::max_job_id_bytes);
  require(job.id.find('\0') == std::string::npos, "make_tcp_bootstrap: job.id has a zero");
  auto bootstrap = std::make_unique<detail::TcpBootstrap>(rank, world_size, timeout_s);
  bootstrap->set_peers(detail::connect({rank, world_size, host, port, job}, timeout_s));
  return bootstrap;
}

}  // namespace waybill
