#pragma once

#include "../device/signal.cuh"
#include "inputs.cuh"

// What only the device can see of the caller's tensors, found wrong.

namespace waybill::cuda {

/// What a report says besides, by kind; see describe_input() of gpu_rank.cpp.
struct InputValues {
  std::int64_t of[2 * fault_words];
};

/// Reports by the call that has met it, and ends the context: nothing takes what is wrong for a
/// result.
[[noreturn]] __device__ __noinline__ inline void report_input(const FaultSink& sink, FaultKind kind,
                                                              FaultKind call, std::int32_t rank,
                                                              std::uint64_t epoch,
                                                              const InputValues& values) {
  if (atomicCAS(sink.claimed, 0ULL, 1ULL) == 0ULL) {
    for (int w = 0; w < fault_words; ++w) {
      sink.record->mine[w] = static_cast<std::uint64_t>(values.of[w]);
      sink.record->theirs[w] = static_cast<std::uint64_t>(values.of[fault_words + w]);
    }
    write_record(sink, kind, rank, rank, epoch, epoch, 0, call);
  }
  end_context(sink);
}

/// Looks for the first bad one of this rank's ids, of which there is one.
[[noreturn]] __device__ __noinline__ inline void report_bad_id(const FaultSink& sink,
                                                               const MoeShape& s, const void* ids,
                                                               bool wide, std::int32_t dropped_id,
                                                               std::uint64_t epoch) {
  std::int64_t i = 0;
  std::int64_t id = 0;
  for (; i < std::int64_t{s.num_tokens} * s.topk; ++i) {
    id = index_at(ids, wide, i);
    if ((id < 0 || id >= s.num_experts) && id != dropped_id) break;
  }
  report_input(sink, FaultKind::expert_id, FaultKind::moe_dispatch, s.rank, epoch,
               {{id, i / s.topk, i % s.topk, s.num_experts, dropped_id}});
}

}  // namespace waybill::cuda
