#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "waybill/transport/bootstrap.h"

/// What ranks send each other over TCP, as bytes: little-endian, without padding. Nothing here
/// knows sockets.
///
///   caller                          rank 0
///   hello (256 bytes)          ->
///                              <-   answer (512): accepted, or refused with a reason, or prove
///   proof (64)                 ->                              (only where there is a secret)
///                              <-   answer: accepted with rank 0's own proof, or refused
///   then frames both ways: a header (32), and as many bytes as it says
namespace waybill::detail {

/// Of the handshake. The first 16 bytes of hello and answer are the same in all versions.
inline constexpr std::uint32_t protocol_version = 3;
inline constexpr std::size_t hello_bytes = 256;
inline constexpr std::size_t answer_bytes = 512;
inline constexpr std::size_t proof_bytes = 64;
inline constexpr std::size_t header_bytes = 32;

inline constexpr std::size_t max_job_id_bytes = 120;
/// What a rank may give to one exchange.
inline constexpr std::size_t max_entry_bytes = std::size_t{64} << 20;

using Nonce = std::array<std::byte, 32>;
using Digest = std::array<std::byte, 32>;
using HelloBytes = std::array<std::byte, hello_bytes>;
using AnswerBytes = std::array<std::byte, answer_bytes>;
using ProofBytes = std::array<std::byte, proof_bytes>;
using HeaderBytes = std::array<std::byte, header_bytes>;

/// A text in a field of fixed size: nothing is allocated for who sent it.
class JobField {
 public:
  JobField() = default;
  /// At most max_job_id_bytes of it.
  explicit JobField(std::string_view text);
  [[nodiscard]] std::string_view text() const { return {bytes_.data(), size_}; }

 private:
  std::array<char, max_job_id_bytes> bytes_{};
  std::size_t size_ = 0;
};

/// Who calls.
struct Hello {
  bool has_secret = false;
  std::uint32_t world_size = 0;
  std::uint32_t rank = 0;
  Nonce nonce{};
  JobField job{};
};

/// What the first bytes of a caller are, as soon as that can be said.
enum class Greeting : std::uint8_t { incomplete, stranger, other_version, hello };

[[nodiscard]] Greeting judge_greeting(std::span<const std::byte> first_bytes);
[[nodiscard]] std::uint32_t version_in(std::span<const std::byte, 16> first_bytes);
[[nodiscard]] HelloBytes encode(const Hello& hello);
[[nodiscard]] Hello decode_hello(std::span<const std::byte, hello_bytes> bytes);

enum class AnswerKind : std::uint32_t { accepted = 1, prove = 2, refused = 3 };

/// What rank 0 says to a caller.
struct Answer {
  AnswerKind kind = AnswerKind::refused;
  Nonce nonce{};   ///< with `prove`
  Digest proof{};  ///< with `accepted`, where there is a secret
  std::string_view why =
      {};  ///< with `refused`: as much as fits; after decoding a part of the bytes
};

[[nodiscard]] AnswerBytes encode(const Answer& answer);
/// Nullopt: who sent it is no rank 0 of Waybill.
[[nodiscard]] std::optional<Answer> decode_answer(std::span<const std::byte, answer_bytes> bytes);

[[nodiscard]] ProofBytes encode_proof(const Digest& proof);
[[nodiscard]] std::optional<Digest> decode_proof(std::span<const std::byte, proof_bytes> bytes);

enum class FrameKind : std::uint32_t {
  data = 1,    ///< what a rank gives to an exchange, or rank 0's answer: what all gave
  silent = 2,  ///< rank 0: `rank` did not come within the deadline
  left = 3,    ///< rank 0: `rank` hung up
  failed = 4,  ///< `rank` cannot go on; the bytes are the reason
};

struct FrameHeader {
  FrameKind kind = FrameKind::data;
  std::uint32_t rank = 0;
  std::uint64_t round = 0;  ///< the exchange; with the other kinds the last one that `rank` was in
  std::uint64_t size_bytes = 0;
};

[[nodiscard]] HeaderBytes encode(const FrameHeader& header);
/// Nullopt: these are not the bytes of a header.
[[nodiscard]] std::optional<FrameHeader> decode_header(std::span<const std::byte> bytes);

struct Frame {
  FrameHeader header;
  Bootstrap::Bytes bytes{};
};

/// Takes a frame as its bytes come. Memory grows with what has come, whatever a header promises.
class FrameReader {
 public:
  /// @param max_size_bytes of a frame; more is not a frame
  explicit FrameReader(std::uint64_t max_size_bytes) : max_size_bytes_(max_size_bytes) {}

  /// Where the next bytes go: never empty.
  [[nodiscard]] std::span<std::byte> room();

  enum class State : std::uint8_t { more, frame, broken };
  /// So many have come into room(). After `frame` take() has it; after `broken` the stream is lost.
  [[nodiscard]] State took(std::size_t num_bytes);
  [[nodiscard]] Frame take();

 private:
  std::uint64_t max_size_bytes_;
  HeaderBytes header_bytes_{};
  std::size_t header_filled_ = 0;
  FrameHeader header_;
  Bootstrap::Bytes body_;
  std::size_t body_filled_ = 0;
};

/// All entries in one run of bytes: the sizes, then the entries.
[[nodiscard]] Bootstrap::Bytes pack_entries(const std::vector<Bootstrap::Bytes>& all);
/// Nullopt unless the bytes are exactly so many entries.
[[nodiscard]] std::optional<std::vector<Bootstrap::Bytes>> unpack_entries(
    std::span<const std::byte> packed, std::size_t num_entries);

}  // namespace waybill::detail
