#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "support/sequence_case.h"
#include "waybill/planner/planner.h"

namespace waybill::test {

/// A schedule in which anybody who has rows may forward them, whole entries or parts of them, also
/// through ranks that do not need them. Some entries have no hops.
inline RelaySchedule random_relay(const SparseMetadata& metadata, std::uint64_t seed) {
  Random random(seed);
  RelaySchedule relay;
  relay.links.resize(metadata.world_size);
  std::int32_t home = 0;
  for (std::int64_t j = 0; j < metadata.num_entries(); ++j) {
    while (j >= metadata.rank_offsets[home + 1]) ++home;
    std::vector<std::int32_t> receivers;
    for (auto c = metadata.destination_begin(j); c < metadata.destination_end(j); ++c) {
      const std::int32_t dst = metadata.dst_rank[c];
      if (dst != home && !std::ranges::count(receivers, dst)) receivers.push_back(dst);
    }
    const std::int64_t rows = metadata.seq_len[j];
    if (rows == 0 || receivers.empty() || random.below(5) == 0) continue;
    const std::int64_t parts = std::min<std::int64_t>(rows, 1 + random.below(3));
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t begin = rows * part / parts;
      const std::int64_t count = rows * (part + 1) / parts - begin;
      std::vector<std::pair<std::int32_t, std::int32_t>> holders{{home, -1}};  // rank, hop
      for (const std::int32_t dst : receivers) {
        auto [src, after] = holders[random.below(std::ssize(holders))];
        const auto hop = [&](std::int32_t from, std::int32_t to, std::int32_t feed) {
          relay.hops.push_back({from, to, static_cast<std::int32_t>(j), 0, begin, count, feed});
          return static_cast<std::int32_t>(relay.hops.size()) - 1;
        };
        const auto through = static_cast<std::int32_t>(random.below(metadata.world_size));
        const bool stranger = through != home && !std::ranges::count(receivers, through);
        if (stranger && random.below(4) == 0) {
          after = hop(src, through, after);
          src = through;
        }
        holders.emplace_back(dst, hop(src, dst, after));
      }
    }
  }
  return relay;
}

}  // namespace waybill::test
