#pragma once

#include <cstdint>
#include <optional>

#include "waybill/core/dtype.h"
#include "waybill/moe/ep_config.h"

namespace waybill::detail {

/// The fields of an EPConfig with room for whatever a caller gives.
struct GivenConfig {
  std::int64_t max_tokens = 0;
  std::int64_t hidden = 0;
  std::int64_t topk = 0;
  std::int64_t num_experts = 0;
  std::int64_t rank = 0;
  std::int64_t world_size = 0;
  std::int64_t local_world_size = 0;
  DType token_dtype = DType::bfloat16;
  DType weight_dtype = DType::float32;
};

/// @throws InvalidArgument as EPConfig::check
[[nodiscard]] EPConfig checked_config(const GivenConfig& given, const char* who,
                                      const FieldNames& called);

/// @throws InvalidArgument as EPDispatchOptions::check
[[nodiscard]] std::optional<std::int32_t> checked_dropped_id(std::optional<std::int64_t> dropped_id,
                                                             const EPConfig& config,
                                                             const char* who,
                                                             const FieldNames& called);

}  // namespace waybill::detail
