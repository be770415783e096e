// Ranks of a layer of experts on GPUs that do not mean the same. Each test loses its devices, as
// the next one in the same process would: run them one by one (scripts/test_gpu.sh does).

#include <gtest/gtest.h>

#include <memory>
#include <ostream>

#include "cuda/captured.h"
#include "cuda/expert_rig.h"
#include "cuda/gpu_processes.h"
#include "support/expert_disagreements.h"
#include "support/run_ranks.h"

namespace waybill {
namespace {

using test::CallCase;
using test::Captured;
using test::DeviceArena;
using test::DeviceInput;
using test::RankResult;
using test::to_size;

constexpr std::int64_t arena_bytes = std::int64_t{64} << 20;
constexpr double timeout_s = 8;  // nobody should have to wait for it
constexpr double at_once_s = 5;

/// Ranks, and the tokens of each: few are counted by another kernel than many.
struct GpuWay {
  std::int32_t world_size;
  std::int32_t num_nodes;
  std::int64_t num_tokens;

  friend std::ostream& operator<<(std::ostream& out, const GpuWay& way) {
    return out << way.world_size << " ranks on " << way.num_nodes << " nodes, " << way.num_tokens
               << " tokens";
  }
  [[nodiscard]] std::int32_t per_node() const { return world_size / num_nodes; }
};
constexpr std::int64_t few = 5;
constexpr std::int64_t many = 300;

EPConfig config_of(const GpuWay& way) {
  EPConfig config;
  config.max_tokens = way.num_tokens + 1;
  config.hidden = 256;
  config.topk = 2;
  config.num_experts = 2 * way.world_size;
  config.world_size = way.world_size;
  config.local_world_size = way.per_node();
  return config;
}

/// A layer of a rank, and what it needs for calls.
class GpuLayerStep {
 public:
  GpuLayerStep(World& world, const GpuWay& way)
      : world_(world), arena_(world, arena_bytes), config_(config_of(way)) {
    config_.rank = to_int(world.rank());
    Random random(6);
    const auto sample = test::random_case(config_, random, {.drop = 0, .tokens = way.num_tokens});
    input_ = DeviceInput(arena_, sample, config_.rank).input;
    HostTensor positions(DType::int32, {way.world_size * way.num_tokens, 2});  // right ones
    std::ranges::copy(canonical_scatter_indices(config_, sample.dispatch().ids),
                      positions.as<std::int32_t>().begin());
    positions_ = arena_.upload(positions);
    rows_ = arena_.take(config_.token_dtype, {num_rows(), config_.hidden});
    sums_ = arena_.take(config_.token_dtype, {way.num_tokens, config_.hidden});
    layer_ = std::make_unique<EPAll2AllLayer>(
        world, config_, EPLayerOptions{.num_sms = 4, .fixed_rows = num_rows()});
  }

  [[nodiscard]] ExpertDispatchInput input() const { return input_; }
  [[nodiscard]] ConstTensorView positions() const { return positions_; }
  EPDispatched dispatch(const ExpertDispatchInput& input) {
    return layer_->dispatch(input, {arena_.stream()});
  }
  EPDispatched dispatch(const ExpertDispatchInput& input, const EPLayout& layout) {
    return layer_->dispatch(input, layout, {arena_.stream()});
  }
  void combine(const EPLayout& layout, bool weighted = false, bool needs_gradients = false) {
    layer_->combine({.rows = rows_,
                     .options = {.weighted = weighted},
                     .biases = {},
                     .output = sums_,
                     .needs_gradients = needs_gradients},
                    layout, {arena_.stream()});
  }

  /// What a caller would see of what came: a copy behind the calls on their stream.
  void look_at_results() { (void)arena_.download(sums_); }
  [[nodiscard]] cudaStream_t stream() const { return arena_.stream(); }
  [[nodiscard]] EPAll2AllLayer& layer() { return *layer_; }
  [[nodiscard]] World& world() { return world_; }

 private:
  [[nodiscard]] std::int64_t num_rows() const { return most_recv_rows(config_, {}); }

  World& world_;
  DeviceArena arena_;
  EPConfig config_;
  ExpertDispatchInput input_;
  ConstTensorView positions_;
  TensorView rows_;
  TensorView sums_;
  std::unique_ptr<EPAll2AllLayer> layer_;
};

using Calls = std::function<void(GpuLayerStep&, const EPLayout&, const EPLayout&, bool odd)>;

/// Two dispatches of all, then calls that the last rank makes otherwise. Nothing comes of them: the
/// error comes at the latest when a result is looked at, and from then on.
void make_calls(World& world, const GpuWay& way, const Calls& calls) {
  GpuLayerStep step(world, way);
  const auto first = step.dispatch(step.input()).layout;
  const auto second = step.dispatch(step.input()).layout;
  step.look_at_results();
  world.barrier();
  const auto start = std::chrono::steady_clock::now();
  try {
    calls(step, *first, *second, to_int(world.rank()) == world.world_size() - 1);
    step.look_at_results();
  } catch (const Error&) {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    EXPECT_LT(took.count(), at_once_s + timeout_s);
    EXPECT_THROW(step.combine(*first), Error);
    EXPECT_THROW((void)step.dispatch(step.input()), Error);
    throw;
  }
  ADD_FAILURE() << "rank " << world.rank() << " got a result";
}

std::vector<RankResult> run_threads(const GpuWay& way, double seconds,
                                    const std::function<void(World&)>& body) {
  auto bootstraps = make_thread_bootstraps(way.world_size, seconds);
  return test::run_ranks(way.world_size, [&](std::int32_t rank) {
    const int device = rank % num_gpus();
    test::cuda_ok(cudaSetDevice(device));
    World world = make_gpu_thread_world(std::move(bootstraps[rank]), device, way.per_node());
    body(world);
  });
}

/// All ranks are told at once.
void expect_told(const std::vector<RankResult>& results, const std::vector<std::string>& named) {
  for (std::size_t r = 0; r < results.size(); ++r) {
    SCOPED_TRACE(concat("rank ", r, ": ", results[r].text));
    ASSERT_TRUE(results[r].error);
    // Who shares a device may lose it with the one that says so.
    if (results[r].text.find("which it shares with rank") == std::string::npos) {
      EXPECT_THROW(std::rethrow_exception(results[r].error), Disagreement);
    }
    test::expect_parts(results[r].text, named);
    test::expect_parts(results[r].text, {"ranks disagree in call 3", concat("rank ", r),
                                         concat("rank ", results.size() - 1)});
  }
}

struct GpuCase {
  GpuWay way;
  std::size_t number;  ///< of call_cases()
};

/// Each case with few tokens and with many; some with more ranks, and on two nodes.
std::vector<GpuCase> gpu_cases() {
  const std::size_t count = test::call_cases<GpuLayerStep>().size();
  std::vector<GpuCase> cases;
  for (std::size_t i = 0; i < count; ++i) {
    cases.push_back({{2, 1, few}, i});
    cases.push_back({{2, 1, many}, i});
    if (i % 3 != 0) continue;
    cases.push_back({{4, 1, few}, i});
    cases.push_back({{4, 2, many}, i});
    if (i % 2 == 0) cases.push_back({{8, 2, few}, i});
  }
  return cases;
}

class GpuExpertAgreement : public testing::TestWithParam<GpuCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, GpuExpertAgreement, testing::ValuesIn(gpu_cases()));

void PrintTo(const GpuCase& sample, std::ostream* out) {
  *out << test::call_cases<GpuLayerStep>()[sample.number].name << ", " << sample.way;
}

TEST_P(GpuExpertAgreement, is_looked_at_in_every_call) {
  const GpuWay& way = GetParam().way;
  const CallCase<GpuLayerStep> sample = test::call_cases<GpuLayerStep>()[GetParam().number];
  const auto results =
      run_threads(way, timeout_s, [&](World& world) { make_calls(world, way, sample.calls); });
  expect_told(results, sample.named);
}

void replay_in_another_order(const GpuWay& way) {
  const auto results = run_threads(way, timeout_s, [&](World& world) {
    const Calls replays = [](GpuLayerStep& step, const EPLayout& first, const EPLayout& second,
                             bool odd) {
      const Captured graph(step.stream(), [&] {
        for (const bool turn : {odd, !odd}) step.combine(turn ? first : second);
      });
      step.world().barrier();
      graph.launch(step.world());
      step.look_at_results();
    };
    make_calls(world, way, replays);
  });
  expect_told(results, {"combine: ", "belongs to dispatch "});
}
TEST(GpuExpertAgreementGraph, of_two_ranks) { replay_in_another_order({2, 1, few}); }
TEST(GpuExpertAgreementGraph, of_two_nodes) { replay_in_another_order({4, 2, few}); }

/// Graphs of an odd number of calls, so that empty ones come in between; a rank without tokens.
void agree_in_graphs(const GpuWay& way) {
  const auto results = run_threads(way, 20, [&](World& world) {
    GpuLayerStep step(world, way);
    const auto first = step.dispatch(step.input()).layout;
    step.look_at_results();
    world.barrier();
    std::shared_ptr<EPLayout> layout;
    const Captured graph(step.stream(), [&] {
      layout = step.dispatch(step.input()).layout;
      step.combine(*layout, true);
      (void)step.dispatch(step.input(), *first);
    });
    for (int i = 0; i < 5; ++i) {
      graph.launch(world);
      step.combine(*step.dispatch(step.input()).layout);
    }
    step.look_at_results();
    world.barrier();
  });
  test::expect_no_errors(results);
}
TEST(GpuExpertAgreementGraph, ranks_agree_with_few_tokens) { agree_in_graphs({2, 1, few}); }
TEST(GpuExpertAgreementGraph, ranks_agree_with_many_tokens) { agree_in_graphs({2, 1, many}); }

TEST(GpuExpertAgreementOfSettings, is_looked_at_when_the_layer_is_made) {
  test::expect_no_errors(run_threads({2, 1, few}, timeout_s, [](World& world) {
    const bool odd = to_int(world.rank()) == 1;
    const auto differs = [&](const char* named, const auto& change) {
      EPConfig config = config_of({2, 1, few});
      config.rank = to_int(world.rank());
      EPLayerOptions options;
      if (odd) change(config, options);
      test::expect_throws<InvalidArgument>(
          [&] { const EPAll2AllLayer layer(world, config, options); }, at_once_s,
          {"EPAll2AllLayer: rank ", named, "expected the same on all ranks"});
    };
    differs("num_experts", [](auto& config, auto&) { config.num_experts = 8; });
    differs("max_tokens", [](auto& config, auto&) { config.max_tokens = 7; });
    differs("expert_alignment", [](auto&, auto& o) { o.dispatch.expert_alignment = 8; });
    differs("payload", [](auto&, auto& o) { o.dispatch.payload = EPPayload::quantized; });
    differs("rows", [](auto&, auto& o) { o.dispatch.rows = EPRows::compact; });
    differs("enable_local_combine", [](auto&, auto& o) { o.enable_local_combine = true; });
  }));
}

constexpr const char* in_other_calls = "; ranks may be in different calls";

/// All end at the deadline.
void expect_missed(const std::vector<RankResult>& results, const char* operation) {
  for (const RankResult& result : results) {
    ASSERT_TRUE(result.error);
    test::expect_parts(result.text, {operation, in_other_calls});
  }
}

TEST(GpuExpertAgreementOfObjects, two_layers_end_at_the_deadline) {
  constexpr GpuWay way{2, 1, few};
  expect_missed(run_threads(way, 2,
                            [&](World& world) {
                              GpuLayerStep steps[2] = {{world, way}, {world, way}};
                              const int own = to_int(world.rank());
                              for (const int i : {own, 1 - own}) {
                                (void)steps[i].dispatch(steps[i].input());
                                steps[i].look_at_results();
                              }
                            }),
                "dispatch: ");
}

TEST(GpuExpertAgreementOfObjects, a_barrier_and_a_dispatch_end_at_the_deadline) {
  constexpr GpuWay way{2, 1, few};
  const auto results = run_threads(way, 2, [&](World& world) {
    GpuLayerStep step(world, way);
    if (to_int(world.rank()) == 0) {
      step.layer().ep_barrier_all({step.stream()});
    } else {
      (void)step.dispatch(step.input());
      step.layer().ep_barrier_all({step.stream()});
    }
    step.layer().synchronize({step.stream()});
  });
  for (const RankResult& result : results) test::expect_parts(result.text, {in_other_calls});
}

CallCase<GpuLayerStep> weights_case() { return test::given_cases<GpuLayerStep>()[0]; }
CallCase<GpuLayerStep> combines_case() { return test::belonging_cases<GpuLayerStep>()[2]; }

/// @param shared all ranks on the first device, where a kernel that gives up does not end the
/// context
void check_processes(const GpuWay& way, bool shared, const CallCase<GpuLayerStep>& sample) {
  const auto ends = test::run_gpu_processes(
      way.world_size,
      [&](std::shared_ptr<Bootstrap> bootstrap, int device) {
        const int own = shared ? 0 : device;
        test::cuda_ok(cudaSetDevice(own));
        return make_gpu_process_world(std::move(bootstrap), own, way.per_node());
      },
      [&](World& world) { make_calls(world, way, sample.calls); }, timeout_s);
  for (std::size_t r = 0; r < ends.size(); ++r) {
    SCOPED_TRACE(concat("rank ", r, ": ", ends[r].text));
    EXPECT_EQ(ends[r].signal, 0);
    test::expect_parts(ends[r].text, {"ranks disagree in call 3", concat("rank ", r)});
    test::expect_parts(ends[r].text, sample.named);
  }
}

TEST(GpuExpertAgreementOfProcesses, few_tokens) {
  check_processes({2, 1, few}, false, weights_case());
}
TEST(GpuExpertAgreementOfProcesses, many_tokens) {
  check_processes({2, 1, many}, false, weights_case());
}
TEST(GpuExpertAgreementOfProcesses, two_combines) {
  check_processes({2, 1, many}, false, combines_case());
}
TEST(GpuExpertAgreementOfProcesses, few_tokens_on_one_device) {
  check_processes({2, 1, few}, true, weights_case());
}
TEST(GpuExpertAgreementOfProcesses, many_tokens_on_one_device) {
  check_processes({2, 1, many}, true, weights_case());
}
TEST(GpuExpertAgreementOfProcesses, two_combines_on_one_device) {
  check_processes({2, 1, few}, true, combines_case());
}

}  // namespace
}  // namespace waybill
