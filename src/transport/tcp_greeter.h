#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "transport/bootstrap/tcp/handshake.h"

namespace waybill::detail {

/// Whom rank 0 lets in.
struct Admission {
  std::int32_t world_size = 0;
  std::string job_id;       ///< empty: none
  std::string secret;       ///< empty: none
  std::vector<bool> taken;  ///< [W]: the ranks that are here
  std::string failure;      ///< not empty: nobody is let in any more, and this is why
};

/// One caller that is not known yet: rank 0's part of the handshake, without the socket. It is of
/// fixed size whatever comes, as nothing is allocated for a stranger.
class Greeter {
 public:
  enum class Step : std::uint8_t {
    more,     ///< nothing to do before the next bytes
    answer,   ///< send answer(), then go on
    admit,    ///< it is rank(); send answer()
    refuse,   ///< send answer() and hang up; why() is the reason
    hang_up,  ///< no rank of Waybill: nothing to say
  };

  /// Where the next bytes go: never empty before `admit`, `refuse` or `hang_up`.
  [[nodiscard]] std::span<std::byte> room();

  /// So many have come into room(). @throws TransportError when there is a secret but no HMAC
  [[nodiscard]] Step took(std::size_t num_bytes, const Admission& admission);

  [[nodiscard]] std::int32_t rank() const { return static_cast<std::int32_t>(hello_.rank); }
  [[nodiscard]] const AnswerBytes& answer() const { return answer_; }
  [[nodiscard]] const std::string& why() const { return why_; }

 private:
  Step judge_hello(const Admission& admission);
  Step judge_proof(const Admission& admission);
  Step judge_claim(const Admission& admission);
  Step refuse(std::string why);

  HelloBytes hello_bytes_{};
  ProofBytes proof_bytes_{};
  std::size_t filled_ = 0;
  bool awaits_proof_ = false;
  Hello hello_;
  Nonce nonce_{};
  AnswerBytes answer_{};
  std::string why_;
};

}  // namespace waybill::detail
