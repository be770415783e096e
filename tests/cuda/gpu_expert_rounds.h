#pragma once

// Rounds of dispatch and combine on GPUs, against the simulation.

#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/expert_rig.h"
#include "moe/golden_cases.h"

namespace waybill::test {

inline constexpr std::int64_t round_arena_bytes = std::int64_t{1} << 30;

/// A dispatch, what it should give, and what combines should.
struct Round {
  std::string name;
  ExpertCase sample;
  ExpertDispatch expected;
  std::vector<HostTensor> outputs;
  std::vector<CombineCase> combines;
};

inline Round make_round(std::string name, ExpertCase sample, const EPDispatchOptions& options,
                        Random& random) {
  Round round{std::move(name), std::move(sample), {}, {}, {}};
  round.expected = round.sample.dispatch(options);
  round.outputs = random_outputs(round.expected, random);
  round.combines = combine_cases(round.expected, round.outputs, random);
  return round;
}

/// Takes a rank's tokens away.
inline void empty_rank(ExpertCase& sample, std::int32_t rank) {
  const std::size_t r = rank;
  const auto none = [](HostTensor& tensor) {
    tensor = HostTensor(tensor.dtype(), {0, tensor.shape()[1]});
  };
  none(sample.tokens[r]);
  none(sample.ids[r]);
  if (!sample.weights.empty()) none(sample.weights[r]);
  if (!sample.scales.empty()) none(sample.scales[r]);
}

/// In every third round one rank, each in turn, has no tokens; in round 7 only one rank has some.
inline void empty_ranks(ExpertCase& sample, int round) {
  const std::int32_t world = sample.config.world_size;
  if (round % 3 == 1) empty_rank(sample, round / 3 % world);
  for (std::int32_t r = 1; r < world && round == 7; ++r) empty_rank(sample, (1 + r) % world);
}

inline std::vector<Round> random_rounds(const EPConfig& config, const EPDispatchOptions& options,
                                        int count, Random& random) {
  std::vector<Round> rounds;
  constexpr Draw draws[] = {Draw::repeats, Draw::distinct, Draw::one_expert, Draw::all_dropped};
  for (int i = 0; i < count; ++i) {
    RandomCaseOptions how;
    how.draw = i < 4 ? draws[i] : i % 2 == 0 ? Draw::any : Draw::distinct;
    how.drop = i % 3 == 0 ? 0 : 0.3;
    how.id_dtype = i % 2 == 0 ? DType::int32 : DType::int64;
    if (i == 4) how.tokens = 0;
    if (i == 5) how.tokens = config.max_tokens;
    if (i == 9) how.tokens = 1;
    ExpertCase sample = random_case(config, random, how);
    empty_ranks(sample, i);
    rounds.push_back(make_round(concat("round ", i), std::move(sample), options, random));
  }
  return rounds;
}

inline void check_round(ExpertRig& rig, DeviceArena& arena, const Round& round, bool all_combines) {
  SCOPED_TRACE(concat(round.name, ", rank ", rig.config().rank, " of ", rig.config().world_size));
  arena.reset();
  const Stream stream{arena.stream()};
  const DeviceInput device(arena, round.sample, rig.config().rank);
  const auto tables = rig.dispatch(device.input, stream);
  expect_rows(rig, arena, round.expected);
  expect_tables(arena, tables->views(), round.expected, rig.config().rank);
  EXPECT_EQ(rig.executor().take_overflow().rows, 0);
  const auto counts = tables->wait_counts();
  EXPECT_EQ(std::vector<std::int32_t>(counts.begin(), counts.end()),
            round.expected.rows.num_recv_rows);
  const std::size_t count = all_combines ? round.combines.size() : 1;
  for (std::size_t i = 0; i < count; ++i) {
    for (const bool staged : {false, true}) {
      expect_combine(rig, arena, *tables, round.combines[i], round.outputs[rig.config().rank],
                     staged);
    }
  }
}

/// All rounds on one layer of a rank. @param knows_counts every other round, beginning with the
/// first, is that of hosts that wait for counts
inline void run_rounds(World& world, const EPConfig& config, const EPDispatchOptions& options,
                       const std::vector<Round>& rounds, const std::vector<int>& sms,
                       bool knows_counts = false) {
  DeviceArena arena(world, round_arena_bytes);
  ExpertRig rig(world, config, options, most_recv_rows(config, options), sms[0]);
  for (std::size_t i = 0; i < rounds.size(); ++i) {
    rig.use_sms(sms[i % sms.size()]);
    rig.know_counts(knows_counts && i % 2 == 0);
    check_round(rig, arena, rounds[i], i < 6);
    if (testing::Test::HasFailure()) break;
  }
  world.barrier();
}

inline void check_rounds(const EPConfig& config, const EPDispatchOptions& options,
                         const std::vector<Round>& rounds, const std::vector<int>& sms) {
  run_gpu_thread_world(
      config.world_size, [&](World& world) { run_rounds(world, config, options, rounds, sms); },
      options_of(config));
}

inline EPDispatchOptions spare_options(std::int32_t spare_experts) {
  EPDispatchOptions options;
  options.spare_experts = spare_experts;
  return options;
}

/// Dispatches that plan with the copies of the round before, but every third.
inline std::vector<Round> copy_rounds(const EPConfig& config, const EPDispatchOptions& options,
                                      std::uint64_t number) {
  Random random(number);
  std::vector<Round> rounds;
  std::vector<std::int32_t> present;
  for (int i = 0; i < 7; ++i) {
    if (i % 3 == 0) present.clear();
    Round round{concat("round ", i), random_case(config, random, {.edges = false}), {}, {}, {}};
    round.expected = round.sample.dispatch(options, present);
    present = copies_in(round.expected);
    rounds.push_back(std::move(round));
  }
  return rounds;
}

/// Those, each followed by a dispatch by its routing.
inline void run_copy_rounds(World& world, const EPConfig& config, const EPDispatchOptions& options,
                            const std::vector<Round>& rounds) {
  DeviceArena arena(world, round_arena_bytes);
  ExpertRig rig(world, config, options, most_recv_rows(config, options), 4);
  std::shared_ptr<const ExpertTables> before;
  for (std::size_t i = 0; i < rounds.size(); ++i) {
    SCOPED_TRACE(rounds[i].name);
    arena.reset();
    const Stream stream{arena.stream()};
    const DeviceInput device(arena, rounds[i].sample, rig.config().rank);
    const auto made =
        rig.dispatch(device.input, stream, nullptr, i % 3 == 0 ? nullptr : before.get());
    expect_rows(rig, arena, rounds[i].expected);
    expect_tables(arena, made->views(), rounds[i].expected, rig.config().rank);
    const auto again = rig.dispatch(device.input, stream, made.get());
    expect_rows(rig, arena, rounds[i].expected);
    before = i % 2 == 0 ? made : again;
  }
  world.barrier();
}

/// The same config on nodes of so many ranks.
inline EPConfig on_nodes(EPConfig config, std::int32_t ranks_per_node) {
  config.local_world_size = ranks_per_node;
  return config;
}

inline EPConfig config_of(std::int32_t world_size, std::int32_t num_experts, std::int32_t topk,
                          std::int64_t max_tokens, std::int64_t hidden,
                          DType dtype = DType::bfloat16, DType weights = DType::float32) {
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

/// Of small calls. @param ranks_per_node 0: one node
inline EPConfig small_config(std::int32_t world_size, std::int32_t ranks_per_node = 0) {
  return on_nodes(config_of(world_size, 16, 4, 60, 256),
                  ranks_per_node == 0 ? world_size : ranks_per_node);
}

/// A case, its rows, and the sums where experts answer with the rows themselves.
struct AnsweredCase {
  ExpertCase sample;
  ExpertDispatch dispatch;
  std::vector<HostTensor> sums;
};

inline AnsweredCase answered(ExpertCase sample, const EPDispatchOptions& options = {}) {
  AnsweredCase step{std::move(sample), {}, {}};
  step.dispatch = step.sample.dispatch(options);
  step.sums = simulate_expert_combine(step.dispatch, views_of(step.dispatch.recv_tokens));
  return step;
}

inline void check_random(const EPConfig& config, const EPDispatchOptions& options, int count,
                         std::uint64_t number, const std::vector<int>& sms = {8, 1, 16}) {
  Random random(number);
  check_rounds(config, options, random_rounds(config, options, num_random_cases(count), random),
               sms);
}

/// Orders that the caller chose: rows of a rank in reverse.
inline void check_random_orders(const EPConfig& config, std::uint64_t number) {
  Random random(number);
  std::vector<Round> rounds;
  for (const DType dtype : {DType::int32, DType::int64}) {
    ExpertCase sample = random_case(config, random, {.edges = false});
    const ExpertDispatch plain = sample.dispatch();
    const auto order = canonical_scatter_indices(config, plain.ids);
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
    sample.positions = std::move(positions);
    rounds.push_back(make_round("reversed", std::move(sample), {}, random));
  }
  check_rounds(config, {}, rounds, {4});
}

/// All cases whose config is wanted; what the simulation makes of them is compared with the files
/// by its own tests. @return their number
inline int check_golden_cases(const std::function<bool(const EPConfig&)>& wanted) {
  int num_cases = 0;
  for (const auto& path : case_files()) {
    std::ifstream file(path);
    const auto json = Json::parse(file);
    if (json.value("expect_error", false)) continue;
    const EPConfig config = read_config(json.at("config"));
    if (!wanted(config)) continue;
    SCOPED_TRACE(path.stem().string());
    Random random(21);
    std::vector<Round> rounds;
    for (const auto& step : json.at("steps")) {
      for (const DType ids : {DType::int32, DType::int64}) {
        rounds.push_back(
            make_round("golden", read_inputs(config, step.at("inputs"), ids), {}, random));
      }
    }
    check_rounds(config, {}, rounds, {4});
    ++num_cases;
  }
  return num_cases;
}

}  // namespace waybill::test
