#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/moe/ep_config.h"

namespace waybill::detail {

/// Requires a view [rows, columns] of `dtype` whose elements of a row are adjacent.
void check_matrix(const ConstTensorView& view, std::int64_t rows, std::int64_t columns, DType dtype,
                  const char* who, const char* name, std::int64_t rank);

/// Returns the integers of a matrix of int32 or int64, row by row; any strides.
[[nodiscard]] std::vector<std::int64_t> read_integers(const ConstTensorView& view);

/// Topk choices of all ranks, [T, K] each: as many ranks as there are, up to max_tokens tokens, ids
/// 0..num_experts (dropped).
/// @throws InvalidArgument with `who` and the place
void check_ids(const char* who, const EPConfig& config,
               std::span<const std::vector<std::int32_t>> ids);

}  // namespace waybill::detail
