#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/sequence_plan.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::bench {

/// One operation of one routing, to be measured.
struct Workload {
  std::string name;
  SequenceOperation operation = SequenceOperation::dispatch;
  QkvRouting routing;
  TensorFormat q{DType::bfloat16, 0};   ///< hidden 0: not part of it
  TensorFormat kv{DType::bfloat16, 0};  ///< K and V each
  RelaySchedule relay = {};             ///< empty: nobody forwards

  [[nodiscard]] std::vector<SequencePart> parts() const;
};

/// What crosses the links, at most for one rank.
struct WireBytes {
  std::int64_t out = 0;    ///< most bytes that a rank sends to others
  std::int64_t in = 0;     ///< most bytes that a rank gets from others
  std::int64_t local = 0;  ///< most bytes that stay on a rank
  std::int64_t total = 0;  ///< of all ranks
  [[nodiscard]] std::int64_t most() const { return out > in ? out : in; }
};
[[nodiscard]] WireBytes wire_bytes(const Workload& workload);

/// Every rank sends an equal share of its rows to each rank, itself included, in `shards` pieces a
/// destination.
[[nodiscard]] Workload uniform(std::int32_t world_size, std::int64_t bytes_a_rank,
                               std::int64_t row_bytes, std::int64_t shards = 4);

/// Documents of a list of lengths ("wlbllm", "prolong"), 64K tokens a rank, 32 query heads and 8
/// heads of K and V of 128 elements in bfloat16: rows of 8 KiB and 2 KiB.
[[nodiscard]] Workload documents(std::int32_t world_size, const std::string& lengths,
                                 SequenceOperation operation);

/// K and V of the planner's plan whose largest bytes out are the largest multiple of its largest
/// bytes in, of 20 draws from a list of lengths, with the plan's relay schedule.
[[nodiscard]] Workload skewed(std::int32_t world_size, const std::string& lengths,
                              SequenceOperation operation);

}  // namespace waybill::bench
