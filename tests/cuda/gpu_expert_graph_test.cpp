// CUDA graphs of a layer of experts: with a fixed capacity nothing waits for the host.

#include <gtest/gtest.h>

#include "cuda/captured.h"
#include "cuda/gpu_expert_rounds.h"

namespace waybill {
namespace {

using test::AnsweredCase;
using test::Captured;
using test::cuda_ok;
using test::DeviceArena;
using test::DeviceInput;
using test::ExpertRig;
using test::same_bytes;
using test::small_config;
using test::to_size;

constexpr std::int64_t num_tokens = 50;

std::vector<AnsweredCase> random_rounds(const EPConfig& config, const EPDispatchOptions& options) {
  Random random(33);
  std::vector<AnsweredCase> rounds;
  for (int i = 0; i < 6; ++i) {
    rounds.push_back(
        test::answered(test::random_case(config, random, {.tokens = num_tokens}), options));
  }
  return rounds;
}

/// What one rank captures, and replays with the ids, tokens and weights of each round.
class Replay {
 public:
  Replay(World& world, const EPConfig& config, const EPDispatchOptions& options,
         const std::vector<AnsweredCase>& rounds)
      : world_(world),
        rounds_(rounds),
        arena_(world, std::int64_t{64} << 20),
        capacity_(most_recv_rows(config, options)),
        rig_(world, config, options, capacity_, 4),
        input_(arena_, rounds[0].sample, rig_.config().rank),
        sums_(arena_.take(config.token_dtype, {num_tokens, config.hidden})) {}

  [[nodiscard]] cudaStream_t stream() const { return arena_.stream(); }

  void dispatch(cudaStream_t stream) { tables_ = rig_.dispatch(input_.input, Stream{stream}); }

  /// What arrived to where the experts' rows are awaited.
  void answer(cudaStream_t stream) {
    cuda_ok(cudaMemcpyAsync(rig_.combine_window(), rig_.window(),
                            capacity_ * rig_.config().hidden * 2, cudaMemcpyDefault, stream));
  }

  void combine(cudaStream_t stream) {
    const ConstTensorView rows(rig_.combine_window(), rig_.config().token_dtype,
                               {capacity_, rig_.config().hidden});
    rig_.combine({rows, {}, {}, sums_}, *tables_, Stream{stream});
  }

  /// @param calls an even number of dispatches, and of combines
  template <class Calls>
  void check(const Calls& calls) {
    calls();
    arena_.synchronize();
    world_.barrier();
    const Captured graph(stream(), calls);
    const std::size_t r = rig_.config().rank;
    for (const AnsweredCase& round : rounds_) {
      const auto replace = [&](const ConstTensorView& to, const HostTensor& from) {
        arena_.copy(const_cast<std::byte*>(to.data), from.bytes().data(), from.size_bytes());
      };
      replace(input_.input.tokens, round.sample.tokens[r]);
      replace(input_.input.ids, round.sample.ids[r]);
      replace(input_.input.weights, round.sample.weights[r]);
      arena_.synchronize();
      graph.launch(world_);
      ASSERT_TRUE(same_bytes(arena_.download(sums_), round.sums[r]));
      test::expect_rows(rig_, arena_, round.dispatch);
    }
    world_.barrier();
  }

 private:
  World& world_;
  const std::vector<AnsweredCase>& rounds_;
  DeviceArena arena_;
  std::int64_t capacity_;
  ExpertRig rig_;
  DeviceInput input_;
  TensorView sums_;
  std::shared_ptr<const ExpertTables> tables_;
};

template <class Check>
void for_each_rank(const EPConfig& config, const Check& check,
                   const EPDispatchOptions& options = {}) {
  const auto rounds = random_rounds(config, options);
  run_gpu_thread_world(
      config.world_size,
      [&](World& world) {
        Replay replay(world, config, options, rounds);
        check(replay);
      },
      test::options_of(config));
}

void replay_with_other_ids(const EPConfig& config, const EPDispatchOptions& options = {}) {
  for_each_rank(
      config,
      [](Replay& replay) {
        const cudaStream_t stream = replay.stream();
        replay.check([&] {
          for (int i = 0; i < 2; ++i) {
            replay.dispatch(stream);
            replay.answer(stream);
            replay.combine(stream);
          }
        });
      },
      options);
}

TEST(GpuExpertGraph, replays_with_other_ids) { replay_with_other_ids(small_config(2)); }
TEST(GpuExpertGraph, replays_with_other_ids_on_nodes) { replay_with_other_ids(small_config(4, 2)); }
TEST(GpuExpertGraph, replays_with_other_ids_of_many_tokens_on_nodes) {
  EPConfig config = small_config(4, 2);
  config.max_tokens = 200;
  replay_with_other_ids(config);
}

/// Copies are planned on the device: each replay has a plan of its own.
TEST(GpuSpareExpertsGraph, replays_with_other_ids) {
  EPDispatchOptions options;
  options.spare_experts = 2;
  replay_with_other_ids(small_config(2), options);
  EPConfig config = small_config(4);
  config.max_tokens = 200;
  options.limit = 1.02;
  replay_with_other_ids(config, options);
}

/// A stream of the device, and events that let others follow it.
class SideStream {
 public:
  SideStream() {
    cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t& event : events_) {
      cuda_ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
  }
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  ~SideStream() {
    for (const cudaEvent_t event : events_) (void)cudaEventDestroy(event);
    (void)cudaStreamDestroy(stream_);
  }
  [[nodiscard]] cudaStream_t get() const { return stream_; }

  /// What comes on `to` waits for all that is on `from`.
  void follow(cudaStream_t to, cudaStream_t from) {
    const cudaEvent_t event = events_[next_++ % std::size(events_)];
    cuda_ok(cudaEventRecord(event, from));
    cuda_ok(cudaStreamWaitEvent(to, event, 0));
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t events_[8] = {};
  std::size_t next_ = 0;
};

/// Kernels that begin early wait for kernels of both streams, and for copies.
void replay_on_two_streams(const EPConfig& config) {
  for_each_rank(config, [](Replay& replay) {
    SideStream side;
    const cudaStream_t a = replay.stream();
    const cudaStream_t b = side.get();
    const auto pair = [&](cudaStream_t first, cudaStream_t second) {
      replay.dispatch(first);
      replay.answer(first);
      side.follow(second, first);
      replay.combine(second);
      side.follow(first, second);
    };
    replay.check([&] {
      side.follow(b, a);
      pair(a, b);
      pair(b, a);
      replay.dispatch(a);
      side.follow(b, a);
      replay.dispatch(b);
      side.follow(a, b);
    });
  });
}

TEST(GpuExpertGraph, of_two_streams) { replay_on_two_streams(small_config(2)); }
TEST(GpuExpertGraph, of_two_streams_and_more_tokens) {
  EPConfig config = small_config(2);
  config.max_tokens = 300;
  replay_on_two_streams(config);
}

}  // namespace
}  // namespace waybill
