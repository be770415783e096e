// What only the device can see of a caller's tensors, and finds wrong. Each test loses its devices,
// as the next one in the same process would: run them one by one (scripts/test_gpu.sh does).

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "core/to_size.h"
#include "cuda/gpu_expert_rounds.h"
#include "cuda/gpu_processes.h"
#include "support/run_ranks.h"
#include "waybill/experts/ep_all2all_layer.h"

namespace waybill {
namespace {

using test::DeviceArena;
using test::DeviceInput;
using test::ExpertCase;
using test::small_config;
using test::to_size;

constexpr std::int64_t arena_bytes = std::int64_t{64} << 20;
constexpr double timeout_s = 3;

EPConfig many_tokens(EPConfig config) {
  config.max_tokens = 300;
  return config;
}

/// One rank's layer of fixed rows, after a good step: calls 1 and 2.
class Step {
 public:
  Step(World& world, EPConfig config, const ExpertCase& sample, bool local_combine = false,
       std::int64_t max_per_expert = 0, std::int32_t spare_experts = 0)
      : arena_(world, arena_bytes) {
    config.rank = to_int(world.rank());
    EPLayerOptions options{.num_sms = 4, .fixed_rows = most_recv_rows(config, {})};
    options.enable_local_combine = local_combine;
    options.max_per_expert = max_per_expert;
    options.dispatch.spare_experts = spare_experts;
    layer_ = std::make_unique<EPAll2AllLayer>(world, config, options);
    input_ = DeviceInput(arena_, sample, config.rank).input;
    made_ = layer_->dispatch(input_, stream());
    sums_ = arena_.take(config.token_dtype, input_.tokens.shape);
    combine(made_.rows);
    layer_->synchronize(stream());
    world.barrier();
  }

  [[nodiscard]] DeviceArena& arena() { return arena_; }
  [[nodiscard]] EPAll2AllLayer& layer() { return *layer_; }
  [[nodiscard]] Stream stream() const { return {arena_.stream()}; }
  [[nodiscard]] const EPDispatched& made() const { return made_; }

  void dispatch(const ExpertCase& sample) {
    (void)layer_->dispatch(DeviceInput(arena_, sample, layer_->config().rank).input, stream());
  }
  void combine(const ConstTensorView& rows) {
    layer_->combine({rows, {}, {}, sums_}, *made_.layout, stream());
  }

  /// What the call is told, and every later one: by the number of the call that has met it.
  /// @param may_be_right a rank that meets nothing wrong in the call: what came to it is right, and
  ///   the next call tells it
  void expect_end(bool may_be_right = false) {
    std::string first = end_of_wait();
    if (may_be_right && first.empty()) {
      try {
        combine(made_.rows);
        first = end_of_wait();
      } catch (const Error& error) {
        first = error.what();
      }
    }
    EXPECT_NE(first, "") << "rank " << layer_->config().rank << " got a result";
    for (int i = 0; i < 2; ++i) {
      try {
        i == 0 ? combine(made_.rows) : layer_->synchronize(stream());
        ADD_FAILURE() << "a later call went on";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(first), std::string::npos)
            << error.what() << ", expected " << first;
      }
    }
    layer_->synchronize(stream());
  }

 private:
  [[nodiscard]] std::string end_of_wait() {
    try {
      layer_->synchronize(stream());
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  }

  DeviceArena arena_;
  std::unique_ptr<EPAll2AllLayer> layer_;
  ExpertDispatchInput input_;
  EPDispatched made_;
  TensorView sums_;
};

/// Runs a third call in which rank 1 gives what is wrong; all ranks end, and rank 1 says why.
void expect_found(const EPConfig& config, const std::function<void(World&)>& body,
                  const std::string& text, bool all_find_it = false) {
  auto bootstraps = make_thread_bootstraps(config.world_size, timeout_s);
  const auto results = test::run_ranks(config.world_size, [&](std::int32_t rank) {
    const int device = rank % num_gpus();
    test::cuda_ok(cudaSetDevice(device));
    World world =
        make_gpu_thread_world(std::move(bootstraps[rank]), device, config.local_world_size);
    body(world);
  });
  for (std::size_t r = 0; r < results.size(); ++r) {
    SCOPED_TRACE(concat("rank ", r, ": ", results[r].text));
    EXPECT_TRUE(results[r].error);
    if (r != 1 && !all_find_it) continue;
    EXPECT_THROW(std::rethrow_exception(results[r].error), InvalidArgument);
    EXPECT_NE(results[r].text.find(text), std::string::npos) << "expected " << text;
  }
}

ExpertCase good_case(const EPConfig& config, DType ids = DType::int32, std::int64_t tokens = 20) {
  Random random(61);
  return test::random_case(config, random, {.drop = 0, .id_dtype = ids, .tokens = tokens});
}

void find_a_bad_id(const EPConfig& config, std::int64_t id, DType dtype = DType::int32,
                   std::int64_t tokens = 20, std::int32_t spare_experts = 0) {
  const ExpertCase good = good_case(config, dtype, tokens);
  ExpertCase bad = good;
  for (const std::size_t i : {std::size_t{18}, std::size_t{50}}) {  // the first one is named
    if (dtype == DType::int32) {
      bad.ids[1].as<std::int32_t>()[i] = static_cast<std::int32_t>(id);
    } else {
      bad.ids[1].as<std::int64_t>()[i] = id;
    }
  }
  expect_found(
      config,
      [&](World& world) {
        Step step(world, config, good, false, 0, spare_experts);
        step.dispatch(bad);
        step.expect_end();
      },
      concat("dispatch 3: exp_indices of rank 1 hold id ", id,
             " at token 4, topk slot 2; expected 0..15 or 16 (dropped)"));
}

TEST(GpuExpertInput, an_id_out_of_range_of_few_tokens) { find_a_bad_id(small_config(2), 4711); }
TEST(GpuExpertInput, an_id_out_of_range_of_many_tokens) {
  find_a_bad_id(many_tokens(small_config(2)), -1, DType::int32, 300);
}
TEST(GpuExpertInput, an_id_of_64_bits) {
  find_a_bad_id(small_config(2), std::int64_t{1} << 40, DType::int64);
}
TEST(GpuExpertInput, an_id_out_of_range_on_nodes) { find_a_bad_id(small_config(4, 2), 17); }
TEST(GpuExpertInput, an_id_out_of_range_of_many_tokens_on_nodes) {
  find_a_bad_id(many_tokens(small_config(4, 2)), 17, DType::int64);
}

/// Experts are named, not slots.
TEST(GpuSpareExpertsInput, an_id_out_of_range) {
  find_a_bad_id(small_config(2), 17, DType::int32, 20, 2);
}
TEST(GpuSpareExpertsInput, an_id_out_of_range_of_many_tokens) {
  find_a_bad_id(many_tokens(small_config(2)), 17, DType::int64, 300, 2);
}

/// Rank 1 has expert 3 once too often, of tokens that choose it twice; rank 0 as often as it may.
void find_an_expert_too_often(const EPConfig& config, std::int64_t tokens, std::int64_t most,
                              std::int32_t spare_experts = 0) {
  ExpertCase good = good_case(config, DType::int32, tokens);
  const auto choose = [&](ExpertCase& made, std::size_t rank, std::int64_t times) {
    std::int32_t i = 0;
    for (std::int32_t& id : made.ids[rank].as<std::int32_t>()) {
      id = i < times ? 3 : 4 + i % (config.num_experts - 4);
      ++i;
    }
  };
  for (std::size_t r = 0; r < to_size(config.world_size); ++r) choose(good, r, most);
  ExpertCase bad = good;
  choose(bad, 1, most + 1);
  expect_found(
      config,
      [&](World& world) {
        Step step(world, config, good, false, most, spare_experts);
        step.dispatch(bad);
        // Rank 1 counts after its tokens have left for the other nodes, whose ranks may get them.
        step.expect_end(to_int(world.rank()) >= config.local_world_size);
      },
      concat("dispatch 3: exp_indices of rank 1 hold expert 3 more than max_per_expert = ", most,
             " times"));
}

TEST(GpuExpertInput, an_expert_too_often_of_few_tokens) {
  find_an_expert_too_often(small_config(2), 20, 30);
}
TEST(GpuExpertInput, an_expert_too_often_of_many_tokens) {
  find_an_expert_too_often(many_tokens(small_config(2)), 300, 500);
}
TEST(GpuSpareExpertsInput, an_expert_too_often) {
  find_an_expert_too_often(small_config(2), 20, 30, 1);
}
TEST(GpuExpertInput, an_expert_too_often_on_nodes) {
  find_an_expert_too_often(small_config(4, 2), 20, 30);
}

/// A case with positions, in the usual order but for what `change` does.
ExpertCase with_positions(const ExpertCase& sample, std::int64_t tokens_less,
                          const std::function<void(std::span<std::int32_t>)>& change) {
  const auto order = canonical_scatter_indices(sample.config, sample.dispatch().ids);
  const std::int64_t topk = sample.config.topk;
  const std::int64_t tokens = std::ssize(order) / topk - tokens_less;
  ExpertCase result = sample;
  result.positions = HostTensor(DType::int32, {tokens, topk});
  std::copy_n(order.begin(), tokens * topk, result.positions->as<std::int32_t>().begin());
  change(result.positions->as<std::int32_t>());
  return result;
}

void find_wrong_positions(const EPConfig& config, const ExpertCase& wrong, const std::string& text,
                          bool all_find_it) {
  const ExpertCase good = good_case(config);
  expect_found(
      config,
      [&](World& world) {
        Step step(world, config, good);
        step.dispatch(wrong);
        step.expect_end(!all_find_it && world.rank() != Rank{1});
      },
      text, all_find_it);
}

TEST(GpuExpertInput, a_position_out_of_range_of_few_tokens) {
  const EPConfig config = small_config(2);
  const auto wrong = with_positions(good_case(config), 0, [](std::span<std::int32_t> positions) {
    positions[20 * 4 + 5] = 1000;  // token 1, topk slot 1 of rank 1
  });
  find_wrong_positions(config, wrong,
                       " hold position 1000 at token 1, topk slot 1 of rank 1; expected ", true);
}

TEST(GpuExpertInput, a_position_out_of_range_of_many_tokens) {
  const EPConfig config = many_tokens(small_config(2));
  const auto wrong = with_positions(
      good_case(config), 0, [](std::span<std::int32_t> positions) { positions[20 * 4 + 5] = -7; });
  find_wrong_positions(config, wrong,
                       "dispatch 3: full_scatter_indices of rank 1 hold position -7 at token 1, "
                       "topk slot 1 of rank 1; expected ",
                       false);
}

TEST(GpuExpertInput, too_few_positions) {
  const EPConfig config = small_config(2);
  const auto wrong = with_positions(good_case(config), 1, [](std::span<std::int32_t>) {});
  find_wrong_positions(config, wrong,
                       " has 39 tokens, expected 40: those of all ranks, one rank after another",
                       true);
}

/// A choice of rank 0 goes where one of rank 1 goes, on rank 1.
void find_a_position_twice(const EPConfig& config) {
  const ExpertCase good = good_case(config);
  const auto ids = good.dispatch().ids;
  const auto at_rank_1 = [&](std::size_t source) {
    return std::ranges::find_if(ids[source],
                                [&](std::int32_t id) { return config.rank_of_expert(id) == 1; }) -
           ids[source].begin();
  };
  const auto wrong = with_positions(good, 0, [&](std::span<std::int32_t> positions) {
    positions[at_rank_1(0)] = positions[20 * config.topk + at_rank_1(1)];
  });
  find_wrong_positions(config, wrong, " of rank 1, where another topk slot is", false);
}

TEST(GpuExpertInput, a_position_twice_of_few_tokens) { find_a_position_twice(small_config(2)); }
TEST(GpuExpertInput, a_position_twice_of_many_tokens) {
  find_a_position_twice(many_tokens(small_config(2)));
}
TEST(GpuExpertInput, a_position_twice_on_nodes) { find_a_position_twice(small_config(4, 2)); }

enum class From { elsewhere, its_place, nowhere };

/// Rank 1 combines fewer rows than arrived.
void find_too_few_rows(const EPConfig& config, From from, bool local_combine = false) {
  const ExpertCase good = good_case(config);
  const std::int64_t arrived = good.dispatch().rows.num_recv_rows[1];
  const std::int64_t given = from == From::nowhere ? 0 : arrived - 1;
  expect_found(
      config,
      [&](World& world) {
        Step step(world, config, good, local_combine);
        ConstTensorView rows = step.made().rows;
        if (world.rank() == Rank{1}) {
          if (from == From::its_place) rows = step.layer().combine_input(given, step.stream());
          rows.shape[0] = given;
        }
        step.combine(rows);
        step.expect_end();
      },
      concat("combine 3: input of rank 1 has ", given, " rows, expected at least ", arrived));
}

TEST(GpuExpertInput, too_few_rows_to_combine) {
  find_too_few_rows(small_config(2), From::elsewhere);
}
TEST(GpuExpertInput, too_few_rows_to_combine_in_place) {
  find_too_few_rows(small_config(2), From::its_place);
}
TEST(GpuExpertInput, no_rows_to_combine) { find_too_few_rows(small_config(2), From::nowhere); }
TEST(GpuExpertInput, too_few_rows_for_local_sums) {
  find_too_few_rows(small_config(2), From::elsewhere, true);
}
TEST(GpuExpertInput, too_few_rows_to_combine_on_nodes) {
  find_too_few_rows(small_config(4, 2), From::elsewhere);
}
TEST(GpuExpertInput, too_few_rows_of_many_tokens_to_combine_on_nodes) {
  find_too_few_rows(many_tokens(small_config(4, 2)), From::elsewhere);
}

/// Where processes share a device nothing ends it: what was found stays, and every call says so.
TEST(GpuExpertInput, an_id_out_of_range_where_processes_share_a_device) {
  const EPConfig config = many_tokens(small_config(2));
  const ExpertCase good = good_case(config);
  ExpertCase bad = good;
  bad.ids[1].as<std::int32_t>()[18] = 99;
  const auto ends = test::run_gpu_processes(
      2,
      [&](std::shared_ptr<Bootstrap> bootstrap, int) {
        test::cuda_ok(cudaSetDevice(0));
        return make_gpu_process_world(std::move(bootstrap), 0, 2);
      },
      [&](World& world) {
        Step step(world, config, good);
        step.dispatch(bad);
        step.expect_end();
      },
      timeout_s);
  EXPECT_NE(
      ends[1].text.find("dispatch 3: exp_indices of rank 1 hold id 99 at token 4, topk slot 2"),
      std::string::npos)
      << ends[1].text;
  EXPECT_NE(ends[0].text, "");
}

}  // namespace
}  // namespace waybill
