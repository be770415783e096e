#include "waybill/moe/ep_config.h"

#include <limits>

#include "core/number.h"
#include "moe/option_names.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

constexpr std::int64_t growth_rows = 1024;
constexpr double max_limit = 1e9;  // as even_experts has it
constexpr std::int64_t max_int32 = std::numeric_limits<std::int32_t>::max();

/// Repeated experts are allowed, so all topk slots of all ranks may meet on one rank.
std::int64_t max_grouped_rows(const EPConfig& config, const EPDispatchOptions& options) {
  return config.world_size * config.max_tokens * config.topk +
         options.slots_per_rank(config) * (options.expert_alignment - 1);
}

}  // namespace

void EPConfig::check(const char* who) const {
  const auto check_range = [&](const char* field, std::int64_t value, std::int64_t first,
                               std::int64_t last) {
    require(first <= value && value <= last, who, ": ", field, " = ", value, ", expected ", first,
            "..", last);
  };
  check_range("max_tokens", max_tokens, 1, max_int32);
  check_range("hidden", hidden, 1, max_int32);
  check_range("topk", topk, 1, max_topk);
  check_range("world_size", world_size, 1, max_world_size);
  check_range("rank", rank, 0, world_size - 1);
  require(1 <= local_world_size && world_size % local_world_size == 0, who,
          ": local_world_size = ", local_world_size,
          ", expected a divisor of world_size = ", world_size);
  require(1 <= num_experts && num_experts % world_size == 0, who, ": num_experts = ", num_experts,
          ", expected a multiple of world_size = ", world_size);
  require(detail::is_summed(token_dtype), who, ": token_dtype = ", token_dtype,
          ", expected bfloat16, float16, float32 or float64");
  require(detail::is_summed(weight_dtype), who, ": weight_dtype = ", weight_dtype,
          ", expected float32, float16, bfloat16 or float64");
}

void EPDispatchOptions::check(const EPConfig& config, const char* who) const {
  require(!dropped_id || *dropped_id == -1 || *dropped_id == config.num_experts, who,
          ": dropped_id = ", dropped_id.value_or(0),
          ", expected -1 or num_experts = ", config.num_experts);
  require(1 <= expert_alignment && expert_alignment <= max_int32, who,
          ": expert_alignment = ", expert_alignment, ", expected 1..", max_int32);
  payload.check(config.token_dtype, config.hidden, who);
  require(0 <= spare_experts && spare_experts <= config.num_experts, who,
          ": spare_experts = ", spare_experts, ", expected 0..num_experts = ", config.num_experts);
  require(1 <= limit && limit < max_limit, who, ": limit = ", limit, ", expected >= 1");
  require(0 <= min_rows, who, ": min_rows = ", min_rows, ", expected >= 0");
  require(std::int64_t{config.world_size} * slots_per_rank(config) <= max_int32, who,
          ": spare_experts = ", spare_experts, ", expected fewer than 2^31 slots of all ranks");
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
