#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/moe/ep_config.h"

namespace waybill::cli {

/// Topk slots of experts, one token after the other.
struct TopkIds {
  std::int32_t topk = 0;
  std::vector<std::int32_t> ids;  ///< [tokens, topk]; -1: dropped
};

/// Text with a token a line: as many ids in each, separated by blanks or commas; -1 is a dropped
/// topk slot; empty lines are passed over.
/// @throws IoError naming line, got and expected
[[nodiscard]] TopkIds read_topk_ids(std::string_view text, const std::string& name);

/// Consecutive experts in groups of the same size; a token goes to experts of so many groups at
/// most.
struct GroupLimit {
  std::int32_t num_groups = 1;
  std::int32_t top_groups = 1;
};

/// Distinct experts for each token. @param skew 0: all as likely; else the n-th in an order that is
/// drawn first is 1 / n^skew as likely as the first (Zipf)
/// @param limit of the groups that a token draws first, all as likely; they have topk experts
[[nodiscard]] TopkIds draw_topk_ids(std::int64_t num_tokens, std::int32_t topk,
                                    std::int32_t num_experts, double skew, std::uint64_t seed,
                                    const GroupLimit& limit = {});

/// The tokens in equal parts, the first ranks one more; a dropped topk slot is config.num_experts.
/// Sets max_tokens and topk of the config. @throws IoError for an id that is no expert
[[nodiscard]] std::vector<std::vector<std::int32_t>> ids_of_ranks(const TopkIds& topk_slots,
                                                                  EPConfig& config,
                                                                  const std::string& name);

}  // namespace waybill::cli
