#include "transport/bootstrap/tcp/handshake.h"

#include <dlfcn.h>
#include <linux/if_alg.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace waybill::detail {
namespace {

/// Puts as much of the text as leaves room for a zero.
template <std::size_t Size>
void put_text(char (&to)[Size], std::string_view text) {
  to[text.copy(to, Size - 1)] = '\0';
}

/// Reads a text up to the first zero.
template <std::size_t Size>
std::string_view text_in(const char (&from)[Size]) {
  return {from, strnlen(from, Size)};
}

/// Finds functions of libcrypto once per process, which never unloads it.
void* find_in_libcrypto(const char* function) {
  static void* const library = [] {
    for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"}) {
      void* const found = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (found == nullptr) continue;
      if (dlsym(found, "EVP_sha256") != nullptr && dlsym(found, "HMAC") != nullptr) return found;
    }
    return static_cast<void*>(nullptr);
  }();
  return library == nullptr ? nullptr : dlsym(library, function);
}

}  // namespace

bool Answer::is_valid() const {
  return magic == right_magic && AnswerKind::accepted <= kind && kind <= AnswerKind::rejected &&
         (version == protocol_version || kind == AnswerKind::rejected);
}

std::optional<Digest> hmac_of_libcrypto(std::string_view key, std::span<const std::byte> message) {
  // As the manual of libcrypto declares them.
  using Sha256 = const void*();
  using Hmac =
      unsigned char*(const void* digest, const void* key, int key_size, const unsigned char* data,
                     std::size_t size, unsigned char* result, unsigned int* result_size);
  auto* const sha256 = reinterpret_cast<Sha256*>(find_in_libcrypto("EVP_sha256"));
  auto* const hmac = reinterpret_cast<Hmac*>(find_in_libcrypto("HMAC"));
  if (sha256 == nullptr || hmac == nullptr) return std::nullopt;
  Digest digest{};
  unsigned int size = 0;
  const auto* const result =
      hmac(sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(message.data()), message.size(),
           reinterpret_cast<unsigned char*>(digest.data()), &size);
  if (result == nullptr || size != digest.size()) return std::nullopt;
  return digest;
}

std::optional<Digest> hmac_of_kernel(std::string_view key, std::span<const std::byte> message) {
  const Descriptor algorithm(socket(AF_ALG, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!algorithm.is_open()) return std::nullopt;
  sockaddr_alg name{};
  name.salg_family = AF_ALG;
  std::memcpy(name.salg_type, "hash", sizeof("hash"));
  std::memcpy(name.salg_name, "hmac(sha256)", sizeof("hmac(sha256)"));
  if (bind(algorithm.number(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0 ||
      setsockopt(algorithm.number(), SOL_ALG, ALG_SET_KEY, key.data(),
                 static_cast<socklen_t>(key.size())) != 0) {
    return std::nullopt;
  }
  const Descriptor operation(accept4(algorithm.number(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!operation.is_open()) return std::nullopt;
  Digest digest{};
  const auto sent = send(operation.number(), message.data(), message.size(), 0);
  if (sent != static_cast<ssize_t>(message.size())) return std::nullopt;
  const auto got = read(operation.number(), digest.data(), digest.size());
  if (got != static_cast<ssize_t>(digest.size())) return std::nullopt;
  return digest;
}

Digest hmac_sha256(std::string_view key, std::span<const std::byte> message) {
  if (const auto digest = hmac_of_libcrypto(key, message)) return *digest;
  if (const auto digest = hmac_of_kernel(key, message)) return *digest;
  throw TransportError(
      "WAYBILL_RENDEZVOUS_SECRET needs HMAC-SHA256, but neither libcrypto.so.3, libcrypto.so.1.1 "
      "nor libcrypto.so could be loaded (install OpenSSL's libssl3), and the kernel has no AF_ALG "
      "hmac(sha256)");
}

bool same_digest(const Digest& a, const Digest& b) noexcept {
  volatile unsigned char difference = 0;  // the loop must not end early
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<unsigned char>(difference | std::to_integer<unsigned>(a[i] ^ b[i]));
  }
  return difference == 0;
}

Nonce random_nonce() {
  Nonce nonce{};
  fill_random(nonce);
  return nonce;
}

Digest proof_of(std::string_view side, std::string_view secret, const Hello& hello,
                const Nonce& server_nonce) {
  std::vector<std::byte> message;
  for (const auto part : {bytes_of(side), bytes_in(hello), bytes_in(server_nonce)}) {
    message.insert(message.end(), part.begin(), part.end());
  }
  return hmac_sha256(secret, message);
}

std::span<std::byte> ServerHandshake::room() {
  return awaits_proof_ ? room_in(proof_, filled_) : room_in(hello_, filled_);
}

AnswerKind ServerHandshake::add(std::size_t num_bytes, const TcpJob& job,
                                const std::vector<bool>& is_connected, std::string_view failure) {
  filled_ += num_bytes;
  const std::string& secret = job.job.secret;
  const AnswerKind checked = awaits_proof_ ? check_proof(secret) : check_hello(secret);
  if (checked != AnswerKind::accepted) return checked;
  return accept_or_reject(job, is_connected, failure);
}

/// Accepts a client that need not prove anything.
AnswerKind ServerHandshake::check_hello(std::string_view secret) {
  const std::size_t common = std::min(filled_, Hello::right_magic.size());
  if (!std::equal(hello_.magic.begin(), hello_.magic.begin() + common,
                  Hello::right_magic.begin())) {
    why_ = "it is no rank of Waybill";
    return AnswerKind::stranger;
  }
  if (filled_ >= 16 && hello_.version != protocol_version) {
    return reject(concat("version of the rendezvous = ", hello_.version, ", expected ",
                         protocol_version, ": a different release of Waybill"));
  }
  if (filled_ < sizeof(Hello)) return AnswerKind::none;
  const bool has_secret = (hello_.has_secret & 1) != 0;
  if (has_secret && secret.empty()) {
    return reject("a secret, expected none: WAYBILL_RENDEZVOUS_SECRET is not set on rank 0");
  }
  if (secret.empty()) return AnswerKind::accepted;
  if (!has_secret) {
    return reject("no secret, expected that of rank 0: set WAYBILL_RENDEZVOUS_SECRET");
  }
  answer_ = {.kind = AnswerKind::prove, .nonce = random_nonce()};
  awaits_proof_ = true;
  filled_ = 0;
  return AnswerKind::prove;
}

AnswerKind ServerHandshake::check_proof(std::string_view secret) {
  if (filled_ < sizeof(Proof)) return AnswerKind::none;
  if (proof_.magic == Proof::right_magic &&
      same_digest(proof_.digest, proof_of(client_side, secret, hello_, answer_.nonce))) {
    return AnswerKind::accepted;
  }
  return reject("WAYBILL_RENDEZVOUS_SECRET differs from that of rank 0");
}

/// Only a client that has proved the secret learns which job this is.
AnswerKind ServerHandshake::accept_or_reject(const TcpJob& job,
                                             const std::vector<bool>& is_connected,
                                             std::string_view failure) {
  const std::string_view id = text_in(hello_.job);
  if (id != job.job.id) {
    return reject(
        concat("job id = ", quoted_or_none(id), ", expected ", quoted_or_none(job.job.id)));
  }
  const auto world = static_cast<std::uint32_t>(job.world_size);
  if (hello_.world_size != world) {
    return reject(concat("world_size = ", hello_.world_size, ", expected ", world));
  }
  if (hello_.rank == 0 || hello_.rank >= world) {
    return reject(concat("rank = ", hello_.rank, ", expected 1..", world - 1));
  }
  if (!failure.empty()) return reject(std::string(failure));
  if (is_connected[rank()]) {
    return reject(concat("rank ", rank(),
                         " connected twice, expected another rank (RANK, or what "
                         "its launcher sets) in each process"));
  }
  Answer answer{.kind = AnswerKind::accepted};
  if (awaits_proof_) answer.proof = proof_of(server_side, job.job.secret, hello_, answer_.nonce);
  answer_ = answer;
  return AnswerKind::accepted;
}

AnswerKind ServerHandshake::reject(std::string why) {
  why_ = std::move(why);
  answer_ = {.kind = AnswerKind::rejected};
  put_text(answer_.why, why_);
  return AnswerKind::rejected;
}

Hello hello_of(const TcpJob& job) {
  Hello hello{.has_secret = job.job.secret.empty() ? 0U : 1U,
              .world_size = static_cast<std::uint32_t>(job.world_size),
              .rank = static_cast<std::uint32_t>(job.rank),
              .nonce = random_nonce()};
  put_text(hello.job, job.job.id);
  return hello;
}

std::optional<Proof> reply_to(const Answer& answer, const TcpJob& job, const Hello& hello,
                              std::optional<Nonce>& nonce) {
  const std::string& secret = job.job.secret;
  const auto fail = [&](const auto&... text) {
    throw TransportError(concat("tcp bootstrap: rank 0 at ", job.host, ":", job.port, text...));
  };
  if (!answer.is_valid()) fail(" is not valid: what answers there is not Waybill");
  if (answer.kind == AnswerKind::rejected) {
    fail(" refused rank ", job.rank, ": ", peer_text(text_in(answer.why)));
  }
  if (answer.kind == AnswerKind::prove) {
    if (secret.empty() || nonce) fail(" asked for a secret that was not offered");
    nonce = answer.nonce;
    return Proof{.digest = proof_of(client_side, secret, hello, *nonce)};
  }
  if (secret.empty()) return std::nullopt;
  if (!nonce || !same_digest(answer.proof, proof_of(server_side, secret, hello, *nonce))) {
    fail(" does not know WAYBILL_RENDEZVOUS_SECRET of rank ", job.rank, ": it is not of this job");
  }
  return std::nullopt;
}

}  // namespace waybill::detail
