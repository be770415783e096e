#pragma once

#include <array>

#include "transport/bootstrap/wire.h"

/// The handshake between a rank and rank 0, without sockets.
///
///   client                          rank 0
///   Hello                      ->
///                              <-   Answer: accepted, rejected with a reason, or prove
///   Proof                      ->                              (only if there is a secret)
///                              <-   Answer: accepted with rank 0's own proof, or rejected
///   then frames both ways (rendezvous.h)
namespace waybill::detail {

/// All versions have the same first 16 bytes of hello and answer.
inline constexpr std::uint32_t protocol_version = 3;

using Magic = std::array<char, 8>;
using Nonce = std::array<std::byte, 32>;
using Digest = std::array<std::byte, 32>;

/// A rank and the job that it belongs to.
struct TcpJob {
  std::int32_t rank = 0;
  std::int32_t world_size = 0;
  std::string host;  ///< rank 0 listens there
  std::uint16_t port = 0;
  JobIdentity job;
};

/// The client's first message.
struct Hello {
  static constexpr Magic right_magic{'w', 'a', 'y', 'b', 'i', 'l', 'l', '?'};

  Magic magic = right_magic;
  std::uint32_t version = protocol_version;
  std::uint32_t has_secret = 0;  ///< 1: it has one
  std::uint32_t world_size = 0;
  std::uint32_t rank = 0;
  Nonce nonce{};
  char job[200] = {};  ///< ends with a zero
};
static_assert(sizeof(Hello) == 256);

enum class AnswerKind : std::uint32_t {
  none = 0,  ///< more bytes must come first
  accepted = 1,
  prove = 2,
  rejected = 3,
  stranger = 4,  ///< the client is no rank of Waybill and gets no answer
};

/// Rank 0's answer; `none` and `stranger` are never sent.
struct Answer {
  static constexpr Magic right_magic{'w', 'a', 'y', 'b', 'i', 'l', 'l', '!'};

  Magic magic = right_magic;
  std::uint32_t version = protocol_version;
  AnswerKind kind = AnswerKind::rejected;
  Nonce nonce{};       ///< with `prove`
  Digest proof{};      ///< with `accepted`, if there is a secret
  char why[432] = {};  ///< with `rejected`: as much as fits, and a zero

  /// False: the sender is no rank 0 of Waybill.
  [[nodiscard]] bool is_valid() const;
};
static_assert(sizeof(Answer) == 512);

/// The client's second message.
struct Proof {
  static constexpr Magic right_magic{'w', 'a', 'y', 'b', 'i', 'l', 'l', '='};

  Magic magic = right_magic;
  Digest digest{};
  std::array<std::byte, 24> zeros{};
};
static_assert(sizeof(Proof) == 64);

/// Computes HMAC-SHA256 with OpenSSL's libcrypto, loaded at run time, or with the kernel (AF_ALG).
/// @throws TransportError when neither is there
[[nodiscard]] Digest hmac_sha256(std::string_view key, std::span<const std::byte> message);
/// Nullopt: this source is not there.
[[nodiscard]] std::optional<Digest> hmac_of_libcrypto(std::string_view key,
                                                      std::span<const std::byte> message);
[[nodiscard]] std::optional<Digest> hmac_of_kernel(std::string_view key,
                                                   std::span<const std::byte> message);

/// Takes the same time wherever they differ.
[[nodiscard]] bool same_digest(const Digest& a, const Digest& b) noexcept;

[[nodiscard]] Nonce random_nonce();

/// The sides of a proof: all have one size, so no two messages are alike.
inline constexpr std::string_view client_side = "waybill rendezvous: the caller..";
inline constexpr std::string_view server_side = "waybill rendezvous: rank zero...";

/// A side proves that it knows the secret by a digest over both nonces and the whole hello, which
/// holds the client's. @throws as hmac_sha256
[[nodiscard]] Digest proof_of(std::string_view side, std::string_view secret, const Hello& hello,
                              const Nonce& server_nonce);

/// Rank 0's part of the handshake with one client. It has a fixed size whatever comes: a stranger
/// makes rank 0 allocate nothing.
class ServerHandshake {
 public:
  /// The next bytes go there: never empty until the client is accepted, rejected or a stranger.
  [[nodiscard]] std::span<std::byte> room();

  /// Notes that so many bytes have come into room(). @return the answer to send now
  /// @param job rank 0's own
  /// @param is_connected [W]: the ranks that are connected
  /// @param failure not empty: all clients are rejected for this reason
  /// @throws TransportError when there is a secret but no HMAC
  [[nodiscard]] AnswerKind add(std::size_t num_bytes, const TcpJob& job,
                               const std::vector<bool>& is_connected, std::string_view failure);

  [[nodiscard]] const Answer& answer() const { return answer_; }
  /// The rank of the accepted client.
  [[nodiscard]] std::int32_t rank() const { return static_cast<std::int32_t>(hello_.rank); }
  /// Says why the client is rejected or a stranger.
  [[nodiscard]] const std::string& why() const { return why_; }

 private:
  AnswerKind check_hello(std::string_view secret);
  AnswerKind check_proof(std::string_view secret);
  AnswerKind accept_or_reject(const TcpJob& job, const std::vector<bool>& is_connected,
                              std::string_view failure);
  AnswerKind reject(std::string why);

  Hello hello_;
  Proof proof_;
  std::size_t filled_ = 0;
  bool awaits_proof_ = false;
  Answer answer_;
  std::string why_;
};

/// The hello of a rank.
[[nodiscard]] Hello hello_of(const TcpJob& job);

/// Reads rank 0's answer to a hello. Nullopt: it has accepted this rank. Else the proof to send,
/// after which it answers again.
/// @param nonce rank 0's, once it has asked
/// @throws TransportError with the reason if rank 0 rejects this rank, is no rank 0 of Waybill, or
///   does not know the secret
[[nodiscard]] std::optional<Proof> reply_to(const Answer& answer, const TcpJob& job,
                                            const Hello& hello, std::optional<Nonce>& nonce);

}  // namespace waybill::detail
