#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <new>
#include <thread>

#include "runtime/executor.h"
#include "support/run_ranks.h"
#include "support/sequence_step.h"
#include "waybill/core/wait.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/experts/ep_all2all_layer.h"
#include "waybill/runtime/world.h"

/// A rank that is a thread and fails: the others are released at once, and its error surfaces.
namespace waybill {
namespace {

using test::to_size;
using Clock = std::chrono::steady_clock;

constexpr double long_timeout_s = 60;

struct OwnError : std::runtime_error {
  OwnError() : std::runtime_error("no luck") {}
};

/// Rank 1 throws a little later; the others do `wait`, which must end soon with PeerFailed.
void expect_released(const std::function<void(World&)>& wait) {
  std::atomic<int> released = 0;
  const auto start = Clock::now();
  const auto body = [&](World& world) {
    if (world.rank() == Rank{1}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      throw OwnError();
    }
    try {
      wait(world);
      ADD_FAILURE() << "expected PeerFailed";
    } catch (const PeerFailed& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 failed: no luck"), std::string::npos)
          << error.what();
      ++released;
      throw;
    }
  };
  EXPECT_THROW(run_thread_world(3, body, {.timeout_s = long_timeout_s}), OwnError);
  EXPECT_EQ(released, 2);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(2));
}

TEST(ThreadFailures, ABarrierIsReleased) {
  expect_released([](World& world) { world.barrier(); });
}

TEST(ThreadFailures, AWaitForASignalIsReleased) {
  expect_released([](World& world) {
    std::uint64_t never = 0;
    SignalPad pad;
    pad.count = 1;
    pad.local = &never;
    (void)world.transport().wait({&pad, 0}, 1, Rank{1}, "unload");
  });
}

TEST(ThreadFailures, MakingADispatcherIsReleased) {
  expect_released([](World& world) { SequenceDispatcher dispatcher(world); });
}

TEST(ThreadFailures, AnyWaitOfTheThreadIsReleased) {
  expect_released([](World& /*world*/) {
    PollingWait wait(long_timeout_s);
    while (wait.pause()) {
    }
  });
}

/// Calls of all ranks, and one more of all but rank 1.
void expect_call_released(const std::function<std::function<void()>(World&, int)>& prepare) {
  const auto start = Clock::now();
  std::atomic<int> released = 0;
  const auto body = [&](World& world) {
    const auto call = prepare(world, to_int(world.rank()));
    call();
    if (world.rank() == Rank{1}) throw OwnError();
    EXPECT_THROW(call(), PeerFailed);
    try {
      call();
      ADD_FAILURE() << "expected the object to be unusable";
    } catch (const TransportError& error) {
      EXPECT_NE(std::string(error.what()).find("is unusable after a failure: "), std::string::npos)
          << error.what();
    }
    ++released;
  };
  EXPECT_THROW(run_thread_world(3, body, {.timeout_s = long_timeout_s}), OwnError);
  EXPECT_EQ(released, 2);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(2));
}

TEST(ThreadFailures, ADispatchIsReleased) {
  const auto sample = test::sequence_cases(3, 0).at(3);
  const test::Expected expected(sample);
  expect_call_released([&](World& world, int rank) {
    auto dispatcher = std::make_shared<SequenceDispatcher>(world);
    auto plan =
        std::make_shared<PlanHandle>(dispatcher->plan_dispatch(test::forward_parts(sample)));
    return [=, &expected] {
      const auto r = static_cast<std::size_t>(rank);
      (void)dispatcher->dispatch(
          *plan, std::vector<ConstTensorView>{expected.q[r].view(), expected.k[r].view(),
                                              expected.v[r].view()});
    };
  });
}

TEST(ThreadFailures, ADispatchToExpertsIsReleased) {
  expect_call_released([](World& world, int rank) {
    EPConfig config;
    config.max_tokens = 4;
    config.hidden = 8;
    config.topk = 2;
    config.num_experts = 6;
    config.world_size = 3;
    config.local_world_size = 3;
    config.rank = rank;
    config.token_dtype = DType::float32;
    auto layer = std::make_shared<EPAll2AllLayer>(world, config);
    auto tokens = std::make_shared<HostTensor>(DType::float32, Shape{4, 8});
    auto ids = std::make_shared<std::vector<std::int32_t>>(std::vector{0, 1, 2, 3, 4, 5, 0, 5});
    return [=] {
      ExpertDispatchInput input;
      input.tokens = tokens->view();
      input.ids = {ids->data(), DType::int32, {4, 2}};
      (void)layer->dispatch(input);
    };
  });
}

TEST(ThreadFailures, AnArgumentThatOneRankFindsWrongSurfaces) {
  const auto start = Clock::now();
  const auto sample = test::sequence_cases(3, 0).at(3);
  const test::Expected expected(sample);
  const auto body = [&](World& world) {
    SequenceDispatcher dispatcher(world);
    const std::size_t r = to_int(world.rank());
    const auto plan = dispatcher.plan_dispatch(test::forward_parts(sample));
    std::vector<ConstTensorView> inputs{expected.q[r].view(), expected.k[r].view(),
                                        expected.v[r].view()};
    if (world.rank() == Rank{2}) inputs.pop_back();
    (void)dispatcher.dispatch(plan, inputs);
  };
  EXPECT_THROW(run_thread_world(3, body, {.timeout_s = long_timeout_s}), InvalidArgument);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(2));
}

TEST(ThreadFailures, OneRankThatCannotMakeItsWorldSurfaces) {
  const auto start = Clock::now();
  const auto body = [&](std::shared_ptr<Bootstrap> bootstrap) {
    const std::int32_t per_node = bootstrap->rank() == Rank{2} ? 3 : 0;
    if (per_node != 0) throw InvalidArgument("ranks_per_node = 3");
    (void)make_thread_world(std::move(bootstrap), per_node);
  };
  EXPECT_THROW(run_ranks_as_threads(4, body, long_timeout_s), InvalidArgument);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(2));
}

TEST(ThreadFailures, AnErrorOfARanksOwnComesBeforeADeadline) {
  const auto body = [&](World& world) {
    if (world.rank() == Rank{2}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
      throw OwnError();
    }
    world.barrier();
  };
  EXPECT_THROW(run_thread_world(3, body, {.timeout_s = 0.2}), OwnError);
}

TEST(ThreadFailures, ADeadlineSurfacesWhereNothingElseHappened) {
  const auto body = [&](World& world) {
    if (world.rank() != Rank{1}) world.barrier();
  };
  try {
    run_thread_world(3, body, {.timeout_s = 0.2});
    ADD_FAILURE() << "expected Timeout";
  } catch (const Timeout& timeout) {
    EXPECT_EQ(timeout.missed().peer, 1);
  }
}

std::atomic<bool> user_interrupts = false;

TEST(ThreadFailures, TheUserEndsAllRanks) {
  const InterruptCheck before = set_interrupt_check([] {
    if (user_interrupts) throw Interrupted("interrupted by a test");
  });
  std::thread user([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    user_interrupts = true;
  });
  const auto start = Clock::now();
  const auto body = [](World& world) {
    if (world.rank() != Rank{1}) return world.barrier();
    PollingWait wait(long_timeout_s);
    while (wait.pause()) {
    }
  };
  EXPECT_THROW(run_thread_world(3, body, {.timeout_s = long_timeout_s}), Interrupted);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(1));
  user.join();
  user_interrupts = false;
  (void)set_interrupt_check(before);
}

/// An executor that fails on one rank.
template <class Thrown>
class FailingExecutor final : public Executor {
 public:
  FailingExecutor(std::unique_ptr<Executor> inner, bool fails, Thrown thrown)
      : inner_(std::move(inner)), fails_(fails), thrown_(std::move(thrown)) {}

  std::unique_ptr<UploadedPlan> upload(const SequencePlan& plan, Stream stream) override {
    return inner_->upload(plan, stream);
  }
  void refill(UploadedPlan& /*uploaded*/, const SequencePlan& /*plan*/,
              Stream /*stream*/) override {
    throw Thrown(thrown_);
  }
  void dispatch(const SequenceCall& call) override {
    if (fails_) throw Thrown(thrown_);
    inner_->dispatch(call);
  }
  void kv_gradient(const SequenceCall& call) override { inner_->kv_gradient(call); }
  void synchronize(Stream stream) override { inner_->synchronize(stream); }
  void finish() override { inner_->finish(); }

 private:
  std::unique_ptr<Executor> inner_;
  bool fails_;
  Thrown thrown_;
};

/// Afterwards the dispatcher of the failing rank is unusable, and the others know why.
template <class Thrown>
void expect_unusable_after(const Thrown& thrown, const std::string& reason) {
  const auto sample = test::sequence_cases(2, 0).at(3);
  const test::Expected expected(sample);
  std::atomic<int> checked = 0;
  const auto body = [&](std::shared_ptr<Bootstrap> bootstrap) {
    auto transport = make_thread_transport(std::move(bootstrap));
    const std::size_t r = to_int(transport->rank());
    auto executor =
        std::make_unique<FailingExecutor<Thrown>>(make_host_executor(*transport), r == 1, thrown);
    World world(std::move(transport), std::move(executor));
    SequenceDispatcher dispatcher(world);
    const auto plan = dispatcher.plan_dispatch(test::forward_parts(sample));
    const std::vector<ConstTensorView> inputs{expected.q[r].view(), expected.k[r].view(),
                                              expected.v[r].view()};
    if (r == 1) {
      EXPECT_THROW((void)dispatcher.dispatch(plan, inputs), Thrown);
    } else {
      try {
        (void)dispatcher.dispatch(plan, inputs);
        ADD_FAILURE() << "expected PeerFailed";
      } catch (const PeerFailed& error) {
        EXPECT_EQ(error.what(), concat("dispatch: rank 1 failed: ", reason));
      }
    }
    try {
      (void)dispatcher.dispatch(plan, inputs);
      ADD_FAILURE() << "expected the dispatcher to be unusable";
    } catch (const TransportError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("the dispatcher is unusable after a failure: "), std::string::npos);
      EXPECT_NE(text.find(reason), std::string::npos) << text;
      ++checked;
    }
  };
  run_ranks_as_threads(2, body, long_timeout_s);
  EXPECT_EQ(checked, 2);
}

TEST(AbortState, NoMemoryMakesTheObjectUnusable) {
  expect_unusable_after(std::bad_alloc(), "out of memory");
}

TEST(AbortState, AnErrorOfCudaMakesTheObjectUnusable) {
  expect_unusable_after(CudaError("no device any more"), "no device any more");
}

TEST(AbortState, APlanThatCannotBeReplacedStaysAsItWas) {
  const auto sample = test::sequence_cases(2, 0).at(3);
  const test::Expected expected(sample);
  const InvalidArgument refusal("no room for another plan");
  run_ranks_as_threads(
      2,
      [&](std::shared_ptr<Bootstrap> bootstrap) {
        auto transport = make_thread_transport(std::move(bootstrap));
        const std::size_t r = to_int(transport->rank());
        auto executor = std::make_unique<FailingExecutor<InvalidArgument>>(
            make_host_executor(*transport), false, refusal);
        World world(std::move(transport), std::move(executor));
        SequenceDispatcher dispatcher(world);
        auto plan = dispatcher.plan_dispatch(test::forward_parts(sample));
        for (int trial = 0; trial < 2; ++trial) {
          EXPECT_THROW(dispatcher.replace_plan(plan, test::forward_parts(sample)), InvalidArgument);
        }
        const std::vector<ConstTensorView> inputs{expected.q[r].view(), expected.k[r].view(),
                                                  expected.v[r].view()};
        const auto outputs = dispatcher.dispatch(plan, inputs);
        EXPECT_TRUE(test::same_bytes(outputs[0], expected.q_out[r]));
      },
      long_timeout_s);
}

TEST(AbortState, AnArgumentDoesNot) {
  const auto sample = test::sequence_cases(2, 0).at(3);
  run_thread_world(2, [&](World& world) {
    SequenceDispatcher dispatcher(world);
    EXPECT_THROW(dispatcher.reserve(-1), InvalidArgument);
    dispatcher.reserve(1 << 20);
    dispatcher.close();
    try {
      (void)dispatcher.gradient_inputs(dispatcher.plan_kv_gradient(test::kv_parts(sample)));
      ADD_FAILURE() << "expected the dispatcher to be closed";
    } catch (const TransportError& error) {
      EXPECT_STREQ(error.what(), "gradient_inputs: the dispatcher was closed");
    }
  });
}

}  // namespace
}  // namespace waybill
