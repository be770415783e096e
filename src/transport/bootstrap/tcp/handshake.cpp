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

using Magic = std::array<std::byte, 8>;

constexpr Magic magic_of(const char (&text)[9]) {
  Magic magic{};
  for (std::size_t i = 0; i < magic.size(); ++i) magic[i] = static_cast<std::byte>(text[i]);
  return magic;
}

constexpr Magic hello_magic = magic_of("waybill?");
constexpr Magic answer_magic = magic_of("waybill!");
constexpr Magic proof_magic = magic_of("waybill=");

/// Puts as much of the text as leaves room for a zero.
void put_text(std::span<std::byte> to, std::string_view text) {
  put_bytes(to, bytes_of(text.substr(0, to.size() - 1)));
}

/// Reads a text up to the first zero.
std::string_view text_in(std::span<const std::byte> from) {
  const auto end = std::ranges::find(from, std::byte{0});
  return {reinterpret_cast<const char*>(from.data()), static_cast<std::size_t>(end - from.begin())};
}

std::uint32_t version_in(std::span<const std::byte, 16> first_bytes) {
  std::span<const std::byte> from = first_bytes.subspan(8);
  return take_number<std::uint32_t>(from);
}

/// Returns `rejected` for another version, `none` while bytes are missing, `accepted` for a hello.
AnswerKind check_first_bytes(std::span<const std::byte> first_bytes) {
  const auto common = std::min(first_bytes.size(), hello_magic.size());
  if (!std::ranges::equal(first_bytes.first(common), std::span(hello_magic).first(common))) {
    return AnswerKind::stranger;
  }
  if (first_bytes.size() >= 16 && version_in(first_bytes.first<16>()) != protocol_version) {
    return AnswerKind::rejected;
  }
  return first_bytes.size() < hello_bytes ? AnswerKind::none : AnswerKind::accepted;
}

Hello decode_hello(std::span<const std::byte, hello_bytes> bytes) {
  std::span<const std::byte> from = bytes.subspan(12);
  Hello hello;
  hello.has_secret = (take_number<std::uint32_t>(from) & 1) != 0;
  hello.world_size = take_number<std::uint32_t>(from);
  hello.rank = take_number<std::uint32_t>(from);
  hello.nonce = take_bytes<sizeof(Nonce)>(from);
  hello.job = text_in(from).substr(0, max_job_id_bytes);
  return hello;
}

ProofBytes encode_proof(const Digest& proof) {
  ProofBytes bytes{};
  std::span<std::byte> to(bytes);
  put_bytes(to, proof_magic);
  put_bytes(to, proof);
  return bytes;
}

std::optional<Digest> decode_proof(std::span<const std::byte> from) {
  if (take_bytes<sizeof(Magic)>(from) != proof_magic) return std::nullopt;
  return take_bytes<sizeof(Digest)>(from);
}

/// @param tag says which side proves; all tags have one size, so no two messages are alike
Digest proof_of(const char (&tag)[33], std::string_view secret, const HelloBytes& hello,
                const Nonce& server_nonce) {
  std::array<std::byte, 32 + sizeof(HelloBytes) + sizeof(Nonce)> message{};
  std::span<std::byte> to(message);
  put_bytes(to, bytes_of({tag, 32}));
  put_bytes(to, hello);
  put_bytes(to, server_nonce);
  return hmac_sha256(secret, message);
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

HelloBytes encode(const Hello& hello) {
  HelloBytes bytes{};
  std::span<std::byte> to(bytes);
  put_bytes(to, hello_magic);
  put_number(to, protocol_version);
  put_number(to, std::uint32_t{hello.has_secret});
  put_number(to, hello.world_size);
  put_number(to, hello.rank);
  put_bytes(to, hello.nonce);
  put_text(to, hello.job.substr(0, max_job_id_bytes));
  return bytes;
}

AnswerBytes encode(const Answer& answer) {
  AnswerBytes bytes{};
  std::span<std::byte> to(bytes);
  put_bytes(to, answer_magic);
  put_number(to, protocol_version);
  put_number(to, static_cast<std::uint32_t>(answer.kind));
  put_bytes(to, answer.nonce);
  put_bytes(to, answer.proof);
  put_text(to, answer.why);
  return bytes;
}

std::optional<Answer> decode_answer(std::span<const std::byte, answer_bytes> bytes) {
  std::span<const std::byte> from = bytes;
  if (take_bytes<sizeof(Magic)>(from) != answer_magic) return std::nullopt;
  const auto version = take_number<std::uint32_t>(from);
  const auto kind = take_number<std::uint32_t>(from);
  Answer answer;
  if (kind < 1 || kind > 3) return std::nullopt;
  answer.kind = static_cast<AnswerKind>(kind);
  if (version != protocol_version && answer.kind != AnswerKind::rejected) return std::nullopt;
  answer.nonce = take_bytes<sizeof(Nonce)>(from);
  answer.proof = take_bytes<sizeof(Digest)>(from);
  answer.why = text_in(from);
  return answer;
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

Digest proof_of_client(std::string_view secret, const HelloBytes& hello,
                       const Nonce& server_nonce) {
  return proof_of("waybill rendezvous: the caller..", secret, hello, server_nonce);
}

Digest proof_of_server(std::string_view secret, const HelloBytes& hello,
                       const Nonce& server_nonce) {
  return proof_of("waybill rendezvous: rank zero...", secret, hello, server_nonce);
}

std::span<std::byte> ServerHandshake::room() {
  if (awaits_proof_) return std::span(proof_bytes_).subspan(filled_);
  return std::span(hello_bytes_).subspan(filled_);
}

AnswerKind ServerHandshake::add(std::size_t num_bytes, const TcpJob& job,
                                const std::vector<bool>& is_connected, std::string_view failure) {
  filled_ += num_bytes;
  if (awaits_proof_ && filled_ < proof_bytes) return AnswerKind::none;
  const AnswerKind checked = awaits_proof_ ? check_proof(job.job.secret) : check_hello(job);
  if (checked != AnswerKind::accepted) return checked;
  return accept_or_reject(job, is_connected, failure);
}

/// Accepts a client that need not prove anything.
AnswerKind ServerHandshake::check_hello(const TcpJob& job) {
  const auto first_bytes = std::span(std::as_const(hello_bytes_)).first(filled_);
  const AnswerKind first = check_first_bytes(first_bytes);
  if (first == AnswerKind::stranger) why_ = "it is no rank of Waybill";
  if (first == AnswerKind::rejected) {
    return reject(concat("version of the rendezvous = ", version_in(first_bytes.first<16>()),
                         ", expected ", protocol_version, ": a different release of Waybill"));
  }
  if (first != AnswerKind::accepted) return first;
  const bool has_secret = decode_hello(hello_bytes_).has_secret;
  if (has_secret && job.job.secret.empty()) {
    return reject("a secret, expected none: WAYBILL_RENDEZVOUS_SECRET is not set on rank 0");
  }
  if (job.job.secret.empty()) return AnswerKind::accepted;
  if (!has_secret) {
    return reject("no secret, expected that of rank 0: set WAYBILL_RENDEZVOUS_SECRET");
  }
  nonce_ = random_nonce();
  answer_ = encode(Answer{.kind = AnswerKind::prove, .nonce = nonce_});
  awaits_proof_ = true;
  filled_ = 0;
  return AnswerKind::prove;
}

AnswerKind ServerHandshake::check_proof(std::string_view secret) {
  const auto proof = decode_proof(proof_bytes_);
  if (proof && same_digest(*proof, proof_of_client(secret, hello_bytes_, nonce_))) {
    return AnswerKind::accepted;
  }
  return reject("WAYBILL_RENDEZVOUS_SECRET differs from that of rank 0");
}

/// Only a client that has proved the secret learns which job this is.
AnswerKind ServerHandshake::accept_or_reject(const TcpJob& job,
                                             const std::vector<bool>& is_connected,
                                             std::string_view failure) {
  const Hello hello = decode_hello(hello_bytes_);
  if (hello.job != job.job.id) {
    return reject(
        concat("job id = ", quoted_or_none(hello.job), ", expected ", quoted_or_none(job.job.id)));
  }
  const auto world = static_cast<std::uint32_t>(job.world_size);
  if (hello.world_size != world) {
    return reject(concat("world_size = ", hello.world_size, ", expected ", world));
  }
  if (hello.rank == 0 || hello.rank >= world) {
    return reject(concat("rank = ", hello.rank, ", expected 1..", world - 1));
  }
  if (!failure.empty()) return reject(std::string(failure));
  rank_ = static_cast<std::int32_t>(hello.rank);
  if (is_connected[rank_])
    return reject(concat("rank ", rank_, " connected twice",
                         ", expected another rank (RANK, or what its launcher sets) in each "
                         "process"));
  Answer answer{.kind = AnswerKind::accepted};
  if (!job.job.secret.empty()) {
    answer.proof = proof_of_server(job.job.secret, hello_bytes_, nonce_);
  }
  answer_ = encode(answer);
  return AnswerKind::accepted;
}

AnswerKind ServerHandshake::reject(std::string why) {
  why_ = std::move(why);
  answer_ = encode(Answer{.kind = AnswerKind::rejected, .why = why_});
  return AnswerKind::rejected;
}

ClientHandshake::ClientHandshake(const TcpJob& job)
    : secret_(job.job.secret),
      server_(concat("tcp bootstrap: rank 0 at ", job.host, ":", job.port)),
      rank_(job.rank) {
  hello_ = encode(Hello{.has_secret = !secret_.empty(),
                        .world_size = static_cast<std::uint32_t>(job.world_size),
                        .rank = static_cast<std::uint32_t>(job.rank),
                        .nonce = random_nonce(),
                        .job = job.job.id});
}

std::optional<ProofBytes> ClientHandshake::reply_to(const AnswerBytes& answer) {
  const auto decoded = decode_answer(answer);
  if (!decoded) {
    throw TransportError(concat(server_, " is not valid: what answers there is not Waybill"));
  }
  if (decoded->kind == AnswerKind::rejected) {
    throw TransportError(concat(server_, " refused rank ", rank_, ": ", peer_text(decoded->why)));
  }
  if (decoded->kind == AnswerKind::prove) {
    if (secret_.empty() || nonce_) {
      throw TransportError(concat(server_, " asked for a secret that was not offered"));
    }
    nonce_ = decoded->nonce;
    return encode_proof(proof_of_client(secret_, hello_, *nonce_));
  }
  if (secret_.empty()) return std::nullopt;
  if (!nonce_ || !same_digest(decoded->proof, proof_of_server(secret_, hello_, *nonce_))) {
    throw TransportError(concat(server_, " does not know WAYBILL_RENDEZVOUS_SECRET of rank ", rank_,
                                ": it is not of this job"));
  }
  return std::nullopt;
}

}  // namespace waybill::detail
