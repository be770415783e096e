#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "waybill/core/error.h"
#include "waybill/moe/ep_config.h"

namespace waybill::detail {

/// The fields of an EPConfig with room for any value that a caller gives.
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

// Names of the options of a dispatch, in Python and in errors.
inline constexpr std::array<std::string_view, 2> row_names{"grouped", "compact"};
inline constexpr std::array<std::string_view, 3> payload_names{"plain", "quantized", "scaled"};

[[nodiscard]] inline std::string_view name_of(EPRows rows) {
  return row_names.at(static_cast<std::size_t>(rows));
}
[[nodiscard]] inline std::string_view name_of(EPPayload payload) {
  return payload_names.at(static_cast<std::size_t>(payload));
}

/// @throws InvalidArgument naming the argument, unless it is one of the names
template <class Option, std::size_t Count>
[[nodiscard]] Option option_of(const std::array<std::string_view, Count>& names,
                               std::string_view name, const char* argument) {
  std::string known;
  for (std::size_t i = 0; i < Count; ++i) {
    if (names[i] == name) return static_cast<Option>(i);
    known += concat(i == 0 ? "\"" : i + 1 == Count ? " or \"" : ", \"", names[i], "\"");
  }
  throw_invalid(argument, " = \"", name, "\", expected ", known);
}

}  // namespace waybill::detail
