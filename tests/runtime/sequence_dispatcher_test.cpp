#include "waybill/runtime/sequence_dispatcher.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "support/expect_error.h"
#include "support/run_ranks.h"
#include "support/sequence_step.h"

namespace waybill {
namespace {

using test::check_step;
using test::Expected;
using test::forward_parts;
using test::kv_parts;
using test::same_bytes;
using test::SequenceCase;
using test::to_size;

TEST(SequenceDispatcher, equals_the_simulation) {
  for (const std::int32_t world_size : {1, 2, 5}) {
    const auto cases = test::sequence_cases(world_size, 20);
    std::vector<Expected> expected;
    for (const SequenceCase& sample : cases) expected.emplace_back(sample);
    run_thread_world(world_size, [&](World& world) {
      SequenceDispatcher dispatcher(world);
      for (std::size_t i = 0; i < cases.size(); ++i) {
        check_step(world, dispatcher, cases[i], expected[i]);
      }
      dispatcher.close();
    });
  }
}

TEST(SequenceDispatcher, dispatch_reaches_other_nodes) {
  const auto cases = test::sequence_cases(4, 6);
  run_thread_world(
      4,
      [&](World& world) {
        SequenceDispatcher dispatcher(world);
        for (const SequenceCase& sample : cases) {
          const Expected expected(sample);
          const std::size_t r = to_int(world.rank());
          const auto plan = dispatcher.plan_dispatch(kv_parts(sample));
          const auto outputs = dispatcher.dispatch(
              plan, std::vector<ConstTensorView>{expected.k[r].view(), expected.v[r].view()});
          ASSERT_TRUE(same_bytes(outputs[0], expected.k_out[r])) << sample.name;
          ASSERT_TRUE(same_bytes(outputs[1], expected.v_out[r])) << sample.name;
        }
      },
      {.ranks_per_node = 2});
}

TEST(SequenceDispatcher, rows_of_the_input_may_have_any_distance) {
  const auto cases = test::sequence_cases(3, 16);
  run_thread_world(3, [&](World& world) {
    SequenceDispatcher dispatcher(world);
    for (const SequenceCase& sample : cases) {
      const Expected expected(sample);
      const std::size_t r = to_int(world.rank());
      // Q in the middle of wider rows, as a part of a fused projection.
      const std::int64_t rows = expected.q[r].shape()[0];
      HostTensor wide(sample.q.dtype, {rows + 1, sample.q.hidden + 5});
      ConstTensorView view = std::as_const(wide).view();
      const std::int64_t element = dtype_bytes(sample.q.dtype);
      view.data += 2 * element;
      view.shape = {rows, sample.q.hidden};
      for (std::int64_t row = 0; row < rows; ++row) {
        std::memcpy(wide.bytes().data() + (row * (sample.q.hidden + 5) + 2) * element,
                    expected.q[r].bytes().data() + row * sample.q.row_bytes(),
                    sample.q.row_bytes());
      }
      const std::vector<SequencePart> parts{{&sample.routing.fwd_q, {sample.q}}};
      const auto plan = dispatcher.plan_dispatch(parts);
      const auto outputs = dispatcher.dispatch(plan, std::vector<ConstTensorView>{view});
      ASSERT_TRUE(same_bytes(outputs[0], expected.q_out[r])) << sample.name;
    }
  });
}

TEST(SequenceDispatcher, calls_follow_each_other_without_barriers_and_with_late_ranks) {
  const auto cases = test::sequence_cases(4, 12);
  std::vector<Expected> expected;
  for (std::size_t i = 0; i < cases.size(); ++i) expected.emplace_back(cases[i], 100 * i);
  run_thread_world(4, [&](World& world) {
    SequenceDispatcher dispatcher(world);
    Random random(to_int(world.rank()));
    for (int round = 0; round < 3; ++round) {
      for (std::size_t i = 0; i < cases.size(); ++i) {
        if (random.below(4) == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(random.below(3000)));
        }
        check_step(world, dispatcher, cases[i], expected[i]);
      }
    }
  });
}

TEST(SequenceDispatcher, forward_and_backward_may_follow_different_plans) {
  const auto cases = test::sequence_cases(3, 8);
  const SequenceCase& forward = cases[cases.size() - 1];
  const SequenceCase& backward = cases[cases.size() - 2];
  const Expected arrived(forward);
  const Expected back(backward);
  run_thread_world(3, [&](World& world) {
    SequenceDispatcher dispatcher(world);
    const std::size_t r = to_int(world.rank());
    const auto plan = dispatcher.plan_dispatch(forward_parts(forward));
    const auto gradient = dispatcher.plan_kv_gradient(kv_parts(backward));
    const auto outputs = dispatcher.dispatch(
        plan, std::vector<ConstTensorView>{arrived.q[r].view(), arrived.k[r].view(),
                                           arrived.v[r].view()});
    HostTensor dk(backward.k.dtype, back.k[r].shape());
    HostTensor dv(backward.v.dtype, back.v[r].shape());
    const auto places = dispatcher.gradient_inputs(gradient);  // no copy: written in place
    ASSERT_TRUE(same_bytes(outputs[0], arrived.q_out[r]));  // still there, also when windows grew
    std::ranges::copy(back.k_out[r].bytes(), places[0].data);
    std::ranges::copy(back.v_out[r].bytes(), places[1].data);
    dispatcher.kv_gradient(gradient, std::vector<ConstTensorView>{places[0], places[1]},
                           std::vector<TensorView>{dk.view(), dv.view()});
    ASSERT_TRUE(same_bytes(dk.view(), back.k_gradient[r]));
    ASSERT_TRUE(same_bytes(dv.view(), back.v_gradient[r]));
  });
}

TEST(SequenceDispatcher, nothing_but_the_tensors_is_written) {
  const auto cases = test::sequence_cases(3, 12);
  run_thread_world(3, [&](World& world) {
    SequenceDispatcher dispatcher(world);
    dispatcher.reserve(1 << 20);
    for (const SequenceCase& sample : cases) {
      const Expected expected(sample);
      const std::size_t r = to_int(world.rank());
      const auto plan = dispatcher.plan_dispatch(forward_parts(sample));
      const std::vector<ConstTensorView> inputs{expected.q[r].view(), expected.k[r].view(),
                                                expected.v[r].view()};
      std::byte* const window = dispatcher.dispatch(plan, inputs)[0].data;  // this parity
      (void)dispatcher.dispatch(plan, inputs);                              // the other
      world.barrier();
      std::memset(window, 0xA5, dispatcher.window_bytes());
      world.barrier();
      const auto outputs = dispatcher.dispatch(plan, inputs);
      ASSERT_EQ(outputs[0].data, window);
      std::vector<bool> may_change(dispatcher.window_bytes());
      for (std::size_t t = 0; t < 3; ++t) {
        const auto begin = plan.window_offsets()[t];
        const auto bytes = plan.window_rows()[t] * plan.tensors()[t].row_bytes();
        std::fill_n(may_change.begin() + begin, bytes, true);
      }
      world.barrier();
      for (std::size_t i = 0; i < may_change.size(); ++i) {
        ASSERT_TRUE(may_change[i] || window[i] == std::byte{0xA5}) << sample.name << ", byte " << i;
      }
      world.barrier();
    }
  });
}

TEST(SequenceDispatcher, a_plan_is_replaced_in_place) {
  const auto cases = test::sequence_cases(3, 0);
  const SequenceCase& large = cases[2];  // one rank gets all
  const SequenceCase& small = cases[1];  // one token
  const Expected expected(small);
  run_thread_world(3, [&](World& world) {
    SequenceDispatcher dispatcher(world);
    dispatcher.reserve(1 << 20);
    const std::size_t r = to_int(world.rank());
    auto plan = dispatcher.plan_dispatch(forward_parts(large));
    dispatcher.replace_plan(plan, forward_parts(small));
    const auto outputs = dispatcher.dispatch(
        plan, std::vector<ConstTensorView>{expected.q[r].view(), expected.k[r].view(),
                                           expected.v[r].view()});
    ASSERT_TRUE(same_bytes(outputs[0], expected.q_out[r]));
    SequenceCase other = small;
    other.q.hidden = 65;
    EXPECT_TRUE(test::rejects([&] { dispatcher.replace_plan(plan, forward_parts(other)); },
                              {"other formats"}));
  });
}

TEST(SequenceDispatcher, a_rank_that_never_calls_is_named_by_all_others) {
  const auto sample = test::sequence_cases(4, 1).back();
  const Expected expected(sample);
  auto bootstraps = make_thread_bootstraps(4, 0.5);
  const auto results = test::run_ranks(4, [&](std::int32_t rank) {
    World world = make_thread_world(std::move(bootstraps[rank]));
    SequenceDispatcher dispatcher(world);
    const auto plan = dispatcher.plan_dispatch(forward_parts(sample));
    const std::vector<ConstTensorView> inputs{expected.q[rank].view(), expected.k[rank].view(),
                                              expected.v[rank].view()};
    for (int call = 1; call <= 3; ++call) {
      if (call == 3 && rank == 1) return;  // its memory goes too
      try {
        (void)dispatcher.dispatch(plan, inputs);
      } catch (const Timeout&) {
        EXPECT_THROW((void)dispatcher.dispatch(plan, inputs), TransportError);
        throw;
      }
    }
  });
  EXPECT_EQ(results[1].text, "");
  for (const std::int32_t r : {0, 2, 3}) {
    const TimeoutInfo missed = test::timeout_of(results[r]);
    EXPECT_EQ(missed.operation, "dispatch");
    EXPECT_EQ(missed.rank, r);
    EXPECT_EQ(missed.peer, 1);
    EXPECT_EQ(missed.wanted, 3U);
    EXPECT_EQ(missed.seen, 2U);
    EXPECT_GE(missed.seconds, 0.5);
    EXPECT_LT(missed.seconds, 3);
  }
}

TEST(SequenceDispatcher, views_may_outlive_close_with_their_memory) {
  const auto cases = test::sequence_cases(2, 1);
  const Expected expected(cases.back());
  run_thread_world(2, [&](World& world) {
    const std::size_t r = to_int(world.rank());
    SequenceDispatcher dispatcher(world);
    EXPECT_TRUE(dispatcher.window_memory().empty());
    const auto plan = dispatcher.plan_dispatch(forward_parts(cases.back()));
    const auto outputs = dispatcher.dispatch(
        plan, std::vector<ConstTensorView>{expected.q[r].view(), expected.k[r].view(),
                                           expected.v[r].view()});
    const auto memory = dispatcher.window_memory();
    EXPECT_FALSE(memory.empty());
    dispatcher.close();
    EXPECT_TRUE(same_bytes(outputs[0], expected.q_out[r]));
    EXPECT_TRUE(same_bytes(outputs[2], expected.v_out[r]));
  });
}

TEST(SequenceDispatcher, refuses_before_anything_moves) {
  const auto sample = test::sequence_cases(2, 0)[2];
  const Expected expected(sample);
  run_thread_world(2, [&](World& world) {
    SequenceDispatcher dispatcher(world, {.max_window_bytes = 1024});
    const std::size_t r = to_int(world.rank());
    const auto rejects = [](const auto& call, std::string_view text) {
      EXPECT_TRUE(test::rejects(call, {text}));
    };
    const auto plan = dispatcher.plan_dispatch(forward_parts(sample));
    const ConstTensorView q = expected.q[r].view();
    const ConstTensorView k = expected.k[r].view();
    const std::vector<ConstTensorView> good{q, k, k};
    rejects([&] { (void)dispatcher.dispatch(plan, good); }, "max_window_bytes = 1024");
    rejects([&] { dispatcher.reserve(1025); }, "window_bytes = 1025");
    EXPECT_EQ(dispatcher.window_bytes(), 0);
    SequenceDispatcher wide(world);
    rejects([&] { (void)wide.dispatch(plan, std::vector{q, k}); }, "got 2 tensors, expected 3");
    rejects([&] { (void)wide.dispatch(plan, std::vector{k, q, k}); }, "tensors[0] has shape");
    auto bad = good;
    bad[1].dtype = DType::float16;
    rejects([&] { (void)wide.dispatch(plan, bad); }, "tensors[1] has dtype float16");
    bad = good;
    bad[0].shape[0] -= 1;
    rejects([&] { (void)wide.dispatch(plan, bad); }, "expected at least");
    bad = good;
    bad[2].strides = {1, 10};
    rejects([&] { (void)wide.dispatch(plan, bad); }, "adjacent elements");
    bad = good;
    bad[2].data = nullptr;
    rejects([&] { (void)wide.dispatch(plan, bad); }, "tensors[2] is null");
    rejects([&] { wide.kv_gradient(plan, good, {}); }, "the plan is for dispatch");
    rejects([&] { (void)wide.dispatch(PlanHandle{}, good); }, "the plan is empty");
    wide.close();
    EXPECT_THROW((void)wide.dispatch(plan, good), TransportError);
  });
}

}  // namespace
}  // namespace waybill
