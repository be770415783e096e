#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "waybill/moe/expert_routing.h"

namespace waybill::bench {

/// Who sends what to which experts.
struct MoeWorkload {
  std::string name;
  EPConfig config;
  std::vector<std::vector<std::int32_t>> ids;  ///< one entry a rank, [T, K]
};

/// What moves, at most for one rank; in rows.
struct MoeRows {
  std::int64_t wire = 0;     ///< that leave a rank, or come from others
  std::int64_t slots = 0;    ///< the same where each topk slot has one
  std::int64_t local = 0;    ///< that stay, each token once
  std::int64_t copies = 0;   ///< grouped rows that are copies of others on the receiver
  std::int64_t grouped = 0;  ///< received, one a topk slot
  std::int64_t compact = 0;  ///< received, one a token
};
[[nodiscard]] MoeRows rows_of(const MoeWorkload& workload);

/// Distinct experts, all as likely.
[[nodiscard]] MoeWorkload uniform_moe(std::int32_t world_size, std::int64_t tokens,
                                      std::int64_t hidden, std::int32_t topk,
                                      std::int32_t num_experts);

/// Two ranks with the bytes of eight: as many rows cross the link of a rank, stay on it and are
/// copied on it as when eight ranks dispatch `tokens` tokens with the best 8 of 256 experts.
[[nodiscard]] MoeWorkload like_eight_ranks(std::int64_t tokens, std::int64_t hidden);

}  // namespace waybill::bench
