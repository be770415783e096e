#pragma once

#include "transport/bootstrap/wire.h"

/// The handshake between a rank and rank 0, as bytes: little-endian, without padding, and without
/// sockets.
///
///   client                          rank 0
///   hello (256 bytes)          ->
///                              <-   answer (512): accepted, rejected with a reason, or prove
///   proof (64)                 ->                              (only if there is a secret)
///                              <-   answer: accepted with rank 0's own proof, or rejected
///   then frames both ways (exchange.h)
namespace waybill::detail {

/// All versions have the same first 16 bytes of hello and answer.
inline constexpr std::uint32_t protocol_version = 3;
inline constexpr std::size_t hello_bytes = 256;
inline constexpr std::size_t answer_bytes = 512;
inline constexpr std::size_t proof_bytes = 64;

using Nonce = std::array<std::byte, 32>;
using Digest = std::array<std::byte, 32>;
using HelloBytes = std::array<std::byte, hello_bytes>;
using AnswerBytes = std::array<std::byte, answer_bytes>;
using ProofBytes = std::array<std::byte, proof_bytes>;

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
  bool has_secret = false;
  std::uint32_t world_size = 0;
  std::uint32_t rank = 0;
  Nonce nonce{};
  std::string_view job{};  ///< at most max_job_id_bytes of it; after decoding, part of the bytes
};

[[nodiscard]] HelloBytes encode(const Hello& hello);

enum class AnswerKind : std::uint32_t {
  none = 0,  ///< more bytes must come first
  accepted = 1,
  prove = 2,
  rejected = 3,
  stranger = 4,  ///< the client is no rank of Waybill and gets no answer
};

/// Rank 0's answer; `none` and `stranger` are never sent.
struct Answer {
  AnswerKind kind = AnswerKind::rejected;
  Nonce nonce{};           ///< with `prove`
  Digest proof{};          ///< with `accepted`, if there is a secret
  std::string_view why{};  ///< with `rejected`, as much as fits; after decoding, part of the bytes
};

[[nodiscard]] AnswerBytes encode(const Answer& answer);
/// Nullopt: the sender is no rank 0 of Waybill.
[[nodiscard]] std::optional<Answer> decode_answer(std::span<const std::byte, answer_bytes> bytes);

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

/// A side proves that it knows the secret by a digest over both nonces and the whole hello, which
/// holds the client's. @throws as hmac_sha256
[[nodiscard]] Digest proof_of_client(std::string_view secret, const HelloBytes& hello,
                                     const Nonce& server_nonce);
[[nodiscard]] Digest proof_of_server(std::string_view secret, const HelloBytes& hello,
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

  [[nodiscard]] const AnswerBytes& answer() const { return answer_; }
  /// The rank of the accepted client.
  [[nodiscard]] std::int32_t rank() const { return rank_; }
  /// Says why the client is rejected or a stranger.
  [[nodiscard]] const std::string& why() const { return why_; }

 private:
  AnswerKind check_hello(const TcpJob& job);
  AnswerKind check_proof(std::string_view secret);
  AnswerKind accept_or_reject(const TcpJob& job, const std::vector<bool>& is_connected,
                              std::string_view failure);
  AnswerKind reject(std::string why);

  HelloBytes hello_bytes_{};
  ProofBytes proof_bytes_{};
  std::size_t filled_ = 0;
  bool awaits_proof_ = false;
  std::int32_t rank_ = 0;
  Nonce nonce_{};
  AnswerBytes answer_{};
  std::string why_;
};

/// The client's part of the handshake.
class ClientHandshake {
 public:
  /// @throws TransportError as hmac_sha256
  explicit ClientHandshake(const TcpJob& job);

  [[nodiscard]] const HelloBytes& hello() const { return hello_; }

  /// Reads rank 0's answer. Nullopt: it has accepted this rank. Else the proof to send, after which
  /// it answers again.
  /// @throws TransportError with the reason if rank 0 rejects this rank, is no rank 0 of Waybill,
  /// or
  ///   does not know the secret
  [[nodiscard]] std::optional<ProofBytes> reply_to(const AnswerBytes& answer);

 private:
  std::string secret_;
  std::string server_;
  std::int32_t rank_;
  HelloBytes hello_;
  std::optional<Nonce> nonce_;  ///< rank 0's, once it has asked
};

}  // namespace waybill::detail
