#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "moe/copied_experts.h"
#include "support/sequence_expected.h"
#include "waybill/experts/copy_store.h"

namespace waybill::test {

/// What the ranks of a world move, and what the simulation makes of it. One part per expert.
struct SimulatedCopies {
  SimulatedCopies(std::int32_t ranks, std::int32_t per_rank, std::int32_t spare, std::uint64_t seed,
                  std::int64_t elements, DType dtype)
      : drawn(ranks, per_rank, spare, seed), part{elements, dtype} {
    row_bytes = elements * dtype_bytes(dtype);
    home = drawn.home_bytes(row_bytes);
    const std::vector<std::span<const std::byte>> views(home.begin(), home.end());
    weights = simulate_expert_copies(drawn.slots(), views, row_bytes);
    gradients = drawn.gradients(elements, dtype);
    sums = simulate_expert_copy_gradients(drawn.slots(), views_of(gradients.first),
                                          views_of(gradients.second));
  }

  CopiedExperts drawn;
  ExpertPart part;
  std::int64_t row_bytes = 0;
  std::vector<std::vector<std::byte>> home;     ///< [R] of [experts per rank, row_bytes]
  std::vector<std::vector<std::byte>> weights;  ///< [R] of [slots per rank, row_bytes]
  std::pair<std::vector<HostTensor>, std::vector<HostTensor>> gradients;  ///< home's; of copies
  std::vector<HostTensor> sums;  ///< [R] of [experts per rank, elements]
};

}  // namespace waybill::test
