#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/runtime/sequence_dispatcher.h"

namespace waybill::test {

inline testing::AssertionResult same_bytes(const HostTensor& got, const HostTensor& expected) {
  if (got.shape() != expected.shape()) {
    return testing::AssertionFailure()
           << "shape " << to_string(got.shape()) << ", expected " << to_string(expected.shape());
  }
  const auto a = got.bytes();
  const auto b = expected.bytes();
  const auto wrong = std::mismatch(a.begin(), a.end(), b.begin()).first;
  if (wrong == a.end()) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << "byte " << wrong - a.begin() << " of " << a.size() << " differs";
}

/// How the bytes go.
struct Way {
  const char* name;
  SequenceDispatcherOptions options;
};

/// Copy engines need a queue a pair of ranks. Where more ranks share a device than it has hardware
/// queues for, the copies of one could wait behind another's kernel, so they are left out there.
inline std::vector<Way> ways(std::int32_t world_size) {
  std::vector<Way> all{
      {"bulk, 8 SMs", {.num_sms = 8}},
      {"bulk, 1 SM", {.num_sms = 1}},
      {"chunks of 256 bytes", {.num_sms = 8, .plan = {.chunk_bytes = 256}}},
      {"vector", {.num_sms = 8, .plan = {.chunk_bytes = 16384}}},  // too large for bulk
      {"copy engines", {.num_sms = 0}}};
  if (world_size > 4 * num_gpus()) all.pop_back();
  return all;
}

}  // namespace waybill::test
