// Dispatch and combine of experts' tokens on GPUs, against the simulation.

#include <gtest/gtest.h>

#include "cuda/gpu_expert_rounds.h"
#include "waybill/experts/ep_all2all_layer.h"

namespace waybill {
namespace {

using test::check_golden_cases;
using test::check_random;
using test::check_random_orders;
using test::check_rounds;
using test::config_of;
using test::DeviceArena;
using test::DeviceInput;
using test::ExpertCase;
using test::ExpertRig;
using test::make_round;
using test::random_rounds;
using test::Round;

TEST(GpuExpert, one_rank) { check_random(config_of(1, 4, 2, 40, 64), {}, 8, 1); }
TEST(GpuExpert, two_ranks) { check_random(config_of(2, 8, 4, 150, 128), {}, 10, 2); }
TEST(GpuExpert, four_ranks_many_rounds) {
  check_random(config_of(4, 16, 3, 90, 64), {}, 100, 3, {4, 1, 8, 2});
}
/// A warp signals its rows in many groups, and a rank with few tokens copies them meanwhile.
TEST(GpuExpert, many_groups_per_channel) {
  check_random(config_of(2, 8, 4, 1500, 1024), {}, 4, 40, {1, 4});
}
TEST(GpuExpert, eight_ranks) {
  check_random(config_of(8, 64, 8, 60, 256, DType::bfloat16, DType::bfloat16), {}, 8, 4, {4, 1});
}
TEST(GpuExpert, rows_of_14_kib) { check_random(config_of(2, 256, 8, 130, 7168), {}, 6, 5, {8}); }
TEST(GpuExpert, rows_of_several_pieces) {
  check_random(config_of(2, 8, 2, 60, 16384, DType::float32), {}, 6, 6, {4});
}
TEST(GpuExpert, rows_that_do_not_suit_bulk_copies) {
  check_random(config_of(2, 6, 3, 70, 37), {}, 6, 7, {4});
  check_random(config_of(3, 6, 5, 70, 101, DType::float16, DType::float16), {}, 6, 8, {4});
  check_random(config_of(2, 6, 1, 70, 5, DType::float32), {}, 6, 9, {4});
}
TEST(GpuExpert, thirty_two_choices) { check_random(config_of(2, 64, 32, 50, 64), {}, 6, 10, {8}); }
TEST(GpuExpert, more_experts_than_a_block_counts_at_once) {
  check_random(config_of(2, 8192, 8, 80, 64), {}, 6, 11, {8});
}
TEST(GpuExpert, padded_rows) {
  EPDispatchOptions options;
  options.expert_alignment = 8;
  check_random(config_of(2, 12, 3, 50, 64), options, 8, 12, {4});
}
TEST(GpuExpert, compact_rows) {
  EPDispatchOptions options;
  options.rows = EPRows::compact;
  check_random(config_of(2, 12, 4, 90, 64), options, 10, 13, {4});
  check_random(config_of(4, 16, 32, 40, 64, DType::float32, DType::float16), options, 6, 14, {4});
  options.expert_alignment = 4;
  check_random(config_of(2, 12, 4, 90, 40), options, 6, 15, {4});
}

/// Up to 128 tokens of a rank are sent before their places are known, more are not.
TEST(GpuExpert, some_ranks_have_few_tokens) {
  EPDispatchOptions options;
  check_random(config_of(2, 16, 4, 200, 128), options, 12, 21, {4, 24, 1});
  check_random(config_of(4, 16, 8, 180, 256), options, 12, 22, {8, 2});
  options.rows = EPRows::compact;
  check_random(config_of(4, 16, 8, 180, 256), options, 12, 23, {8, 2});
  options.expert_alignment = 8;
  options.rows = EPRows::grouped;
  check_random(config_of(2, 12, 3, 180, 16384, DType::float32), options, 6, 24, {8});
}

TEST(GpuExpert, quantized_payload) {
  EPDispatchOptions options;
  options.payload = EPPayload::quantized;
  check_random(config_of(2, 12, 4, 60, 512), options, 8, 16, {4});
  check_random(config_of(2, 12, 4, 60, 384, DType::float32), options, 6, 17, {4});
  options.rows = EPRows::compact;
  options.dropped_id = -1;
  Random random(18);
  const EPConfig config = config_of(2, 16, 4, 60, 1024, DType::float16);
  auto rounds = random_rounds(config, options, 0, random);
  auto sample = test::random_case(config, random, {.edges = false, .drop = 0});
  for (std::size_t i = 0; i < 1024; ++i)
    sample.tokens[0].as<std::uint16_t>()[i] = 0;  // zero groups
  sample.ids[0].as<std::int32_t>()[0] = -1;
  rounds.push_back(make_round("zeros and -1", std::move(sample), options, random));
  check_rounds(config, options, rounds, {4});
}

/// Rows and scales of a format that are given: with bulk copies where scales are a multiple of 16
/// bytes, without where they are not.
void check_given(const EPPayload& payload) {
  const EPConfig config = config_of(2, 16, 4, 180, 512);
  EPDispatchOptions options;
  options.payload = payload;
  for (const EPRows form : {EPRows::grouped, EPRows::compact}) {
    options.rows = form;
    Random random(25);
    std::vector<Round> rounds;
    for (const std::int64_t tokens : {5, 128, 180, 0, 60, 129}) {
      rounds.push_back(
          make_round(concat(tokens, " tokens"),
                     test::quantized_case(test::random_case(config, random, {.tokens = tokens}),
                                          payload.format()),
                     options, random));
    }
    check_rounds(config, options, rounds, {8, 2});
  }
}

TEST(GpuExpert, payload_with_scales) { check_given(EPPayload::scaled); }

TEST(GpuExpert, payloads_of_other_formats) {
  for (const PayloadFormat& format : payload_formats()) {
    if (format.quantize != nullptr) check_given({format, true});
  }
}

/// Formats that are quantised on the way, in calls of few and of many tokens.
TEST(GpuExpert, quantised_to_other_formats) {
  std::uint64_t number = 26;
  for (const PayloadFormat& format : payload_formats()) {
    if (format.quantize == nullptr) continue;
    EPDispatchOptions options;
    options.payload = {format, false};
    options.rows = number % 2 == 0 ? EPRows::grouped : EPRows::compact;
    const DType dtype = number % 3 == 0 ? DType::float32 : DType::bfloat16;
    check_random(config_of(2, 12, 4, 140, 512, dtype), options, 5, number++, {4});
  }
  EPDispatchOptions options;
  options.payload = EPPayload::from_name("nvfp4", "payload");
  check_random(config_of(1, 4, 2, 20, 48), options, 3, number, {4});
}

TEST(GpuExpert, an_order_that_the_caller_chose) {
  check_random_orders(config_of(4, 16, 3, 60, 64), 19);
}

TEST(GpuExpert, golden_cases_of_one_node) {
  EXPECT_EQ(check_golden_cases([](const EPConfig& config) { return config.is_intra_node(); }), 15);
}

void check_unaligned_tokens(const EPConfig& config, const EPDispatchOptions& options) {
  Random random(20);
  const auto rounds = random_rounds(config, options, 3, random);
  run_gpu_thread_world(
      2,
      [&](World& world) {
        DeviceArena arena(world, test::round_arena_bytes);
        ExpertRig rig(world, config, options, most_recv_rows(config, options), 4);
        for (const Round& round : rounds) {
          const DeviceInput device(arena, round.sample, rig.config().rank, true, 2);
          (void)rig.dispatch(device.input, {arena.stream()});
          test::expect_rows(rig, arena, round.expected);
        }
        world.barrier();
      },
      test::world_options());
}

TEST(GpuExpert, unaligned_tokens) {
  check_unaligned_tokens(config_of(2, 8, 2, 40, 64), {});
  check_unaligned_tokens(config_of(2, 8, 2, 40, 256), {.payload = EPPayload::quantized});
}

}  // namespace
}  // namespace waybill
