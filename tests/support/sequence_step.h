#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "support/sequence_expected.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill::test {

/// Success when the view has exactly the elements of `expected`.
inline testing::AssertionResult same_bytes(const ConstTensorView& view,
                                           const HostTensor& expected) {
  if (view.shape != expected.shape()) {
    return testing::AssertionFailure()
           << "shape " << to_string(view.shape) << ", expected " << to_string(expected.shape());
  }
  const auto bytes = expected.bytes();
  const auto wrong = std::mismatch(bytes.begin(), bytes.end(), view.data).first;
  if (wrong == bytes.end()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "byte " << wrong - bytes.begin() << " differs";
}

/// Q, K and V there, Q back, gradients of K and V, in host memory. On all ranks.
inline void check_step(World& world, SequenceDispatcher& dispatcher, const SequenceCase& sample,
                       const StepParts& parts, const Expected& expected) {
  const std::size_t r = to_int(world.rank());
  const auto forward = dispatcher.plan_dispatch(parts.forward);
  const auto reverse = dispatcher.plan_dispatch(parts.reverse);
  const auto gradient = dispatcher.plan_kv_gradient(parts.kv);
  const auto outputs = dispatcher.dispatch(
      forward, std::vector<ConstTensorView>{expected.q[r].view(), expected.k[r].view(),
                                            expected.v[r].view()});
  ASSERT_TRUE(same_bytes(outputs[0], expected.q_out[r])) << sample.name << ": Q of rank " << r;
  ASSERT_TRUE(same_bytes(outputs[1], expected.k_out[r])) << sample.name << ": K of rank " << r;
  ASSERT_TRUE(same_bytes(outputs[2], expected.v_out[r])) << sample.name << ": V of rank " << r;
  // The output of one call is the input of the next: Q comes home as it left.
  const auto home = dispatcher.dispatch(reverse, std::vector<ConstTensorView>{outputs[0]});
  ASSERT_TRUE(same_bytes(home[0], expected.q[r])) << sample.name << ": Q back on rank " << r;
  HostTensor dk(sample.k.dtype, expected.k[r].shape());
  HostTensor dv(sample.v.dtype, expected.v[r].shape());
  dispatcher.kv_gradient(
      gradient, std::vector<ConstTensorView>{expected.k_out[r].view(), expected.v_out[r].view()},
      std::vector<TensorView>{dk.view(), dv.view()});
  ASSERT_TRUE(same_bytes(dk.view(), expected.k_gradient[r])) << sample.name << ": dK of rank " << r;
  ASSERT_TRUE(same_bytes(dv.view(), expected.v_gradient[r])) << sample.name << ": dV of rank " << r;
}

inline void check_step(World& world, SequenceDispatcher& dispatcher, const SequenceCase& sample,
                       const Expected& expected) {
  check_step(world, dispatcher, sample, step_parts(sample), expected);
}

}  // namespace waybill::test
