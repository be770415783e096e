// Dispatch and combine of experts' tokens on GPUs over several logical nodes, against the
// simulation.

#include <gtest/gtest.h>

#include "cuda/gpu_expert_rounds.h"

namespace waybill {
namespace {

using test::check_golden_cases;
using test::check_random;
using test::config_of;
using test::on_nodes;

/// num_nodes nodes of ranks_per_node ranks.
EPConfig small(std::int32_t num_nodes, std::int32_t ranks_per_node, std::int64_t max_tokens = 70) {
  const std::int32_t world = num_nodes * ranks_per_node;
  return on_nodes(config_of(world, 3 * world, 4, max_tokens, 64), ranks_per_node);
}

/// The same with more tokens than a low-latency layer of one node has.
EPConfig with_more(EPConfig config) {
  config.max_tokens += 128;
  return config;
}
void check_both(const EPConfig& config, const EPDispatchOptions& options, int count,
                std::uint64_t number, const std::vector<int>& sms) {
  check_random(config, options, count, number, sms);
  if (!testing::Test::HasFailure())
    check_random(with_more(config), options, count, number + 1000, sms);
}
void check_orders_both(const EPConfig& config, std::uint64_t number) {
  test::check_random_orders(config, number);
  test::check_random_orders(with_more(config), number + 1000);
}

TEST(GpuExpertNodes, two_nodes_of_one_rank) { check_both(small(2, 1), {}, 8, 101, {4, 1}); }
TEST(GpuExpertNodes, two_nodes_of_two) { check_both(small(2, 2), {}, 10, 102, {4, 1, 8}); }
TEST(GpuExpertNodes, two_nodes_of_four) { check_both(small(2, 4), {}, 8, 103, {4, 2}); }
TEST(GpuExpertNodes, four_nodes_of_two) { check_both(small(4, 2), {}, 8, 104, {4, 1}); }
TEST(GpuExpertNodes, three_nodes_of_one) { check_both(small(3, 1), {}, 8, 121, {4, 1, 8}); }
TEST(GpuExpertNodes, many_rounds) { check_random(small(2, 2, 50), {}, 100, 105, {4, 1, 8, 2}); }
TEST(GpuExpertNodes, tokens_of_several_tiles) {
  check_random(on_nodes(config_of(4, 64, 8, 600, 128), 2), {}, 8, 106, {8, 3});
}
/// Sums for other nodes are made in pieces, the last one shorter.
TEST(GpuExpertNodes, tokens_of_several_pieces) {
  check_random(on_nodes(config_of(2, 8, 4, 2100, 64), 1), {}, 5, 122, {8, 1});
  EPDispatchOptions compact;
  compact.rows = EPRows::compact;
  check_random(on_nodes(config_of(3, 9, 4, 2049, 32), 1), compact, 5, 123, {8});
}
TEST(GpuExpertNodes, rows_of_14_kib) {
  check_random(on_nodes(config_of(4, 64, 8, 40, 7168, DType::bfloat16, DType::bfloat16), 2), {}, 6,
               124, {8});
  check_random(on_nodes(config_of(4, 64, 8, 130, 7168, DType::bfloat16, DType::bfloat16), 2), {}, 6,
               107, {8});
}
TEST(GpuExpertNodes, rows_of_several_pieces) {
  check_both(on_nodes(config_of(2, 8, 2, 60, 16384, DType::float32), 1), {}, 6, 108, {4});
}
TEST(GpuExpertNodes, rows_that_do_not_suit_bulk_copies) {
  check_both(on_nodes(config_of(4, 8, 3, 70, 37), 2), {}, 6, 109, {4});
  check_both(on_nodes(config_of(2, 6, 5, 70, 101, DType::float16, DType::float16), 1), {}, 6, 110,
             {4});
  check_both(on_nodes(config_of(2, 6, 1, 70, 5, DType::float32), 1), {}, 6, 111, {4});
}
TEST(GpuExpertNodes, thirty_two_choices) {
  check_both(on_nodes(config_of(4, 64, 32, 50, 64), 2), {}, 6, 112, {8});
}
TEST(GpuExpertNodes, padded_rows) {
  EPDispatchOptions options;
  options.expert_alignment = 8;
  check_both(small(2, 2), options, 8, 113, {4});
}
TEST(GpuExpertNodes, compact_rows) {
  EPDispatchOptions options;
  options.rows = EPRows::compact;
  check_both(small(2, 2), options, 8, 114, {4});
  check_both(small(4, 2), options, 6, 115, {4});
  options.expert_alignment = 4;
  check_both(on_nodes(config_of(4, 12, 4, 90, 40, DType::float32, DType::float16), 2), options, 6,
             116, {4});
}
TEST(GpuExpertNodes, quantized_payload) {
  EPDispatchOptions options;
  options.payload = EPPayload::quantized;
  check_both(on_nodes(config_of(4, 12, 4, 60, 512), 2), options, 8, 117, {4});
  check_both(on_nodes(config_of(2, 12, 4, 60, 384, DType::float32), 1), options, 6, 118, {4});
  options.rows = EPRows::compact;
  options.dropped_id = -1;
  Random random(119);
  const EPConfig config = on_nodes(config_of(4, 16, 4, 60, 1024, DType::float16), 2);
  auto sample = test::random_case(config, random, {.edges = false, .drop = 0});
  for (std::size_t i = 0; i < 1024; ++i)
    sample.tokens[0].as<std::uint16_t>()[i] = 0;  // zero groups
  sample.ids[0].as<std::int32_t>()[0] = -1;
  std::vector<test::Round> rounds;
  rounds.push_back(test::make_round("zeros and -1", std::move(sample), options, random));
  test::check_rounds(config, options, rounds, {4});
}
TEST(GpuExpertNodes, quantised_to_other_formats) {
  EPDispatchOptions options;
  for (const char* const name : {"float8_ue8m0", "nvfp4"}) {
    options.payload = EPPayload::from_name(name, "payload");
    check_both(on_nodes(config_of(2, 12, 4, 60, 384), 1), options, 3, 128, {8});
  }
}
TEST(GpuExpertNodes, an_order_that_the_caller_chose) {
  check_orders_both(on_nodes(config_of(4, 16, 3, 60, 64), 2), 120);
}
/// Each rank in turn, with few tokens and with many. A rank without tokens has no tensors, and ids
/// that its peers read all the same.
TEST(GpuExpertNodes, a_rank_without_tokens) {
  Random random(125);
  for (const auto& [nodes, ranks] : {std::pair{2, 1}, {2, 2}, {4, 1}}) {
    for (const std::int64_t max_tokens : {1, 128, 129, 300}) {
      const EPConfig config = small(nodes, ranks, max_tokens);
      std::vector<test::Round> rounds;
      for (std::int32_t rank = 0; rank < config.world_size; ++rank) {
        auto sample = test::random_case(config, random, {.drop = 0});
        test::empty_rank(sample, rank);
        rounds.push_back(
            test::make_round(concat("rank ", rank, " without"), std::move(sample), {}, random));
      }
      SCOPED_TRACE(concat(nodes, " x ", ranks, ", ", max_tokens, " tokens"));
      test::check_rounds(config, {}, rounds, {4});
      if (testing::Test::HasFailure()) return;
    }
  }
}
TEST(GpuExpertNodes, golden_cases_of_several_nodes) {
  EXPECT_EQ(check_golden_cases([](const EPConfig& config) { return !config.is_intra_node(); }), 18);
}

}  // namespace
}  // namespace waybill
