#include "waybill/planner/attention_mask.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "waybill/core/error.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill {
namespace {

/// Whether a query meets a key, said once more.
bool meets(const AttentionMask& mask, std::int64_t query, std::int64_t key) {
  if (mask.chunk > 0 && query / mask.chunk != key / mask.chunk) return false;
  if (mask.kind == MaskKind::full || (query < mask.prefix && key < mask.prefix)) return true;
  return key <= query && (mask.window == 0 || query - key < mask.window);
}

std::vector<AttentionMask> masks() {
  std::vector<AttentionMask> all{{.kind = MaskKind::full}};
  for (const std::int64_t window : {0, 1, 2, 5, 7, 40}) all.push_back({.window = window});
  for (const std::int64_t chunk : {1, 3, 8, 20, 21}) {
    all.push_back({.chunk = chunk});
    all.push_back({.window = 4, .chunk = chunk});
    all.push_back({.kind = MaskKind::full, .chunk = chunk});
  }
  for (const std::int64_t prefix : {0, 1, 2, 7, 19, 20, 21, 90})
    all.push_back({.kind = MaskKind::prefix, .prefix = prefix});
  return all;
}

TEST(AttentionMask, CountsTheKeysAndPairsOfEveryRangeOfQueries) {
  constexpr std::int64_t doc_len = 20;
  for (const AttentionMask& mask : masks()) {
    for (std::int64_t begin = 0; begin < doc_len; ++begin) {
      for (std::int64_t end = begin + 1; end <= doc_len; ++end) {
        std::int64_t pairs = 0;
        TokenRange keys{doc_len, 0};
        for (std::int64_t query = begin; query < end; ++query) {
          for (std::int64_t key = 0; key < doc_len; ++key) {
            if (!meets(mask, query, key)) continue;
            ++pairs;
            keys = {std::min(keys.begin, key), std::max(keys.end, key + 1)};
          }
        }
        EXPECT_EQ(mask.pairs(begin, end, doc_len), pairs) << to_string(mask) << ' ' << begin;
        EXPECT_EQ(mask.keys(begin, end, doc_len), keys) << to_string(mask) << ' ' << begin;
      }
      EXPECT_EQ(mask.pairs(begin, begin, doc_len), 0);
    }
    bool ahead = false;
    bool moves_on = false;
    for (std::int64_t query = 0; query < doc_len; ++query) {
      const bool later = mask.keys(query, query + 1, doc_len).end > query + 1;
      ahead = ahead || later;
      EXPECT_TRUE(!later || mask.looks_ahead_at(query)) << to_string(mask) << ' ' << query;
      moves_on = moves_on || mask.keys(query, query + 1, doc_len).begin > 0;
    }
    EXPECT_TRUE(!ahead || mask.looks_ahead()) << to_string(mask);
    EXPECT_TRUE(!moves_on || mask.moves_on()) << to_string(mask);
  }
}

TEST(AttentionMask, CountsTheLongestDocument) {
  const std::int64_t longest = std::int64_t{1} << 31;
  const AttentionMask full{.kind = MaskKind::full};
  EXPECT_EQ(AttentionMask{}.pairs(0, longest, longest), longest / 2 * (longest + 1));
  EXPECT_EQ(full.pairs(0, longest, longest), longest * longest);
  const AttentionMask prefix{.kind = MaskKind::prefix, .prefix = longest};
  EXPECT_EQ(prefix.pairs(0, longest, longest), longest * longest);
}

TEST(AttentionMask, FindsWhereWorkBeginsAndEnds) {
  constexpr std::int64_t doc_len = 4000;
  for (const AttentionMask& mask :
       {AttentionMask{}, AttentionMask{.window = 300}, AttentionMask{.window = 9000},
        AttentionMask{.kind = MaskKind::full},
        AttentionMask{.kind = MaskKind::prefix, .prefix = 900},
        AttentionMask{.kind = MaskKind::prefix, .prefix = 9000}}) {
    for (const std::int64_t row : {0, 40}) {
      const auto work = [&](std::int64_t begin, std::int64_t end) {
        return mask.pairs(begin, end, doc_len) + row * (end - begin);
      };
      for (const std::int64_t begin : {0, 17, 299, 301, 2000}) {
        for (const std::int64_t rows : {50, 1000, 1999}) {
          const std::int64_t end = begin + rows;
          const auto wanted = static_cast<double>(work(begin, end));
          const auto slope = static_cast<double>(mask.keys(end - 1, end, doc_len).rows() + row);
          const double found =
              mask.begin_for(static_cast<double>(end), wanted, doc_len, static_cast<double>(row));
          // Its error is a few queries' keys, by the slope where queries have fewest.
          EXPECT_NEAR(static_cast<double>(work(static_cast<std::int64_t>(found), end)), wanted,
                      2 * slope + static_cast<double>(rows))
              << to_string(mask) << ' ' << begin << ' ' << end;
          const std::int64_t last = mask.end_for(begin, wanted, doc_len, static_cast<double>(row));
          EXPECT_NEAR(static_cast<double>(work(begin, last)), wanted,
                      2 * slope + static_cast<double>(rows))
              << to_string(mask) << ' ' << begin << ' ' << end;
        }
      }
    }
  }
}

TEST(AttentionMask, EndsWhereKeysNoLongerFit) {
  EXPECT_EQ(AttentionMask{}.end_within(30, 100), 30);
  EXPECT_EQ(AttentionMask{}.end_within(300, 100), 100);
  EXPECT_EQ((AttentionMask{.kind = MaskKind::full}.end_within(99, 100)), 0);
  EXPECT_EQ((AttentionMask{.kind = MaskKind::full}.end_within(100, 100)), 100);
  EXPECT_EQ((AttentionMask{.window = 20}.end_within(30, 100)), 100);
  const AttentionMask prefix{.kind = MaskKind::prefix, .prefix = 40};
  EXPECT_EQ(prefix.end_within(39, 100), 0);
  EXPECT_EQ(prefix.end_within(40, 100), 40);
  EXPECT_EQ(prefix.end_within(70, 100), 70);
  EXPECT_EQ(prefix.end_within(30, 30), 30);
}

TEST(AttentionMask, HasAName) {
  EXPECT_EQ(to_string(AttentionMask{}), "causal");
  EXPECT_EQ(to_string(AttentionMask{.kind = MaskKind::full}), "full");
  EXPECT_EQ(to_string(AttentionMask{.window = 7}), "causal, window 7");
  EXPECT_EQ(to_string(AttentionMask{.window = 7, .chunk = 9}), "causal, window 7, chunks of 9");
  EXPECT_EQ(mask_from_name("test", "full"), MaskKind::full);
  EXPECT_EQ(to_string(AttentionMask{.kind = MaskKind::prefix, .prefix = 9}), "prefix of 9");
  EXPECT_EQ(mask_from_name("test", "prefix"), MaskKind::prefix);
  EXPECT_THROW((void)mask_from_name("test", "sinks"), InvalidArgument);
}

TEST(AttentionMask, IsFullInAPlanThatNeedsWholeDocuments) {
  QkvPlan plan{.world_size = 1,
               .rank_shard_offsets = {0, 2},
               .shard_len = {3, 4},
               .q_dst = {0, 0},
               .doc_shard_offsets = {0, 2},
               .doc_shards = {0, 1},
               .kv_begin = {}};
  const AttentionMask full{.kind = MaskKind::full};
  const AttentionMask window{.window = 2};
  EXPECT_EQ(AttentionMask{}.as_in(plan, "test"), AttentionMask{});
  EXPECT_EQ(window.as_in(plan, "test"), window);
  EXPECT_THROW((void)full.as_in(plan, "test"), InvalidArgument);
  plan.need_whole_documents();
  EXPECT_EQ(AttentionMask{}.as_in(plan, "test"), full);
  EXPECT_EQ(full.as_in(plan, "test"), full);
  EXPECT_THROW((void)window.as_in(plan, "test"), InvalidArgument);
  const AttentionMask chunks{.kind = MaskKind::full, .chunk = 3};
  EXPECT_EQ(chunks.as_in(plan, "test"), chunks);
  EXPECT_THROW((void)AttentionMask{.chunk = 3}.as_in(plan, "test"), InvalidArgument);
  plan.kv_end = {1, 0};
  const AttentionMask prefix{.kind = MaskKind::prefix, .prefix = 3};
  EXPECT_EQ(AttentionMask{}.as_in(plan, "test"), prefix);
  EXPECT_EQ((AttentionMask{.kind = MaskKind::prefix}.as_in(plan, "test")), prefix);
  EXPECT_THROW((void)full.as_in(plan, "test"), InvalidArgument);
  EXPECT_THROW((void)window.as_in(plan, "test"), InvalidArgument);
}

TEST(AttentionMask, RefusesWhatMakesNoSense) {
  EXPECT_THROW((AttentionMask{.prefix = 1}.check("test")), InvalidArgument);
  EXPECT_THROW((AttentionMask{.kind = MaskKind::prefix, .prefix = -1}.check("test")),
               InvalidArgument);
  EXPECT_THROW((AttentionMask{.window = 4, .kind = MaskKind::prefix}.check("test")),
               InvalidArgument);
  EXPECT_THROW((AttentionMask{.kind = MaskKind::prefix, .chunk = 4}.check("test")),
               InvalidArgument);
}

}  // namespace
}  // namespace waybill
