#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <sstream>
#include <string>

#include "planner_cases.h"
#include "support/expect_error.h"
#include "waybill/planner/planner.h"
#include "waybill/simulate/check.h"

namespace waybill {
namespace {

using test::Lengths;
using test::rejects;

std::string text_of(const std::vector<Finding>& findings) {
  return findings.empty() ? "" : to_string(findings.front());
}

/// Tokens of the plan's documents.
Lengths lengths_of(const QkvPlan& plan) {
  Lengths lengths(static_cast<std::size_t>(plan.num_documents()));
  for (std::size_t d = 0; d < lengths.size(); ++d) {
    for (auto i = plan.doc_shard_offsets[d]; i < plan.doc_shard_offsets[d + 1]; ++i)
      lengths[d] +=
          plan.shard_len[static_cast<std::size_t>(plan.doc_shards[static_cast<std::size_t>(i)])];
  }
  return lengths;
}

/// (query, key) pairs of each rank, one by one.
Lengths brute_force_work(const AttentionPlan& plan) {
  Lengths work(static_cast<std::size_t>(plan.plan.world_size));
  const Lengths lengths = lengths_of(plan.plan);
  for (std::int64_t d = 0; d < plan.plan.num_documents(); ++d) {
    const std::int64_t tokens = lengths[static_cast<std::size_t>(d)];
    std::int64_t query = 0;
    for (auto i = plan.plan.doc_shard_offsets[static_cast<std::size_t>(d)];
         i < plan.plan.doc_shard_offsets[static_cast<std::size_t>(d) + 1]; ++i) {
      const auto shard =
          static_cast<std::size_t>(plan.plan.doc_shards[static_cast<std::size_t>(i)]);
      for (std::int64_t n = 0; n < plan.plan.shard_len[shard]; ++n, ++query) {
        for (std::int64_t key = 0; key < tokens; ++key) {
          const std::int64_t window = plan.options.mask.window;
          const std::int64_t chunk = plan.options.mask.chunk;
          const std::int64_t prefix = plan.options.mask_of(d).prefix;
          const bool meets = plan.options.mask.kind == MaskKind::full ||
                             std::max(query, key) < prefix ||
                             (key <= query && (window == 0 || query - key < window));
          if (meets && (chunk == 0 || query / chunk == key / chunk))
            ++work[static_cast<std::size_t>(plan.plan.q_dst[shard])];
        }
      }
    }
  }
  return work;
}

TEST(PlanAttention, RandomFlatDocumentsGiveValidPlans) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Random random(seed);
    const PlannerOptions options = test::random_options(random, seed % 3 == 0);
    const Lengths lengths = test::random_flat(random, options);
    const AttentionPlan plan = plan_attention(lengths, options);
    ASSERT_EQ(text_of(validate(plan)), "") << "seed " << seed;
    if (options.mask.kind != MaskKind::prefix) {
      ASSERT_EQ(plan.plan.needs_whole_documents(),
                options.mask.kind == MaskKind::full && options.mask.chunk == 0);
    }
    ASSERT_EQ(lengths_of(plan.plan), lengths) << "seed " << seed;
    // Home is where packing in order puts every token.
    std::int64_t left = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    for (const std::int64_t tokens : plan.home_tokens) {
      ASSERT_EQ(tokens, std::min(left, options.tokens_per_rank)) << "seed " << seed;
      left -= tokens;
    }
  }
}

TEST(PlanAttention, RandomListsGiveValidPlans) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed + 1000);
    const PlannerOptions options = test::random_options(random, seed % 3 == 0);
    const auto lists = test::random_lists(random, options);
    const AttentionPlan plan = plan_attention(lists, options);
    ASSERT_EQ(text_of(validate(plan)), "") << "seed " << seed;
    Lengths all;
    for (std::size_t r = 0; r < lists.size(); ++r) {
      all.insert(all.end(), lists[r].begin(), lists[r].end());
      ASSERT_EQ(plan.home_tokens[r],
                std::accumulate(lists[r].begin(), lists[r].end(), std::int64_t{0}));
    }
    ASSERT_EQ(lengths_of(plan.plan), all);
  }
}

TEST(PlanAttention, WorkIsTheAreaOfTheMask) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    Random random(seed);
    PlannerOptions options = test::random_options(random, seed % 3 == 0);
    options.tokens_per_rank = 1 + random.below(120);
    if (options.mask.kind == MaskKind::prefix) {
      options.mask.prefix = options.tokens_per_rank / 2;
    } else if (seed % 2 == 0) {
      options.mask.chunk = 1 + options.tokens_per_rank / 3;
    }
    const AttentionPlan plan = plan_attention(test::random_flat(random, options), options);
    ASSERT_EQ(plan.work, brute_force_work(plan)) << "seed " << seed;
  }
}

TEST(PlanAttention, ShardsOfChunksNeedTheKeysOfTheirOwn) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    Random random(seed);
    PlannerOptions options = test::random_options(random);
    options.mask = {.kind = seed % 3 == 0 ? MaskKind::full : MaskKind::causal,
                    .chunk = 1 + random.below(500)};
    const std::int64_t chunk = options.mask.chunk;
    const Lengths lengths = test::random_flat(random, options);
    const AttentionPlan plan = plan_attention(lengths, options);
    ASSERT_EQ(lengths_of(plan.plan), lengths);
    for (std::int64_t d = 0; d < plan.plan.num_documents(); ++d) {
      Lengths ends{0};
      const std::int64_t first = plan.plan.doc_shard_offsets[static_cast<std::size_t>(d)];
      const std::int64_t last = plan.plan.doc_shard_offsets[static_cast<std::size_t>(d) + 1];
      for (std::int64_t i = first; i < last; ++i)
        ends.push_back(ends.back() + plan.plan.shard_len[static_cast<std::size_t>(i)]);
      for (std::size_t p = 0; p + 1 < ends.size(); ++p) {
        const auto shard = static_cast<std::int32_t>(first + static_cast<std::int64_t>(p));
        const std::int64_t begin = ends[p] / chunk * chunk;
        const std::int64_t end = std::min(begin + chunk, ends.back());
        ASSERT_LE(ends[p + 1], end) << "seed " << seed;
        ASSERT_EQ(ends[static_cast<std::size_t>(plan.plan.first_needed(shard))], begin);
        const auto needed =
            static_cast<std::size_t>(plan.plan.end_needed(shard, static_cast<std::int32_t>(p)));
        ASSERT_EQ(ends[needed], options.mask.looks_ahead() ? end : ends[p + 1]);
      }
    }
  }
}

TEST(PlanAttention, ShardsOfPrefixesNeedThemWhole) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    PlannerOptions options = test::random_options(random);
    options.tokens_per_rank = 1 + random.below(150);
    options.mask = {.kind = MaskKind::prefix};
    const Lengths lengths = test::random_flat(random, options);
    for (const std::int64_t length : lengths)
      options.prefixes.push_back(
          std::array<std::int64_t, 5>{0, 1, length, length + 5, random.below(length + 1)}.at(
              static_cast<std::size_t>(random.below(5))));
    if (lengths.empty()) continue;
    const AttentionPlan plan = plan_attention(lengths, options);
    ASSERT_EQ(lengths_of(plan.plan), lengths) << "seed " << seed;
    ASSERT_EQ(text_of(validate(plan)), "") << "seed " << seed;
    ASSERT_EQ(plan.work, brute_force_work(plan)) << "seed " << seed;
    ASSERT_EQ(rank_work(plan.plan), plan.work) << "seed " << seed;
    for (std::size_t d = 0; d < lengths.size(); ++d) {
      const std::int64_t prefix = std::min(options.prefixes[d], lengths[d]);
      std::int64_t begin = 0;
      for (auto i = plan.plan.doc_shard_offsets[d]; i < plan.plan.doc_shard_offsets[d + 1]; ++i) {
        const std::int32_t shard = plan.plan.doc_shards[static_cast<std::size_t>(i)];
        const std::int64_t end = begin + plan.plan.shard_len[static_cast<std::size_t>(shard)];
        ASSERT_EQ(plan.plan.is_causal(shard), options.prefixes[d] < 2 || begin >= prefix);
        ASSERT_TRUE(prefix < 2 || begin >= prefix || end <= prefix) << "seed " << seed;
        begin = end;
      }
    }
  }
}

TEST(PlanAttention, RefusesValuesThatNoEnumeratorHas) {
  PlannerOptions options{.world_size = 4, .tokens_per_rank = 256};
  options.mask.kind = static_cast<MaskKind>(9);
  EXPECT_TRUE(rejects([&] { (void)plan_attention(Lengths{5}, options); },
                      {"plan_attention: mask.kind = 9, expected causal, full or prefix"}));
  options.mask.kind = MaskKind::causal;
  options.kv_layout = static_cast<KvLayout>(9);
  EXPECT_TRUE(rejects([&] { (void)plan_attention(Lengths{5}, options); },
                      {"plan_attention: kv_layout = 9, expected per_query or per_rank"}));
}

TEST(PlanAttention, PrefixesOfNoneOrOneAreCausal) {
  const Lengths lengths{900, 100, 24};
  PlannerOptions options{.world_size = 4, .tokens_per_rank = 256};
  const QkvPlan causal = plan_attention(lengths, options).plan;
  options.mask = {.kind = MaskKind::prefix};
  EXPECT_EQ(plan_attention(lengths, options).plan, causal);
  options.prefixes = {0, 1, 0};
  EXPECT_EQ(plan_attention(lengths, options).plan, causal);
  options.prefixes = {900, 101, 24};
  const QkvPlan all = plan_attention(lengths, options).plan;
  EXPECT_TRUE(all.needs_whole_documents());
  options.prefixes = {900, 101};
  EXPECT_THROW((void)plan_attention(lengths, options), InvalidArgument);
  options.prefixes = {};
  options.mask.prefix = 1000;
  EXPECT_EQ(plan_attention(lengths, options).plan, all);
}

TEST(PlanAttention, ValidateNamesAMaskOfOtherRanges) {
  const Lengths lengths{900, 100, 24};
  for (const AttentionMask& made :
       {AttentionMask{}, AttentionMask{.chunk = 128}, AttentionMask{.window = 64},
        AttentionMask{.kind = MaskKind::full, .chunk = 128},
        AttentionMask{.kind = MaskKind::prefix, .prefix = 300}}) {
    AttentionPlan plan =
        plan_attention(lengths, {.world_size = 4, .tokens_per_rank = 256, .mask = made});
    for (const AttentionMask& said : {AttentionMask{.chunk = 96}, AttentionMask{.chunk = 256},
                                      AttentionMask{.kind = MaskKind::full},
                                      AttentionMask{.kind = MaskKind::prefix, .prefix = 200}}) {
      plan.options.mask = said;
      EXPECT_NE(text_of(validate(plan)).find("options.mask"), std::string::npos)
          << to_string(made) << " as " << to_string(said);
    }
  }
}

TEST(PlanAttention, ChunksOfALongDocumentAreEven) {
  PlannerOptions options{.world_size = 8, .tokens_per_rank = 16384, .mask = {.chunk = 8192}};
  const AttentionPlan even = plan_attention(Lengths{8 * 16384}, options);
  EXPECT_EQ(even.imbalance(), 1);
  EXPECT_EQ(even.limit_seconds(), 0);  // every rank has whole chunks
  options.mask.chunk = 7000;           // chunks lie across ranks
  const AttentionPlan across = plan_attention(Lengths{8 * 16384}, options);
  EXPECT_LE(across.imbalance(), 1.01);
  EXPECT_LT(std::ranges::max(across.kv_tokens), 3 * 16384 / 2);
}

TEST(PlanAttention, EveryByteOfSmallPlansArrives) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Random random(seed + 77);
    PlannerOptions options = test::random_options(random, seed % 3 == 0);
    options.tokens_per_rank = 1 + random.below(400);
    const AttentionPlan plan = plan_attention(test::random_flat(random, options), options);
    const QkvRouting routing = compute_qkv_routing(plan.plan);
    const DispatchCheck check =
        check_dispatch(plan.plan, routing, {.q_row_bytes = 16, .kv_row_bytes = 8});
    ASSERT_EQ(text_of(check.findings), "") << "seed " << seed;
  }
}

TEST(PlanAttention, ReachesTheTargetWithBlocksOfAnySize) {
  for (const std::int64_t block : {1, 16, 128}) {
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      Random random(seed);
      PlannerOptions options{.world_size = 16, .tokens_per_rank = 16384};
      options.block_tokens = block;
      const Lengths lengths = test::random_documents(random, 16 * 16384, 60000);
      const AttentionPlan plan = plan_attention(lengths, options);
      EXPECT_LE(plan.imbalance(), 1.01) << "seed " << seed;
      EXPECT_TRUE(plan.balanced());
    }
  }
}

// Even with a handful of tokens the work is even up to a block, but for rare cases.
TEST(PlanAttention, IsBalancedWithFewTokens) {
  int num_over = 0;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    Random random(seed + 5000);
    PlannerOptions options = test::random_options(random, seed % 3 == 0);
    options.tokens_per_rank = 1 + random.below(200);
    const AttentionPlan plan = plan_attention(test::random_flat(random, options), options);
    num_over += plan.balanced() ? 0 : 1;
  }
  EXPECT_LE(num_over, 3);
}

TEST(PlanAttention, NoPlanHasFewerBytesInThanTheBound) {
  int num_close = 0;
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    Random random(seed + 9000);
    PlannerOptions options = test::random_options(random, seed % 3 == 0);
    options.kv_layout = KvLayout::per_rank;
    const AttentionPlan plan = plan_attention(test::random_flat(random, options), options);
    const Lengths in = plan.bytes_in();
    const std::int64_t most = *std::max_element(in.begin(), in.end());
    ASSERT_LE(plan.least_bytes_in, most) << "seed " << seed;
    num_close += plan.least_bytes_in > 0 && most < 3 * plan.least_bytes_in ? 1 : 0;
  }
  EXPECT_GT(num_close, 100);  // and it is not idle
}

TEST(PlanAttention, OneDocumentOverAllRanks) {
  const PlannerOptions options{.world_size = 8, .tokens_per_rank = 4096};
  const AttentionPlan plan = plan_attention(Lengths{8 * 4096}, options);
  EXPECT_EQ(text_of(validate(plan)), "");
  EXPECT_LE(plan.imbalance(), 1.011);
}

/// A document over n ranks moves n * n / 2 times: with few tokens a rank that would be 10^12 hops.
TEST(PlanAttention, ManyRanksForOneDocument) {
  const std::vector<std::int64_t> one{std::int64_t{1} << 31};
  PlannerOptions options{.world_size = max_world_size, .tokens_per_rank = 2048};
  EXPECT_TRUE(rejects([&] { (void)plan_attention(one, options); },
                      {"hops", "expected at most 16777216", "relay = false"}));
  options.relay = false;
  const AttentionPlan plan = plan_attention(one, options);  // linear in ranks
  EXPECT_EQ(plan.plan.world_size, max_world_size);
  EXPECT_LE(plan.imbalance(), 1.02);
  std::int64_t in = 0;
  std::int64_t out = 0;
  for (const LinkBytes& link : plan.links) {
    in += link.in() / options.model.kv_row_bytes();
    out += link.out() / options.model.kv_row_bytes();
  }
  EXPECT_EQ(in, out);
}

TEST(PlanAttention, BalancedDocumentsStayAtHome) {
  const PlannerOptions options{.world_size = 4, .tokens_per_rank = 1000};
  const AttentionPlan plan = plan_attention(Lengths(40, 100), options);
  EXPECT_EQ(plan.plan.num_shards(), 40);
  for (const LinkBytes& link : plan.links) EXPECT_EQ(link, LinkBytes{});
  EXPECT_TRUE(plan.relay.hops.empty());
  EXPECT_DOUBLE_EQ(plan.imbalance(), 1);
  EXPECT_EQ(plan.limit_seconds(), 0);
}

TEST(PlanAttention, NoDocuments) {
  const AttentionPlan plan = plan_attention(Lengths{}, {.world_size = 3});
  EXPECT_EQ(plan.plan.num_shards(), 0);
  EXPECT_EQ(plan.work, Lengths(3));
  EXPECT_DOUBLE_EQ(plan.imbalance(), 1);
  EXPECT_TRUE(plan.balanced());
  EXPECT_EQ(text_of(validate(plan)), "");
}

TEST(PlanAttention, TokensPerRankZeroFillsRanksEvenly) {
  const AttentionPlan plan =
      plan_attention(Lengths{10, 1, 2}, {.world_size = 4, .tokens_per_rank = 0});
  EXPECT_EQ(plan.home_tokens, (Lengths{4, 4, 4, 1}));
  EXPECT_EQ(plan.options.tokens_per_rank, 4);
}

TEST(PlanAttention, KeptMemoryChangesNothing) {
  Planner planner;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const PlannerOptions options = test::random_options(random, seed % 3 == 0);
    const Lengths lengths = test::random_flat(random, options);
    ASSERT_EQ(planner.plan(lengths, options), plan_attention(lengths, options));
    const auto lists = test::random_lists(random, options);
    ASSERT_EQ(planner.plan(lists, options), plan_attention(lists, options));
  }
}

TEST(PlanAttention, AnErrorLeavesTheLatestPlan) {
  Planner planner;
  const PlannerOptions options{.world_size = 2, .tokens_per_rank = 100};
  const AttentionPlan plan = planner.plan(Lengths{150, 20}, options);
  PlannerOptions tight = options;
  tight.max_tokens_per_rank = 50;
  EXPECT_THROW((void)planner.plan(Lengths{150, 20}, tight), InvalidArgument);
  EXPECT_THROW((void)planner.plan(Lengths{201}, options), InvalidArgument);
  EXPECT_EQ(planner.take(), plan);
}

TEST(PlanAttention, ByteWeightLoosensTheTarget) {
  Random random(5);
  PlannerOptions options{.world_size = 16, .tokens_per_rank = 8192};
  const Lengths lengths = test::random_documents(random, 16 * 8192, 40000);
  options.hardware.pairs_per_second = 1e12;
  const auto cost = [&](const AttentionPlan& plan) {
    return static_cast<double>(*std::max_element(plan.work.begin(), plan.work.end())) /
               options.hardware.pairs_per_second +
           options.byte_weight * plan.limit_seconds();
  };
  const AttentionPlan tight = plan_attention(lengths, options);
  options.byte_weight = 10;
  const AttentionPlan loose = plan_attention(lengths, options);
  EXPECT_LT(cost(loose), cost(tight));
  EXPECT_GT(loose.imbalance(), tight.imbalance());
  EXPECT_EQ(text_of(validate(loose)), "");
}

TEST(PlanAttention, ErrorsNameTheArgument) {
  const auto fails = [](const Lengths& lengths, const PlannerOptions& options,
                        std::initializer_list<std::string_view> parts) {
    return rejects([&] { (void)plan_attention(lengths, options); }, parts);
  };
  EXPECT_TRUE(fails({4, 0}, {}, {"plan_attention", "doc_lengths[1] = 0"}));
  EXPECT_TRUE(fails({9, 8}, {.world_size = 2, .tokens_per_rank = 8}, {"17 tokens", "16"}));
  EXPECT_TRUE(fails({4}, {.world_size = 0}, {"world_size = 0"}));
  EXPECT_TRUE(fails({4}, {.mask = {.chunk = -1}}, {"mask.chunk = -1"}));
  EXPECT_TRUE(fails({std::int64_t{1} << 28}, {.world_size = 4096, .mask = {.chunk = 1}},
                    {"mask.chunk = 1", "268435456 chunks, of at most 16777216"}));
  EXPECT_TRUE(fails({4}, {.block_tokens = 0}, {"block_tokens = 0"}));
  EXPECT_TRUE(fails({4}, {.imbalance_target = 1}, {"imbalance_target = 1"}));
  EXPECT_TRUE(fails({4}, {.byte_weight = 1}, {"byte_weight", "pairs_per_second"}));
  EXPECT_TRUE(fails({4}, {.mask = {.window = -1}}, {"mask.window = -1"}));
  EXPECT_TRUE(fails({4}, {.mask = {.window = 2, .kind = MaskKind::full}},
                    {"mask.window = 2", "the mask is full"}));
  EXPECT_TRUE(rejects([] { (void)plan_attention(std::vector<Lengths>{{4}}, {.world_size = 2}); },
                      {"1 lists", "world_size 2"}));
  EXPECT_TRUE(rejects(
      [] {
        (void)plan_attention(std::vector<Lengths>{{4}, {5, 6}},
                             {.world_size = 2, .tokens_per_rank = 8});
      },
      {"doc_lengths[1]", "11 tokens", "8"}));
}

TEST(PlanAttention, PrintsItsFigures) {
  const AttentionPlan plan =
      plan_attention(Lengths{150, 20}, {.world_size = 2, .tokens_per_rank = 100});
  const std::string text = to_string(plan);
  for (const char* part : {"2 ranks", "2 documents", "largest / mean", "bytes in", "limit"})
    EXPECT_NE(text.find(part), std::string::npos) << part << '\n' << text;
}

// Who prints a plan wants to see what is odd about it.
TEST(PlanAttention, AnythingPrints) {
  const auto text = [](const AttentionPlan& plan) {
    std::ostringstream stream;
    stream << plan;
    return stream.str();
  };
  EXPECT_NE(text(AttentionPlan{}).find("0 ranks"), std::string::npos) << text(AttentionPlan{});
  AttentionPlan plan =
      plan_attention(Lengths{150, 20, 90, 7}, {.world_size = 4, .tokens_per_rank = 100});
  plan.options.hardware.ranks_per_node = 2;
  plan.plan.q_dst[0] = 99;
  EXPECT_NE(text(plan).find("once per node unknown ("), std::string::npos) << text(plan);
  EXPECT_NE(text(plan).find("q_dst: rank 0, shard 0: got 99"), std::string::npos) << text(plan);
  for (const std::int32_t ranks : {0, -1}) {
    plan.options.hardware.ranks_per_node = ranks;
    EXPECT_NE(text(plan).find("ranks_per_node = "), std::string::npos) << text(plan);
  }
  plan.work.clear();
  plan.links.clear();
  plan.home_tokens.clear();
  EXPECT_FALSE(text(plan).empty());
}

}  // namespace
}  // namespace waybill
