#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "transport/bootstrap/tcp/handshake.h"

namespace waybill::detail {

/// Whose HMAC-SHA256: nothing of it is our own.
enum class HmacSource : std::uint8_t {
  automatic,  ///< the first of these that there is
  libcrypto,  ///< OpenSSL's, loaded at run time
  kernel,     ///< AF_ALG
};

/// HMAC-SHA256 of the message. @throws TransportError when there is no such source
[[nodiscard]] Digest hmac_sha256(std::string_view key, std::span<const std::byte> message,
                                 HmacSource source = HmacSource::automatic);

/// Takes the same time wherever they differ.
[[nodiscard]] bool same_digest(const Digest& a, const Digest& b) noexcept;

/// Random bytes of the kernel. @throws TransportError
void fill_random(std::span<std::byte> bytes);
[[nodiscard]] Nonce random_nonce();

/// Who proves to know the secret.
enum class Role : std::uint8_t { caller, rank_0 };

/// What a side sends as its proof: over both nonces (the caller's is in its hello) and all that the
/// caller says of itself. @throws as hmac_sha256
[[nodiscard]] Digest proof_of(Role role, std::string_view secret, const HelloBytes& hello,
                              const Nonce& nonce_of_rank_0);

}  // namespace waybill::detail
