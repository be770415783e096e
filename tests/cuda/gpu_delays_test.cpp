// Kernels of experts wait at points where no result may depend on which rank or block is faster:
// when a call begins, before they announce that, before they announce that tokens are placed, and
// in some blocks. The hook delay_ns limits the random time.

#include <gtest/gtest.h>

#include "core/to_size.h"
#include "cuda/captured.h"
#include "cuda/gpu_expert_rounds.h"
#include "support/with_hooks.h"

namespace waybill {
namespace {

using test::AnsweredCase;
using test::Captured;
using test::cuda_ok;
using test::DeviceArena;
using test::DeviceInput;
using test::ExpertRig;
using test::same_bytes;
using test::to_size;

struct DelayedLayer {
  EPConfig config;
  EPDispatchOptions options;
  std::int64_t num_tokens;
  const char* delay;  ///< a hook of WAYBILL_TEST
};

/// One rank: it dispatches, answers with the rows that arrived, and combines, first in single calls
/// and then in a graph of four calls.
class DelayedCalls {
 public:
  DelayedCalls(World& world, const DelayedLayer& layer, const std::vector<AnsweredCase>& rounds)
      : world_(world),
        rounds_(rounds),
        arena_(world, std::int64_t{128} << 20),
        stream_{arena_.stream()},
        capacity_(most_recv_rows(layer.config, layer.options)),
        rig_(world, layer.config, layer.options, capacity_, 8),
        input_(arena_, rounds[0].sample, rig_.config().rank),
        sums_(arena_.take(layer.config.token_dtype, {layer.num_tokens, layer.config.hidden})) {}

  /// No call of a round waits for the host.
  void check_alone(int repeats) {
    for (int i = 0; i < repeats; ++i) {
      const AnsweredCase& round = rounds_[to_size(i) % rounds_.size()];
      load(round);
      pair(nullptr);
      const auto tables = pair(nullptr);
      pair(tables.get());
      expect(round, concat("calls ", i));
      if (testing::Test::HasFailure()) return;
    }
  }

  void check_graph(int repeats) {
    world_.barrier();
    const Captured graph(arena_.stream(), [&] {
      const auto tables = pair(nullptr);
      pair(tables.get());
      pair(nullptr);
      pair(nullptr);
    });
    for (int i = 0; i < repeats; ++i) {
      const AnsweredCase& round = rounds_[to_size(i) % rounds_.size()];
      load(round);
      for (int k = 0; k < 3; ++k) graph.launch(world_);
      expect(round, concat("replay ", i));
      if (testing::Test::HasFailure()) break;
    }
    world_.barrier();
  }

 private:
  void load(const AnsweredCase& round) {
    const std::size_t r = rig_.config().rank;
    const auto replace = [&](const ConstTensorView& to, const HostTensor& from) {
      arena_.copy(const_cast<std::byte*>(to.data), from.bytes().data(), from.size_bytes());
    };
    replace(input_.input.tokens, round.sample.tokens[r]);
    replace(input_.input.ids, round.sample.ids[r]);
    if (!round.sample.weights.empty()) replace(input_.input.weights, round.sample.weights[r]);
    cuda_ok(
        cudaMemsetAsync(sums_.data, 0xFF, sums_.shape[0] * sums_.shape[1] * 2, arena_.stream()));
    arena_.synchronize();
  }

  std::shared_ptr<const ExpertTables> pair(const ExpertTables* known) {
    auto tables = rig_.dispatch(input_.input, stream_, known);
    cuda_ok(cudaMemcpyAsync(rig_.combine_window(), rig_.window(),
                            capacity_ * rig_.config().hidden * 2, cudaMemcpyDefault,
                            arena_.stream()));
    const ConstTensorView rows(rig_.combine_window(), rig_.config().token_dtype,
                               {capacity_, rig_.config().hidden});
    rig_.combine({rows, {}, {}, sums_}, *tables, stream_);
    return tables;
  }

  void expect(const AnsweredCase& round, const std::string& what) {
    SCOPED_TRACE(concat(what, ", rank ", rig_.config().rank));
    EXPECT_TRUE(same_bytes(arena_.download(sums_), round.sums[rig_.config().rank]));
    test::expect_rows(rig_, arena_, round.dispatch);
  }

  World& world_;
  const std::vector<AnsweredCase>& rounds_;
  DeviceArena arena_;
  Stream stream_;
  std::int64_t capacity_;
  ExpertRig rig_;
  DeviceInput input_;
  TensorView sums_;
};

void check(const DelayedLayer& layer) {
  const std::int32_t world_size = layer.config.world_size;
  if (layer.config.is_intra_node() && num_gpus() < world_size)
    GTEST_SKIP() << "needs " << world_size << " GPUs";
  ASSERT_EQ(layer.config.token_dtype, DType::bfloat16);
  const test::WithHooks hooks(layer.delay);
  Random random(77);
  std::vector<AnsweredCase> rounds;
  for (int i = 0; i < 5; ++i) {
    auto sample = test::random_case(layer.config, random, {.tokens = layer.num_tokens});
    rounds.push_back(test::answered(std::move(sample), layer.options));
  }
  run_gpu_thread_world(
      world_size,
      [&](World& world) {
        DelayedCalls calls(world, layer, rounds);
        calls.check_alone(test::num_random_cases(150));
        if (!testing::Test::HasFailure()) calls.check_graph(test::num_random_cases(100));
      },
      test::options_of(layer.config));
}

/// Tokens arrive in receive slots before they are placed, and receivers wait for words.
EPConfig few() { return test::config_of(2, 16, 4, 60, 256, DType::bfloat16, DType::bfloat16); }
/// Ranks exchange counts.
EPConfig some() { return test::config_of(2, 16, 4, 300, 256, DType::bfloat16, DType::bfloat16); }

TEST(GpuDelays, few_tokens_short) { check({few(), {}, 60, "delay_ns=2000"}); }
TEST(GpuDelays, few_tokens_long) { check({few(), {}, 60, "delay_ns=100000"}); }
TEST(GpuDelays, few_tokens_compact) {
  check({few(), {.rows = EPRows::compact}, 60, "delay_ns=20000"});
}
TEST(GpuDelays, few_tokens_padded) {
  check({few(), {.expert_alignment = 8}, 60, "delay_ns=20000"});
}
TEST(GpuDelays, some_tokens_in_receive_slots) { check({some(), {}, 100, "delay_ns=20000"}); }
TEST(GpuDelays, some_tokens_that_wait) { check({some(), {}, 300, "delay_ns=20000"}); }

/// Ranks count twice: experts, then the slots of their plan.
TEST(GpuDelays, few_tokens_to_slots) { check({few(), {.spare_experts = 2}, 60, "delay_ns=20000"}); }
TEST(GpuDelays, some_tokens_to_slots) {
  check({some(), {.spare_experts = 2}, 300, "delay_ns=100000"});
}

/// Tokens are forwarded chunk by chunk. Ranks may share a device.
TEST(GpuDelays, few_tokens_on_nodes) {
  check({test::on_nodes(few(), 1), {}, 60, "delay_ns=20000"});
}
TEST(GpuDelays, some_tokens_on_nodes) {
  check({test::on_nodes(some(), 1), {}, 300, "delay_ns=20000"});
}
TEST(GpuDelays, some_compact_tokens_on_nodes) {
  check({test::on_nodes(some(), 1), {.rows = EPRows::compact}, 300, "delay_ns=100000"});
}

}  // namespace
}  // namespace waybill
