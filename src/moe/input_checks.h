#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/moe/simulate.h"

namespace waybill::detail {

/// The inputs of all ranks, checked, in one form.
struct CheckedInputs {
  std::vector<std::vector<std::int32_t>> ids;  ///< [W] x [T, topk]; a dropped topk slot num_experts
  std::vector<HostTensor> weights;             ///< none, or [W] x [T, topk]
  std::vector<std::int64_t> positions;         ///< full_scatter_indices; empty without
};

/// @throws InvalidArgument naming argument and rank
[[nodiscard]] CheckedInputs check_inputs(const EPConfig& config, const EPDispatchOptions& options,
                                         const ExpertInputs& inputs, const char* who);

/// Requires a view [rows, columns] of `dtype` whose elements of a row are adjacent.
void check_matrix(const ConstTensorView& view, std::int64_t rows, std::int64_t columns, DType dtype,
                  const char* who, const char* name, std::size_t rank);

/// Topk choices of all ranks, [T, K] each: as many ranks as there are, up to max_tokens tokens, ids
/// 0..num_experts (dropped).
/// @throws InvalidArgument with `who` and the place
void check_ids(const char* who, const EPConfig& config,
               std::span<const std::vector<std::int32_t>> ids);

}  // namespace waybill::detail
