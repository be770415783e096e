#pragma once

#include <cstdint>
#include <vector>

#include "support/sequence_case.h"

namespace waybill::test {

/// The inputs of all ranks and what must come out.
struct Expected {
  explicit Expected(const SequenceCase& the, std::uint64_t seed = 1)
      : q(random_tensors(the.q, rows_sent(the.routing.fwd_q), seed)),
        k(random_tensors(the.k, rows_sent(the.routing.fwd_kv), seed + 1)),
        v(random_tensors(the.v, rows_sent(the.routing.fwd_kv), seed + 2)),
        q_out(simulated(the.routing.fwd_q, q)),
        k_out(simulated(the.routing.fwd_kv, k)),
        v_out(simulated(the.routing.fwd_kv, v)),
        k_gradient(simulated_gradient(the.routing, k_out, the.k.dtype)),
        v_gradient(simulated_gradient(the.routing, v_out, the.v.dtype)) {}

  std::vector<HostTensor> q, k, v;              ///< [W], what each rank has
  std::vector<HostTensor> q_out, k_out, v_out;  ///< [W], what each rank gets
  std::vector<HostTensor> k_gradient, v_gradient;
};

inline std::vector<SequencePart> forward_parts(const SequenceCase& the) {
  return {{&the.routing.fwd_q, {the.q}}, {&the.routing.fwd_kv, {the.k, the.v}}};
}
inline std::vector<SequencePart> kv_parts(const SequenceCase& the) {
  return {{&the.routing.fwd_kv, {the.k, the.v}}};
}
inline std::vector<SequencePart> reverse_parts(const SequenceCase& the) {
  return {{&the.routing.rev_q, {the.q}}};
}

/// The parts of a forward dispatch of Q, K and V, of Q's way home, and of the gradient.
struct StepParts {
  std::vector<SequencePart> forward;
  std::vector<SequencePart> reverse;
  std::vector<SequencePart> kv;
};

inline StepParts step_parts(const SequenceCase& the) {
  return {forward_parts(the), reverse_parts(the), kv_parts(the)};
}

}  // namespace waybill::test
