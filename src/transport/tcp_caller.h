#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "transport/bootstrap/tcp/handshake.h"
#include "transport/bootstrap/tcp/socket.h"

namespace waybill::detail {

/// Who calls rank 0, and where that listens.
struct Call {
  std::string host;
  std::uint16_t port = 0;
  std::int32_t rank = 0;
  std::int32_t world_size = 0;
  std::string job_id;
  std::string secret;
  std::uint16_t first_source_port = 0;  ///< of the first attempt, for tests; 0: any
};

/// A caller's part of the handshake, without the socket.
class Introduction {
 public:
  /// @throws TransportError as hmac_sha256
  explicit Introduction(const Call& call);

  [[nodiscard]] const HelloBytes& hello() const { return hello_; }

  /// What rank 0 answered. Nullopt: it has let us in. Else what to send it before it answers again.
  /// @throws TransportError with the reason where it refuses us, or is no rank 0, or does not know
  ///   the secret
  [[nodiscard]] std::optional<ProofBytes> took(const AnswerBytes& answer);

 private:
  std::string secret_;
  std::string place_;
  std::int32_t rank_;
  HelloBytes hello_;
  std::optional<Nonce> nonce_;  ///< of rank 0, once it has asked
};

/// Calls until rank 0 has let us in. @throws Timeout, TransportError as Introduction
[[nodiscard]] Socket call_rank_0(const Call& call, const Deadline& deadline);

}  // namespace waybill::detail
