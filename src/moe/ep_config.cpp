#include "waybill/moe/ep_config.h"

#include <limits>
#include <string_view>

#include "core/number.h"
#include "moe/option_names.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

constexpr std::int64_t growth_rows = 1024;
constexpr std::int64_t max_int32 = std::numeric_limits<std::int32_t>::max();

std::string_view called_name(std::string_view field, const FieldNames& called) {
  const auto found = called.find(field);
  return found == called.end() ? field : std::string_view(found->second);
}

/// Repeated experts are allowed, so all topk slots of all ranks may meet on one rank.
std::int64_t max_grouped_rows(const EPConfig& config, const EPDispatchOptions& options) {
  return config.world_size * config.max_tokens * config.topk +
         config.num_experts_per_rank() * (options.expert_alignment - 1);
}

/// @param given an EPConfig, or a GivenConfig before its numbers are known to fit
template <class Config>
void check_fields(const Config& given, const char* who, const FieldNames& called) {
  const auto check_range = [&](std::string_view field, std::int64_t value, std::int64_t first,
                               std::int64_t last) {
    require(first <= value && value <= last, who, ": ", called_name(field, called), " = ", value,
            ", expected ", first, "..", last);
  };
  check_range("max_tokens", given.max_tokens, 1, max_int32);
  check_range("hidden", given.hidden, 1, max_int32);
  check_range("topk", given.topk, 1, max_topk);
  check_range("world_size", given.world_size, 1, max_world_size);
  check_range("rank", given.rank, 0, given.world_size - 1);
  require(1 <= given.local_world_size && given.world_size % given.local_world_size == 0, who, ": ",
          called_name("local_world_size", called), " = ", given.local_world_size,
          ", expected a divisor of ", called_name("world_size", called), " = ", given.world_size);
  require(1 <= given.num_experts && given.num_experts <= max_int32 &&
              given.num_experts % given.world_size == 0,
          who, ": ", called_name("num_experts", called), " = ", given.num_experts,
          ", expected a multiple of ", called_name("world_size", called), " = ", given.world_size);
  require(detail::is_summed(given.token_dtype), who, ": ", called_name("token_dtype", called),
          " = ", given.token_dtype, ", expected bfloat16, float16, float32 or float64");
  require(detail::is_summed(given.weight_dtype), who, ": ", called_name("weight_dtype", called),
          " = ", given.weight_dtype, ", expected float32, float16, bfloat16 or float64");
}

}  // namespace

EPConfig detail::checked_config(const GivenConfig& given, const char* who,
                                const FieldNames& called) {
  check_fields(given, who, called);
  return {.max_tokens = given.max_tokens,
          .hidden = given.hidden,
          .topk = static_cast<std::int32_t>(given.topk),
          .num_experts = static_cast<std::int32_t>(given.num_experts),
          .rank = static_cast<std::int32_t>(given.rank),
          .world_size = static_cast<std::int32_t>(given.world_size),
          .local_world_size = static_cast<std::int32_t>(given.local_world_size),
          .token_dtype = given.token_dtype,
          .weight_dtype = given.weight_dtype};
}

void EPConfig::check(const char* who, const FieldNames& called) const {
  check_fields(*this, who, called);
}

std::optional<std::int32_t> detail::checked_dropped_id(std::optional<std::int64_t> dropped_id,
                                                       const EPConfig& config, const char* who,
                                                       const FieldNames& called) {
  if (!dropped_id) return std::nullopt;
  require(*dropped_id == -1 || *dropped_id == config.num_experts, who,
          ": dropped_id = ", *dropped_id, ", expected -1 or ", called_name("num_experts", called),
          " = ", config.num_experts);
  return static_cast<std::int32_t>(*dropped_id);
}

void EPDispatchOptions::check(const EPConfig& config, const char* who,
                              const FieldNames& called) const {
  (void)detail::checked_dropped_id(dropped_id, config, who, called);
  require(1 <= expert_alignment, who, ": expert_alignment = ", expert_alignment, ", expected >= 1");
  require(payload == EPPayload::plain || config.hidden % scale_group == 0, who, ": ",
          called_name("hidden", called), " = ", config.hidden, ", expected a multiple of ",
          scale_group, " for a payload with scales");
  require(payload != EPPayload::quantized || config.token_dtype != DType::float64, who, ": ",
          called_name("token_dtype", called),
          " = float64, expected bfloat16, float16 or float32 for a quantized payload");
  require(expert_alignment <= max_int32, who, ": expert_alignment = ", expert_alignment,
          ", expected at most ", max_int32);
  // Compact rows have places in the grouped order, too.
  const std::int64_t grouped = max_grouped_rows(config, *this);
  require(grouped <= max_int32, who, ": a rank could ",
          rows == EPRows::grouped ? "receive " : "have compact rows for ", grouped,
          rows == EPRows::grouped ? " rows" : " topk slots", ", expected at most ", max_int32,
          ": max_tokens, topk or expert_alignment are too large");
}

std::int64_t most_recv_rows(const EPConfig& config, const EPDispatchOptions& options) {
  if (options.rows == EPRows::compact) return config.world_size * config.max_tokens;
  return max_grouped_rows(config, options);
}

std::int64_t grown_output_rows(std::int64_t rows, std::int64_t largest) {
  if (largest <= rows) return rows;
  require(largest <= std::int64_t{1} << 60, "grown_output_rows: largest = ", largest,
          ", expected at most 2^60");
  return (largest + growth_rows - 1) / growth_rows * growth_rows * 2;
}

}  // namespace waybill
