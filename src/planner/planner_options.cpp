#include "waybill/planner/planner_options.h"

#include <cmath>

#include "waybill/core/error.h"
#include "waybill/core/topology.h"

namespace waybill {
namespace {

constexpr std::int64_t most_tokens = std::int64_t{1} << 40;
constexpr std::int64_t most_hidden = std::int64_t{1} << 24;

void check_range(const char* who, const char* field, std::int64_t got, std::int64_t low,
                 std::int64_t high) {
  require(low <= got && got <= high, who, ": ", field, " = ", got, ", expected ", low, "..", high);
}

void check_positive(const char* who, const char* field, double got, bool zero_too = false) {
  require(std::isfinite(got) && (zero_too ? got >= 0 : got > 0), who, ": ", field, " = ", got,
          ", expected a number ", zero_too ? ">= 0" : "> 0");
}

void check_speed(const char* who, const char* field, double got) {
  require(LinkSpeeds::makes_sense(got), who, ": ", field, " = ", got, ", expected ",
          LinkSpeeds::least, " to ", LinkSpeeds::most, " bytes per second");
}

}  // namespace

std::string to_string(const AttentionMask& mask) {
  if (mask.has_window()) return concat(to_string(mask.kind), ", window ", mask.window);
  return std::string(to_string(mask.kind));
}

void PlannerOptions::check(const char* who) const {
  check_range(who, "world_size", world_size, 1, max_world_size);
  check_range(who, "tokens_per_rank", tokens_per_rank, 0, most_tokens / world_size);
  check_range(who, "model.q_hidden", model.q_hidden, 1, most_hidden);
  check_range(who, "model.kv_hidden", model.kv_hidden, 1, most_hidden);
  check_range(who, "mask.window", mask.window, 0, most_tokens);
  require(!mask.is_full() || mask.window == 0, who, ": mask.window = ", mask.window,
          ", expected 0: the mask is full");
  check_range(who, "max_tokens_per_rank", max_tokens_per_rank, 0, most_tokens);
  check_range(who, "block_tokens", block_tokens, 1, std::int64_t{1} << 20);
  require(std::isfinite(imbalance_target) && imbalance_target > 1, who,
          ": imbalance_target = ", imbalance_target, ", expected a number > 1");
  check_positive(who, "byte_weight", byte_weight, true);
  check_speed(who, "hardware.nvlink_bytes_per_second", hardware.nvlink_bytes_per_second);
  check_speed(who, "hardware.network_bytes_per_second", hardware.network_bytes_per_second);
  check_positive(who, "hardware.message_seconds", hardware.message_seconds, true);
  check_positive(who, "hardware.pairs_per_second", hardware.pairs_per_second, true);
  check_range(who, "hardware.row_pairs", hardware.row_pairs, 0, std::int64_t{1} << 20);
  check_range(who, "hardware.shard_pairs", hardware.shard_pairs, 0, std::int64_t{1} << 40);
  require(byte_weight == 0 || hardware.pairs_per_second > 0, who, ": byte_weight = ", byte_weight,
          " needs hardware.pairs_per_second, got 0");
  require(hardware.ranks_per_node >= 1, who,
          ": hardware.ranks_per_node = ", hardware.ranks_per_node, ", expected >= 1");
}

}  // namespace waybill
