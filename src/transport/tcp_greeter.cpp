#include "tcp_greeter.h"

#include <utility>

#include "hmac.h"
#include "transport/bootstrap/wire.h"
#include "waybill/core/error.h"

namespace waybill::detail {

std::span<std::byte> Greeter::room() {
  if (awaits_proof_) return std::span(proof_bytes_).subspan(filled_);
  return std::span(hello_bytes_).subspan(filled_);
}

Greeter::Step Greeter::took(std::size_t num_bytes, const Admission& admission) {
  filled_ += num_bytes;
  if (awaits_proof_) return filled_ < proof_bytes ? Step::more : judge_proof(admission);
  const auto first_bytes = std::span(std::as_const(hello_bytes_)).first(filled_);
  switch (judge_greeting(first_bytes)) {
    case Greeting::incomplete:
      return Step::more;
    case Greeting::stranger:
      why_ = "it is no rank of Waybill";
      return Step::hang_up;
    case Greeting::other_version:
      return refuse(concat("version of the rendezvous = ", version_in(first_bytes.first<16>()),
                           ", expected ", protocol_version, ": a different release of Waybill"));
    case Greeting::hello:
      break;
  }
  hello_ = decode_hello(hello_bytes_);
  return judge_hello(admission);
}

Greeter::Step Greeter::judge_hello(const Admission& admission) {
  if (hello_.has_secret && admission.secret.empty()) {
    return refuse("a secret, expected none: WAYBILL_RENDEZVOUS_SECRET is not set on rank 0");
  }
  if (admission.secret.empty()) return judge_claim(admission);
  if (!hello_.has_secret) {
    return refuse("no secret, expected that of rank 0: set WAYBILL_RENDEZVOUS_SECRET");
  }
  nonce_ = random_nonce();
  answer_ = encode(Answer{.kind = AnswerKind::prove, .nonce = nonce_});
  awaits_proof_ = true;
  filled_ = 0;
  return Step::answer;
}

Greeter::Step Greeter::judge_proof(const Admission& admission) {
  const auto proof = decode_proof(proof_bytes_);
  const Digest expected = proof_of(Role::caller, admission.secret, hello_bytes_, nonce_);
  if (!proof || !same_digest(*proof, expected)) {
    return refuse("WAYBILL_RENDEZVOUS_SECRET differs from that of rank 0");
  }
  return judge_claim(admission);
}

/// Who may know what job this is: what it says of itself.
Greeter::Step Greeter::judge_claim(const Admission& admission) {
  if (hello_.job.text() != admission.job_id) {
    return refuse(concat("job id = ", quoted_or_none(hello_.job.text()), ", expected ",
                         quoted_or_none(admission.job_id)));
  }
  const auto world = static_cast<std::uint32_t>(admission.world_size);
  if (hello_.world_size != world) {
    return refuse(concat("world_size = ", hello_.world_size, ", expected ", world));
  }
  if (hello_.rank == 0 || hello_.rank >= world) {
    return refuse(concat("rank = ", hello_.rank, ", expected 1..", world - 1));
  }
  if (!admission.failure.empty()) return refuse(admission.failure);
  if (admission.taken[rank()])
    return refuse(concat("rank ", rank(), " connected twice",
                         ", expected another rank (RANK, or what its launcher sets) in each "
                         "process"));
  Answer answer{.kind = AnswerKind::accepted};
  if (!admission.secret.empty()) {
    answer.proof = proof_of(Role::rank_0, admission.secret, hello_bytes_, nonce_);
  }
  answer_ = encode(answer);
  return Step::admit;
}

Greeter::Step Greeter::refuse(std::string why) {
  why_ = std::move(why);
  answer_ = encode(Answer{.kind = AnswerKind::refused, .why = why_});
  return Step::refuse;
}

}  // namespace waybill::detail
