#pragma once

#include <gtest/gtest.h>

#include <algorithm>

#include "waybill/core/host_tensor.h"
#include "waybill/core/tensor_view.h"

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

}  // namespace waybill::test
