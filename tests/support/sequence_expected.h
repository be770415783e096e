#pragma once

#include <cstdint>
#include <vector>

#include "support/sequence_case.h"

namespace waybill::test {

/// The inputs of all ranks and what must come out.
struct Expected {
  explicit Expected(const SequenceCase& sample, std::uint64_t seed = 1)
      : q(random_tensors(sample.q, rows_sent(sample.routing.fwd_q), seed)),
        k(random_tensors(sample.k, rows_sent(sample.routing.fwd_kv), seed + 1)),
        v(random_tensors(sample.v, rows_sent(sample.routing.fwd_kv), seed + 2)),
        q_out(simulated(sample.routing.fwd_q, q)),
        k_out(simulated(sample.routing.fwd_kv, k)),
        v_out(simulated(sample.routing.fwd_kv, v)),
        k_gradient(simulated_gradient(sample.routing, k_out, sample.k.dtype)),
        v_gradient(simulated_gradient(sample.routing, v_out, sample.v.dtype)) {}

  std::vector<HostTensor> q, k, v;              ///< [W], what each rank has
  std::vector<HostTensor> q_out, k_out, v_out;  ///< [W], what each rank gets
  std::vector<HostTensor> k_gradient, v_gradient;
};

inline std::vector<SequencePart> forward_parts(const SequenceCase& sample) {
  return {{&sample.routing.fwd_q, {sample.q}}, {&sample.routing.fwd_kv, {sample.k, sample.v}}};
}
inline std::vector<SequencePart> kv_parts(const SequenceCase& sample) {
  return {{&sample.routing.fwd_kv, {sample.k, sample.v}}};
}
inline std::vector<SequencePart> reverse_parts(const SequenceCase& sample) {
  return {{&sample.routing.rev_q, {sample.q}}};
}

/// The parts of a forward dispatch of Q, K and V, of Q's way home, and of the gradient.
struct StepParts {
  std::vector<SequencePart> forward;
  std::vector<SequencePart> reverse;
  std::vector<SequencePart> kv;
};

inline StepParts step_parts(const SequenceCase& sample) {
  return {forward_parts(sample), reverse_parts(sample), kv_parts(sample)};
}

}  // namespace waybill::test
