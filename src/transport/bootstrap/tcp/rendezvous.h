#pragma once

#include "transport/bootstrap/tcp/handshake.h"
#include "transport/bootstrap/tcp/socket.h"
#include "transport/bootstrap/wire.h"

/// Ranks connect to rank 0 (rendezvous.cpp), and then exchange frames through it (exchange.cpp). A
/// frame is a header (32 bytes), and as many bytes as it says.
namespace waybill::detail {

inline constexpr std::size_t header_bytes = 32;
using HeaderBytes = std::array<std::byte, header_bytes>;

enum class FrameKind : std::uint32_t {
  data = 1,    ///< the bytes of a rank for an exchange, or rank 0's answer: the bytes of all
  silent = 2,  ///< rank 0: `rank` did not come within the deadline
  left = 3,    ///< rank 0: `rank` closed its connection
  failed = 4,  ///< `rank` cannot go on; the bytes are the reason
};

struct FrameHeader {
  FrameKind kind = FrameKind::data;
  std::uint32_t rank = 0;
  std::uint64_t round = 0;  ///< the exchange; with the other kinds the last one that `rank` was in
  std::uint64_t size_bytes = 0;
};

[[nodiscard]] HeaderBytes encode(const FrameHeader& header);

struct Frame {
  FrameHeader header;
  Bootstrap::Bytes bytes{};
};

/// Makes a frame of rank 0's verdict on a rank.
[[nodiscard]] Frame verdict_frame(FrameKind kind, std::int32_t rank, std::uint64_t round,
                                  std::string_view reason = {});

/// Assembles a frame as its bytes come. Memory grows with the bytes that have come, whatever a
/// header promises.
class FrameReader {
 public:
  /// @param max_size_bytes a larger frame is invalid
  explicit FrameReader(std::uint64_t max_size_bytes) : max_size_bytes_(max_size_bytes) {}

  /// The next bytes go there: never empty.
  [[nodiscard]] std::span<std::byte> room();
  /// Notes that so many bytes have come into room(). False: the stream is broken.
  [[nodiscard]] bool add(std::size_t num_bytes);
  [[nodiscard]] bool is_complete() const;
  /// @pre is_complete()
  [[nodiscard]] Frame take();

 private:
  std::uint64_t max_size_bytes_;
  HeaderBytes header_bytes_{};
  std::size_t header_filled_ = 0;
  FrameHeader header_;
  Bootstrap::Bytes body_;
  std::size_t body_filled_ = 0;
};

/// Puts all entries into one run of bytes: the sizes, then the entries.
[[nodiscard]] Bootstrap::Bytes pack_entries(const std::vector<Bootstrap::Bytes>& all);
/// Nullopt unless the bytes are exactly so many entries.
[[nodiscard]] std::optional<std::vector<Bootstrap::Bytes>> unpack_entries(
    std::span<const std::byte> packed, std::size_t num_entries);

/// The connection to an accepted rank.
class TcpPeer {
 public:
  TcpPeer() : TcpPeer(Socket(), 0) {}
  TcpPeer(Socket socket, std::uint64_t max_frame_bytes)
      : socket_(std::move(socket)), reader_(max_frame_bytes) {}

  [[nodiscard]] const Socket& socket() const { return socket_; }
  [[nodiscard]] bool is_open() const { return socket_.is_open(); }

  /// Reads the bytes that have come, up to the end of one frame.
  void read();
  /// The frame that read() has completed; null: none.
  [[nodiscard]] Frame* frame() { return frame_ ? &*frame_ : nullptr; }
  [[nodiscard]] Frame take_frame();
  /// No further frame will come: the peer closed the connection, or sent an invalid frame.
  [[nodiscard]] bool is_gone() const { return gone_; }
  /// The reason that the peer sent before it closed the connection, in a frame after the one that
  /// waits; nullopt: none.
  [[nodiscard]] std::optional<std::string> last_reason();

  /// Sends as much as the socket takes of a frame of which `sent` bytes have gone. True: no more to
  /// send.
  bool write(std::span<const std::byte> header, std::span<const std::byte> body, std::size_t& sent);
  /// Sends a short frame now or never, but not within another frame.
  void write_now(const FrameHeader& header, std::span<const std::byte> body);

 private:
  Socket socket_;
  FrameReader reader_;
  std::optional<Frame> frame_;
  bool gone_ = false;
  bool within_frame_ = false;
};

/// Ranks that are connected to rank 0 send it their bytes, and it sends those of all to each.
class TcpBootstrap final : public Bootstrap {
 public:
  /// Rank 0 accepts frames of that size from a rank, and a rank from rank 0.
  [[nodiscard]] static std::uint64_t max_frame_bytes(std::int32_t rank, std::int32_t world_size);

  /// One rank needs no peers.
  TcpBootstrap(std::int32_t rank, std::int32_t world_size, double timeout_s)
      : Bootstrap(rank, world_size, timeout_s) {}

  /// @param peers rank 0: [W], by rank, its own not open; others: rank 0 alone
  void set_peers(std::vector<TcpPeer> peers) { peers_ = std::move(peers); }

  void fail(std::string_view reason) noexcept override;

  /// @throws Timeout, PeerFailed, TransportError
  [[nodiscard]] std::vector<Bytes> exchange(std::span<const std::byte> mine,
                                            std::string_view operation) override;

 private:
  [[nodiscard]] std::vector<Bytes> gather_and_answer(std::span<const std::byte> mine,
                                                     std::string_view operation);
  [[nodiscard]] std::optional<Frame> verdict_on(std::int32_t peer, bool deadline_passed);
  void send_to_all(std::span<const std::byte> bytes, const Deadline& deadline);
  [[noreturn]] void send_verdict(const Frame& verdict, const Deadline& deadline,
                                 std::string_view operation);
  [[nodiscard]] std::vector<Bytes> send_and_wait(std::span<const std::byte> mine,
                                                 std::string_view operation);
  [[noreturn]] void throw_verdict(const Frame& verdict, double seconds,
                                  std::string_view operation) const;

  std::vector<TcpPeer> peers_;
  std::uint64_t round_ = 0;
  bool has_failed_ = false;
};

/// Rank 0's part of the rendezvous: it serves all clients at once until every rank is connected.
/// Clients that have not said who they are have a deadline for their hello; they can neither
/// prolong the wait nor use up the descriptors that ranks need.
class RendezvousServer {
 public:
  /// @param job rank 0's own
  /// @throws TransportError when the process may not open enough descriptors for all ranks
  RendezvousServer(Socket listener, TcpJob job);
  ~RendezvousServer();

  /// Returns the connected ranks, [W], by rank; that of rank 0 is not open.
  /// @throws Timeout, PeerFailed: the server sends them to the connected ranks, and to those that
  ///   connect within a few seconds; TransportError when there are no descriptors
  [[nodiscard]] std::vector<TcpPeer> accept_all(const Deadline& deadline);

  /// Rank 0 cannot start: rejects all ranks for this reason as they connect, until the deadline.
  void reject_all(std::string_view why, const Deadline& deadline);

 private:
  /// A connection whose handshake is not over.
  struct Client {
    Socket socket;
    ServerHandshake handshake;
    Deadline deadline;
  };

  void serve(const Deadline& deadline);
  void read_from(Client& client);
  void accept_rank(Client& client);
  void disconnect(Client& client, std::string_view why);
  void check_rank(std::int32_t rank);
  void accept_clients();
  void free_descriptor(int error);
  void forget_closed();
  void send_verdict();
  void throw_verdict(const Deadline& deadline);

  Socket listener_;
  TcpJob job_;
  std::vector<TcpPeer> peers_;      ///< [W]
  std::vector<bool> is_connected_;  ///< [W]: the ranks that have been accepted
  std::vector<bool> is_watched_;    ///< [W]: connected, and not known to have failed or left
  std::int32_t num_ranks_ = 1;      ///< ranks that have been accepted or rejected, rank 0 included
  std::string failure_;             ///< not empty: all ranks are rejected for this reason
  std::size_t max_clients_ = 0;
  std::vector<Client> clients_;  ///< the oldest first
  std::optional<Frame> verdict_;
  std::int64_t num_disconnected_ = 0;
};

/// Connects to rank 0 until it accepts this rank. @throws Timeout, TransportError as
/// ClientHandshake
/// @param source_port the own port at the first attempt; 0: the system chooses it
[[nodiscard]] Socket connect_to_rank_0(const TcpJob& job, const Deadline& deadline,
                                       std::uint16_t source_port = 0);

/// A rank that cannot start connects and says why. @throws any error that prevents it
void report_failure(const TcpJob& job, std::string_view reason, double patience_s);

}  // namespace waybill::detail
