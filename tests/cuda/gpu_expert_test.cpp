// Dispatch and combine of experts' tokens on GPUs, against the simulation.

#include <gtest/gtest.h>

#include <fstream>

#include "cuda/expert_rig.h"
#include "moe/golden_cases.h"

namespace waybill {
namespace {

using test::at;
using test::CombineCase;
using test::DeviceArena;
using test::DeviceInput;
using test::Draw;
using test::ExpertCase;
using test::ExpertRig;

constexpr std::int64_t arena_bytes = std::int64_t{512} << 20;

/// A dispatch, what it should give, and what combines should.
struct Round {
  std::string name;
  ExpertCase the;
  ExpertDispatch expected;
  std::vector<HostTensor> outputs;
  std::vector<CombineCase> combines;
};

Round make_round(std::string name, ExpertCase the, const EPDispatchOptions& options,
                 Random& random) {
  Round round{std::move(name), std::move(the), {}, {}, {}};
  round.expected = round.the.dispatch(options);
  round.outputs = test::random_outputs(round.expected, random);
  round.combines = test::combine_cases(round.expected, round.outputs, random);
  return round;
}

std::vector<Round> random_rounds(const EPConfig& config, const EPDispatchOptions& options,
                                 int count, Random& random) {
  std::vector<Round> rounds;
  constexpr Draw draws[] = {Draw::repeats, Draw::distinct, Draw::one_expert, Draw::all_dropped};
  for (int i = 0; i < count; ++i) {
    test::RandomCaseOptions how;
    how.draw = draws[i < 4 ? i : i % 2];
    how.drop = i % 3 == 0 ? 0 : 0.3;
    how.id_dtype = i % 2 == 0 ? DType::int32 : DType::int64;
    if (i == 4) how.tokens = 0;
    if (i == 5) how.tokens = config.max_tokens;
    rounds.push_back(
        make_round(concat("round ", i), test::random_case(config, random, how), options, random));
  }
  return rounds;
}

void check_round(ExpertRig& rig, DeviceArena& arena, const Round& round, bool all_combines) {
  SCOPED_TRACE(concat(round.name, ", rank ", rig.config().rank, " of ", rig.config().world_size));
  arena.reset();
  const Stream stream{arena.stream()};
  const DeviceInput device(arena, round.the, rig.config().rank);
  const auto tables = rig.dispatch(device.input, stream);
  test::expect_rows(rig, arena, round.expected);
  test::expect_tables(arena, tables->views(), round.expected, rig.config().rank);
  EXPECT_EQ(rig.executor().take_overflow(), 0);
  const auto counts = tables->wait_counts();
  EXPECT_EQ(std::vector<std::int32_t>(counts.begin(), counts.end()),
            round.expected.rows.num_recv_rows);
  const std::size_t count = all_combines ? round.combines.size() : 1;
  for (std::size_t i = 0; i < count; ++i) {
    for (const bool staged : {false, true}) {
      test::expect_combine(rig, arena, *tables, round.combines[i],
                           round.outputs[at(rig.config().rank)], staged);
    }
  }
}

void check_rounds(const EPConfig& config, const EPDispatchOptions& options,
                  const std::vector<Round>& rounds, const std::vector<int>& sms) {
  const std::int64_t capacity = most_recv_rows(config, options);
  run_gpu_thread_world(
      config.world_size,
      [&](World& world) {
        DeviceArena arena(world, arena_bytes);
        ExpertRig rig(world, config, options, capacity, sms[0]);
        for (std::size_t i = 0; i < rounds.size(); ++i) {
          rig.use_sms(sms[i % sms.size()]);
          check_round(rig, arena, rounds[i], i < 6);
          if (testing::Test::HasFailure()) break;
        }
        world.barrier();
      },
      test::world_options());
}

EPConfig config_of(std::int32_t world_size, std::int32_t num_experts, std::int32_t topk,
                   std::int64_t max_tokens, std::int64_t hidden, DType dtype = DType::bfloat16,
                   DType weights = DType::float32) {
  EPConfig config;
  config.max_tokens = max_tokens;
  config.hidden = hidden;
  config.topk = topk;
  config.num_experts = num_experts;
  config.world_size = world_size;
  config.local_world_size = world_size;
  config.token_dtype = dtype;
  config.weight_dtype = weights;
  return config;
}

void check_random(const EPConfig& config, const EPDispatchOptions& options, int count,
                  std::uint64_t number, const std::vector<int>& sms = {8, 1, 16}) {
  Random random(number);
  check_rounds(config, options,
               random_rounds(config, options, test::num_random_cases(count), random), sms);
}

TEST(GpuExpert, one_rank) { check_random(config_of(1, 4, 2, 40, 64), {}, 8, 1); }
TEST(GpuExpert, two_ranks) { check_random(config_of(2, 8, 4, 150, 128), {}, 10, 2); }
TEST(GpuExpert, four_ranks_many_rounds) {
  check_random(config_of(4, 16, 3, 90, 64), {}, 100, 3, {4, 1, 8, 2});
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
  auto the = test::random_case(config, random, {.drop = 0});
  for (std::size_t i = 0; i < 1024; ++i) the.tokens[0].as<std::uint16_t>()[i] = 0;  // zero groups
  the.ids[0].as<std::int32_t>()[0] = -1;
  rounds.push_back(make_round("zeros and -1", std::move(the), options, random));
  check_rounds(config, options, rounds, {4});
}

TEST(GpuExpert, an_order_that_the_caller_chose) {
  const EPConfig config = config_of(4, 16, 3, 60, 64);
  Random random(19);
  std::vector<Round> rounds;
  for (const DType dtype : {DType::int32, DType::int64}) {
    ExpertCase the = test::random_case(config, random);
    const ExpertDispatch plain = the.dispatch();
    const auto order = canonical_scatter_indices(config, plain.ids);
    // Rows of a rank in reverse.
    std::vector<std::int64_t> first{0};
    for (const std::int32_t rows : plain.rows.num_recv_rows) first.push_back(first.back() + rows);
    HostTensor positions(dtype, {std::ssize(order) / config.topk, config.topk});
    for (std::size_t i = 0; i < order.size(); ++i) {
      std::int64_t position = order[i];
      for (std::size_t r = 0; r + 1 < first.size(); ++r) {
        if (first[r] <= order[i] && order[i] < first[r + 1]) {
          position = first[r] + first[r + 1] - 1 - order[i];
        }
      }
      if (dtype == DType::int32) {
        positions.as<std::int32_t>()[i] = static_cast<std::int32_t>(position);
      } else {
        positions.as<std::int64_t>()[i] = position;
      }
    }
    the.positions = std::move(positions);
    rounds.push_back(make_round("reversed", std::move(the), {}, random));
  }
  check_rounds(config, {}, rounds, {4});
}

/// All cases of one node; what the simulation makes of them is compared with the files by its own
/// tests.
TEST(GpuExpert, golden_cases_of_one_node) {
  int num_cases = 0;
  for (const auto& path : test::case_files()) {
    std::ifstream file(path);
    const auto json = test::Json::parse(file);
    if (json.value("expect_error", false)) continue;
    const EPConfig config = test::read_config(json.at("config"));
    if (!config.is_intra_node()) continue;
    SCOPED_TRACE(path.stem().string());
    Random random(21);
    std::vector<Round> rounds;
    for (const auto& step : json.at("steps")) {
      for (const DType ids : {DType::int32, DType::int64}) {
        rounds.push_back(
            make_round("golden", test::read_inputs(config, step.at("inputs"), ids), {}, random));
      }
    }
    check_rounds(config, {}, rounds, {4});
    ++num_cases;
  }
  EXPECT_EQ(num_cases, 15);
}

TEST(GpuExpert, unaligned_tokens) {
  const EPConfig config = config_of(2, 8, 2, 40, 64);
  Random random(20);
  const auto rounds = random_rounds(config, {}, 3, random);
  run_gpu_thread_world(
      2,
      [&](World& world) {
        DeviceArena arena(world, arena_bytes);
        ExpertRig rig(world, config, {}, most_recv_rows(config, {}), 4);
        for (const Round& round : rounds) {
          const DeviceInput device(arena, round.the, rig.config().rank, true, 2);
          (void)rig.dispatch(device.input, {arena.stream()});
          test::expect_rows(rig, arena, round.expected);
        }
        world.barrier();
      },
      test::world_options());
}

}  // namespace
}  // namespace waybill
