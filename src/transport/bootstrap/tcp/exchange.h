#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/bootstrap/tcp/handshake.h"
#include "transport/bootstrap/tcp/socket.h"

namespace waybill::detail {

/// The connection to a rank that has been let in.
class TcpPeer {
 public:
  TcpPeer() : TcpPeer(Socket(), 0) {}
  TcpPeer(Socket socket, std::uint64_t max_frame_bytes)
      : socket_(std::move(socket)), reader_(max_frame_bytes) {}

  [[nodiscard]] const Socket& socket() const { return socket_; }
  [[nodiscard]] bool is_open() const { return socket_.is_open(); }

  /// Takes what has come, up to the end of one frame.
  void read();
  /// The frame that read() has completed; null: none.
  [[nodiscard]] Frame* frame() { return frame_ ? &*frame_ : nullptr; }
  [[nodiscard]] Frame take_frame();
  /// No further frame will come: it hung up, or sent what is no frame.
  [[nodiscard]] bool is_gone() const { return gone_; }
  /// What it said before it hung up, beyond the frame that waits; nullopt: nothing.
  [[nodiscard]] std::optional<std::string> last_words();

  /// Sends on, as much as goes, of a frame of which `sent` bytes have gone. True: no more to send.
  bool write(std::span<const std::byte> header, std::span<const std::byte> body, std::size_t& sent);
  /// A few bytes, now or never. Not within a frame.
  void write_now(const FrameHeader& header, std::string_view body);

 private:
  Socket socket_;
  FrameReader reader_;
  std::optional<Frame> frame_;
  bool gone_ = false;
  bool within_frame_ = false;
};

/// The reason in a frame of kind `failed`, fit for a message.
[[nodiscard]] std::string reason_in(const Frame& frame);

/// What ranks that are connected to rank 0 do: everybody gives bytes to it and gets those of all.
class TcpExchange {
 public:
  /// Frames that rank 0 takes from a rank, and a rank from rank 0.
  [[nodiscard]] static std::uint64_t max_frame_bytes(std::int32_t rank, std::int32_t world_size);

  /// @param peers rank 0: [W], by rank, its own not open; others: rank 0 alone
  TcpExchange(std::int32_t rank, std::int32_t world_size, std::vector<TcpPeer> peers,
              double timeout_s)
      : rank_(rank), world_size_(world_size), timeout_s_(timeout_s), peers_(std::move(peers)) {}

  /// @throws Timeout, PeerFailed, TransportError
  [[nodiscard]] std::vector<Bootstrap::Bytes> run(std::span<const std::byte> mine,
                                                  std::string_view operation);

  /// To whoever is connected, without waiting.
  void tell_failure(std::string_view reason) noexcept;

 private:
  using Entries = std::vector<Bootstrap::Bytes>;

  [[nodiscard]] Entries gather_and_answer(std::span<const std::byte> mine,
                                          std::string_view operation);
  [[nodiscard]] std::optional<Frame> trouble_of(std::int32_t peer, bool deadline_passed);
  void send_to_all(std::span<const std::byte> bytes, const Deadline& deadline);
  [[noreturn]] void give_verdict(const Frame& verdict, const Deadline& deadline,
                                 std::string_view operation);
  [[nodiscard]] Entries send_and_wait(std::span<const std::byte> mine, std::string_view operation);
  [[noreturn]] void fail_with(const Frame& verdict, double seconds,
                              std::string_view operation) const;

  std::int32_t rank_;
  std::int32_t world_size_;
  double timeout_s_;
  std::vector<TcpPeer> peers_;
  std::uint64_t round_ = 0;
};

/// A verdict on a rank as a frame.
[[nodiscard]] Frame verdict_frame(FrameKind kind, std::int32_t rank, std::uint64_t round,
                                  std::string_view reason = {});

}  // namespace waybill::detail
