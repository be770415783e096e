#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/sequence_plan.h"
#include "support/node_case.h"

namespace waybill::test {

/// Of a case, with tensors of float32: Q, K, V forward or the gradients of K and V.
inline std::vector<SequencePart> parts_of(const NodeCase& node, SequenceOperation operation) {
  const TensorFormat q =
      node.sample.name == "long" ? node.sample.q : TensorFormat{DType::float32, 5};
  const TensorFormat k{DType::float32, 4};
  const TensorFormat v{DType::float32, 12};
  const SequencePart kv{&node.sample.routing.fwd_kv, {k, v}, node.schedule()};
  if (operation == SequenceOperation::kv_gradient) return {kv};
  return {{&node.sample.routing.fwd_q, {q}}, kv};
}

/// The plans of all ranks, with small chunks and every relay.
inline std::vector<SequencePlan> plans_of(const NodeCase& node, SequenceOperation operation,
                                          CompileOptions options) {
  options.plan.chunk_bytes = 64;
  options.ranks_per_node = node.topology.ranks_per_node;
  options.plan.relay = RelayUse::always;
  const auto parts = parts_of(node, operation);
  std::vector<SequencePlan> plans;
  for (std::int32_t r = 0; r < node.topology.world_size; ++r) {
    plans.push_back(operation == SequenceOperation::dispatch
                        ? compile_dispatch(parts, Rank{r}, options)
                        : compile_kv_gradient(parts, Rank{r}, options));
  }
  return plans;
}

/// What the ranks send, or the gradients that they have.
inline std::vector<std::vector<HostTensor>> tensors_of(std::span<const SequencePlan> plans) {
  const bool sends = plans.front().operation == SequenceOperation::dispatch;
  std::vector<std::vector<HostTensor>> tensors;
  for (const SequencePlan& plan : plans) {
    auto& own = tensors.emplace_back();
    for (std::size_t t = 0; t < plan.tensors.size(); ++t) {
      own.emplace_back(DType::float32, Shape{(sends ? plan.own_rows : plan.window_rows)[t],
                                             plan.tensors[t].hidden});
      fill(own.back(), static_cast<std::uint64_t>(7 * to_int(plan.rank)) + t);
    }
  }
  return tensors;
}

}  // namespace waybill::test
