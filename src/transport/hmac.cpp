#include "hmac.h"

#include <dlfcn.h>
#include <linux/if_alg.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>

#include "core/printable.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

/// The two functions of libcrypto that are needed, as its manual declares them.
struct Libcrypto {
  const void* (*sha256)();
  unsigned char* (*hmac)(const void* digest, const void* key, int key_size,
                         const unsigned char* data, std::size_t size, unsigned char* result,
                         unsigned int* result_size);
};

/// Loaded once per process and never unloaded.
const Libcrypto* find_libcrypto() {
  static const std::optional<Libcrypto> found = []() -> std::optional<Libcrypto> {
    for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"}) {
      void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) continue;
      void* const sha256 = dlsym(library, "EVP_sha256");
      void* const hmac = dlsym(library, "HMAC");
      if (sha256 == nullptr || hmac == nullptr) continue;
      return Libcrypto{reinterpret_cast<decltype(Libcrypto::sha256)>(sha256),
                       reinterpret_cast<decltype(Libcrypto::hmac)>(hmac)};
    }
    return std::nullopt;
  }();
  return found ? &*found : nullptr;
}

std::optional<Digest> hmac_of_libcrypto(std::string_view key, std::span<const std::byte> message) {
  const Libcrypto* const library = find_libcrypto();
  if (library == nullptr) return std::nullopt;
  Digest digest{};
  unsigned int size = 0;
  const auto* const result =
      library->hmac(library->sha256(), key.data(), static_cast<int>(key.size()),
                    reinterpret_cast<const unsigned char*>(message.data()), message.size(),
                    reinterpret_cast<unsigned char*>(digest.data()), &size);
  if (result == nullptr || size != digest.size()) return std::nullopt;
  return digest;
}

/// A descriptor that is closed.
struct Descriptor {
  int number = -1;
  explicit Descriptor(int opened) : number(opened) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number >= 0) (void)close(number);
  }
};

std::optional<Digest> hmac_of_kernel(std::string_view key, std::span<const std::byte> message) {
  const Descriptor algorithm(socket(AF_ALG, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (algorithm.number < 0) return std::nullopt;
  sockaddr_alg name{};
  name.salg_family = AF_ALG;
  std::memcpy(name.salg_type, "hash", sizeof("hash"));
  std::memcpy(name.salg_name, "hmac(sha256)", sizeof("hmac(sha256)"));
  if (bind(algorithm.number, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0 ||
      setsockopt(algorithm.number, SOL_ALG, ALG_SET_KEY, key.data(),
                 static_cast<socklen_t>(key.size())) != 0) {
    return std::nullopt;
  }
  const Descriptor operation(accept4(algorithm.number, nullptr, nullptr, SOCK_CLOEXEC));
  if (operation.number < 0) return std::nullopt;
  Digest digest{};
  const auto sent = send(operation.number, message.data(), message.size(), 0);
  if (sent != static_cast<ssize_t>(message.size())) return std::nullopt;
  const auto got = read(operation.number, digest.data(), digest.size());
  if (got != static_cast<ssize_t>(digest.size())) return std::nullopt;
  return digest;
}

}  // namespace

Digest hmac_sha256(std::string_view key, std::span<const std::byte> message, HmacSource source) {
  if (source != HmacSource::kernel) {
    if (const auto digest = hmac_of_libcrypto(key, message)) return *digest;
  }
  if (source != HmacSource::libcrypto) {
    if (const auto digest = hmac_of_kernel(key, message)) return *digest;
  }
  throw TransportError(
      "WAYBILL_RENDEZVOUS_SECRET needs HMAC-SHA256, but neither libcrypto.so.3, libcrypto.so.1.1 "
      "nor libcrypto.so could be loaded (install OpenSSL's libssl3), and the kernel has no AF_ALG "
      "hmac(sha256)");
}

bool same_digest(const Digest& a, const Digest& b) noexcept {
  volatile unsigned char difference = 0;  // not to be cut short
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<unsigned char>(difference | std::to_integer<unsigned>(a[i] ^ b[i]));
  }
  return difference == 0;
}

void fill_random(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = getrandom(bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw TransportError(concat("cannot get random bytes: ", errno_text(errno)));
    }
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
}

Nonce random_nonce() {
  Nonce nonce{};
  fill_random(nonce);
  return nonce;
}

Digest proof_of(Role role, std::string_view secret, const HelloBytes& hello,
                const Nonce& nonce_of_rank_0) {
  // Texts of one size, so that no two messages are alike.
  constexpr std::string_view tag_of_caller = "waybill rendezvous: the caller..";
  constexpr std::string_view tag_of_rank_0 = "waybill rendezvous: rank zero...";
  static_assert(tag_of_caller.size() == tag_of_rank_0.size());
  const auto tag = std::as_bytes(std::span(role == Role::caller ? tag_of_caller : tag_of_rank_0));
  std::array<std::byte, tag_of_caller.size() + sizeof(HelloBytes) + sizeof(Nonce)> message{};
  std::memcpy(message.data(), tag.data(), tag.size());
  std::memcpy(message.data() + tag.size(), hello.data(), hello.size());
  std::memcpy(message.data() + tag.size() + hello.size(), nonce_of_rank_0.data(),
              nonce_of_rank_0.size());
  return hmac_sha256(secret, message);
}

}  // namespace waybill::detail
