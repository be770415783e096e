#include "tcp_caller.h"

#include <algorithm>

#include "hmac.h"
#include "transport/bootstrap/wire.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr double answer_patience_s = 10.0;  // then it calls again
constexpr double shortest_pause_s = 0.01;
constexpr double longest_pause_s = 0.1;

/// Fills the bytes; false: it hung up, or the deadline has passed.
bool receive_all(const Socket& from, std::span<std::byte> bytes, const Deadline& deadline) {
  while (!bytes.empty()) {
    const IoResult got = from.receive_some(bytes);
    if (got.status == IoStatus::closed) return false;
    bytes = bytes.subspan(got.num_bytes);
    if (got.status == IoStatus::complete) continue;
    if (deadline.passed()) return false;
    PollSet set;
    (void)set.add(from, PollSet::to_read);
    set.wait(deadline);
  }
  return true;
}

/// True: we are let in. False: nobody answered, or it hung up without a word.
bool introduce(const Socket& socket, const Call& call, const Deadline& deadline) {
  const Deadline patience(std::min(answer_patience_s, deadline.left_s()));
  Introduction introduction(call);
  if (!socket.send_now(introduction.hello())) return false;
  AnswerBytes answer{};
  while (receive_all(socket, answer, patience)) {
    const auto proof = introduction.took(answer);
    if (!proof) return true;
    if (!socket.send_now(*proof)) return false;
  }
  return false;
}

}  // namespace

Introduction::Introduction(const Call& call)
    : secret_(call.secret),
      place_(concat("tcp bootstrap: rank 0 at ", call.host, ":", call.port)),
      rank_(call.rank) {
  hello_ = encode(Hello{.has_secret = !secret_.empty(),
                        .world_size = static_cast<std::uint32_t>(call.world_size),
                        .rank = static_cast<std::uint32_t>(call.rank),
                        .nonce = random_nonce(),
                        .job = JobField(call.job_id)});
}

std::optional<ProofBytes> Introduction::took(const AnswerBytes& answer) {
  const auto said = decode_answer(answer);
  if (!said)
    throw TransportError(concat(place_, " is not valid: what answers there is not Waybill"));
  if (said->kind == AnswerKind::refused) {
    throw TransportError(concat(place_, " refused rank ", rank_, ": ", peer_text(said->why)));
  }
  if (said->kind == AnswerKind::prove) {
    if (secret_.empty() || nonce_) {
      throw TransportError(concat(place_, " asked for a secret that was not offered"));
    }
    nonce_ = said->nonce;
    return encode_proof(proof_of(Role::caller, secret_, hello_, *nonce_));
  }
  if (secret_.empty()) return std::nullopt;
  if (!nonce_ || !same_digest(said->proof, proof_of(Role::rank_0, secret_, hello_, *nonce_))) {
    throw TransportError(concat(place_, " does not know WAYBILL_RENDEZVOUS_SECRET of rank ", rank_,
                                ": it is not of this job"));
  }
  return std::nullopt;
}

Socket call_rank_0(const Call& call, const Deadline& deadline) {
  double pause_s = shortest_pause_s;
  std::uint16_t source_port = call.first_source_port;
  for (;;) {
    auto socket = Socket::connect(call.host, call.port, deadline, source_port);
    source_port = 0;
    if (socket && socket->is_connected_to_itself()) {
      socket->abort();
    } else if (socket && introduce(*socket, call, deadline)) {
      return std::move(*socket);
    }
    socket.reset();
    if (deadline.passed()) {
      throw Timeout({.operation = "tcp bootstrap: connect",
                     .what = "exchange",
                     .rank = call.rank,
                     .peer = 0,
                     .wanted = 1,
                     .seen = 0,
                     .seconds = deadline.waited_s()});
    }
    pause_for(pause_s, deadline);
    pause_s = std::min(longest_pause_s, pause_s * 1.5);
  }
}

}  // namespace waybill::detail
