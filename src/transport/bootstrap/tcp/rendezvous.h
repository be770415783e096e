#pragma once

#include "transport/bootstrap/tcp/handshake.h"
#include "transport/bootstrap/tcp/socket.h"
#include "transport/bootstrap/wire.h"

/// Ranks connect to rank 0 (rendezvous.cpp), and then exchange frames through it (exchange.cpp). A
/// frame is a header, and as many bytes as it says.
namespace waybill::detail {

enum class FrameKind : std::uint32_t {
  data = 1,    ///< the bytes of a rank for an exchange, or rank 0's answer: the bytes of all
  silent = 2,  ///< rank 0: `rank` did not come within the deadline
  left = 3,    ///< rank 0: `rank` closed its connection
  failed = 4,  ///< `rank` cannot go on; the bytes are the reason
};

struct FrameHeader {
  static constexpr std::uint32_t right_magic = 0x7761'7962;

  std::uint32_t magic = right_magic;
  FrameKind kind = FrameKind::data;
  std::uint32_t rank = 0;
  std::uint32_t zero = 0;
  std::uint64_t round = 0;  ///< the exchange; with the other kinds the last one that `rank` was in
  std::uint64_t size_bytes = 0;
};
static_assert(sizeof(FrameHeader) == 32);

struct Frame {
  FrameHeader header;
  Bootstrap::Bytes bytes{};
};

/// Makes a frame of rank 0's verdict on a rank.
[[nodiscard]] Frame verdict_frame(FrameKind kind, std::int32_t rank, std::uint64_t round,
                                  std::string_view reason = {});

/// Puts all entries into one run of bytes: the sizes, then the entries.
[[nodiscard]] Bootstrap::Bytes pack_entries(const std::vector<Bootstrap::Bytes>& all);
/// Nullopt unless the bytes are exactly so many entries.
[[nodiscard]] std::optional<std::vector<Bootstrap::Bytes>> unpack_entries(
    std::span<const std::byte> packed, std::size_t num_entries);

/// The connection to an accepted rank.
class TcpPeer {
 public:
  TcpPeer() : TcpPeer(Socket(), 0) {}
  /// @param max_frame_bytes a larger frame is invalid
  TcpPeer(Socket socket, std::uint64_t max_frame_bytes)
      : socket_(std::move(socket)), max_frame_bytes_(max_frame_bytes) {}

  [[nodiscard]] const Socket& socket() const { return socket_; }

  /// Reads the bytes that have come, up to the end of one frame. Memory grows with them, whatever a
  /// header promises.
  void read();
  /// The frame that read() has completed; null: none.
  [[nodiscard]] Frame* frame() { return frame_ ? &*frame_ : nullptr; }
  [[nodiscard]] Frame take_frame() { return *std::exchange(frame_, std::nullopt); }
  /// No further frame will come: the peer closed the connection, or sent an invalid frame.
  [[nodiscard]] bool is_gone() const { return gone_; }
  /// The reason that the peer sent before it closed the connection, in a frame after the one that
  /// waits; nullopt: none.
  [[nodiscard]] std::optional<std::string> last_reason();

  /// Sends as much as the socket takes of a frame of which `sent` bytes have gone. True: no more to
  /// send.
  bool write(std::span<const std::byte> frame, std::size_t& sent);
  /// Sends a short frame now or never, but not within another frame.
  void write_now(const Frame& frame);

 private:
  [[nodiscard]] std::span<std::byte> room();

  Socket socket_;
  std::uint64_t max_frame_bytes_;
  Frame next_;              ///< as far as it has come
  std::size_t filled_ = 0;  ///< bytes of it, with those of its header
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
  void send_to_all(std::span<const std::byte> frame);
  [[nodiscard]] std::vector<Bytes> send_and_wait(std::span<const std::byte> mine,
                                                 std::string_view operation);
  [[noreturn]] void throw_verdict(const Frame& verdict, double seconds,
                                  std::string_view operation) const;

  std::vector<TcpPeer> peers_;
  OwnProcess process_;
  std::uint64_t round_ = 0;
  bool has_failed_ = false;
};

/// Collective: connects the ranks of a job. @return the peers of this rank, as set_peers() takes
/// them
/// @param source_port a client's own port at its first attempt; 0: the system chooses it
/// @throws Timeout, PeerFailed, TransportError
[[nodiscard]] std::vector<TcpPeer> connect(const TcpJob& job, double timeout_s,
                                           std::uint16_t source_port = 0);

/// A rank that cannot start connects and says why. @throws any error that prevents it
void report_failure(const TcpJob& job, std::string_view reason, double patience_s);

}  // namespace waybill::detail
