#pragma once

#include "../device/signal.cuh"
#include "inputs.cuh"

// What only the device can see of the caller's tensors, found wrong: reported by the call that has
// met it, and the context ends, so that nothing takes what is wrong for a result. Functions of
// their own with few arguments: the kernels have no registers to spare.

namespace waybill::cuda {

/// What a report says besides, by kind; see describe_input() of gpu_rank.cpp.
struct InputValues {
  std::int64_t of[2 * fault_words];
};

[[noreturn]] __device__ inline void report_input(const FaultSink& sink, FaultKind kind,
                                                 FaultKind call, std::int32_t rank,
                                                 std::uint64_t epoch, const InputValues& values) {
  if (atomicCAS(sink.claimed, 0ULL, 1ULL) == 0ULL) {
    for (int w = 0; w < fault_words; ++w) {
      sink.record->mine[w] = static_cast<std::uint64_t>(values.of[w]);
      sink.record->theirs[w] = static_cast<std::uint64_t>(values.of[fault_words + w]);
    }
    write_record(sink, kind, rank, rank, epoch, epoch, 0, call);
  }
  end_context(sink);
}

/// This rank's ids, where they are not those of RouteParams.
struct BadIds {
  const MoeShape& shape;
  const void* ids;
  bool wide_ids;
  std::int32_t dropped_id;
};

/// Looks for the first bad one of this rank's ids, of which there is one. P: RouteParams or BadIds.
template <class P>
[[noreturn]] __device__ __noinline__ void report_bad_id(const P& p, const FaultSink& sink,
                                                        const MoeState* state) {
  const MoeShape& s = p.shape;
  std::int64_t i = 0;
  std::int64_t id = 0;
  for (; i < std::int64_t{s.num_tokens} * s.topk; ++i) {
    id = index_at(p.ids, p.wide_ids, i);
    if ((id < 0 || id >= s.num_experts) && id != p.dropped_id) break;
  }
  report_input(sink, FaultKind::expert_id, FaultKind::moe_dispatch, s.rank, state->call.epoch + 1,
               {{id, i / s.topk, i % s.topk, s.num_experts, p.dropped_id}});
}

/// More topk slots of an expert than this rank may have.
[[noreturn]] __device__ __noinline__ inline void report_many_of_expert(const RouteParams& p,
                                                                       std::int32_t expert) {
  report_input(p.m.arrive.sink, FaultKind::expert_times, FaultKind::moe_dispatch, p.shape.rank,
               p.m.state->call.epoch + 1, {{expert, p.max_per_expert}});
}

/// full_scatter_indices that are not those of all ranks' tokens.
[[noreturn]] __device__ __noinline__ inline void report_scatter_size(const RouteParams& p,
                                                                     std::int32_t tokens) {
  report_input(p.m.arrive.sink, FaultKind::scatter_size, FaultKind::moe_dispatch, p.shape.rank,
               p.m.state->call.epoch + 1, {{p.scatter_tokens, tokens}});
}

/// A position that is not among the rows of its expert's rank.
[[noreturn]] __device__ __noinline__ inline void report_position(
    const RouteParams& p, std::int64_t position, std::int32_t source, std::int32_t topk_slot,
    std::int32_t first, std::int32_t rows, std::int32_t dst) {
  const std::int32_t topk = p.shape.topk;
  report_input(p.m.arrive.sink, FaultKind::scatter_position, FaultKind::moe_dispatch, p.shape.rank,
               p.m.state->call.epoch + 1,
               {{position, topk_slot / topk, topk_slot % topk, source, first,
                 std::int64_t{first} + rows - 1, dst}});
}

/// A topk slot that wants a row where another one is.
[[noreturn]] __device__ __noinline__ inline void report_row_twice(const RowsParams& p,
                                                                  std::int32_t row,
                                                                  const MoeTag& tag) {
  report_input(p.m.arrive.sink, FaultKind::scatter_twice, FaultKind::moe_dispatch, p.m.arrive.rank,
               p.m.state->call.epoch, {{row, tag.token, tag.topk_slot, tag.source_rank}});
}

/// Fewer rows to combine than have arrived.
[[noreturn]] __device__ __noinline__ inline void report_few_rows(const FaultSink& sink,
                                                                 const MoeState* state,
                                                                 std::int32_t rank,
                                                                 std::int64_t num_rows,
                                                                 std::int64_t arrived) {
  report_input(sink, FaultKind::combine_rows, FaultKind::moe_combine, rank, state->call.epoch + 1,
               {{num_rows, arrived}});
}

}  // namespace waybill::cuda
