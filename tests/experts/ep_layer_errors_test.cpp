#include <gtest/gtest.h>

#include <algorithm>

#include "experts/expert_rounds.h"
#include "support/expect_error.h"
#include "support/run_ranks.h"

namespace waybill::test {
namespace {

EPConfig good(std::int32_t per_node = 2) {
  EPConfig config;
  config.max_tokens = 8;
  config.hidden = 16;
  config.topk = 2;
  config.num_experts = 4;
  config.world_size = 2;
  config.local_world_size = per_node;
  return config;
}

TEST(EPLayerErrors, RefuseWhatDoesNotFitTheWorld) {
  run_thread_world(2, [](World& world) {
    const auto refuses = [&](auto&& change, std::initializer_list<std::string_view> parts) {
      EPConfig config = at_rank(good(), world);
      EPLayerOptions options;
      change(config, options);
      EXPECT_TRUE(rejects([&] { const EPAll2AllLayer layer(world, config, options); }, parts));
    };
    refuses([](EPConfig& c, EPLayerOptions&) { c.world_size = 4, c.rank = 0; },
            {"world_size = 4", "expected 2"});
    refuses([](EPConfig& c, EPLayerOptions&) { c.local_world_size = 1; }, {"local_world_size = 1"});
    refuses([](EPConfig& c, EPLayerOptions&) { c.rank = 1 - c.rank; }, {"rank = "});
    refuses([](EPConfig& c, EPLayerOptions&) { c.num_experts = 3; }, {"num_experts = 3"});
    refuses([](EPConfig&, EPLayerOptions& o) { o.num_sms = 0; }, {"num_sms = 0"});
    refuses([](EPConfig&, EPLayerOptions& o) { o.capacity_factor = 0; }, {"capacity = 0"});
    refuses([](EPConfig&, EPLayerOptions& o) { o.fixed_rows = -1; }, {"fixed_rows = -1"});
    refuses([](EPConfig&, EPLayerOptions& o) { o.max_per_expert = -1; }, {"max_per_expert = -1"});
    refuses([](EPConfig&, EPLayerOptions& o) { o.push_combine = true; },
            {"push_combine = true, expected false", "goes in 0.3"});
    refuses([](EPConfig&, EPLayerOptions& o) { o.dispatch.dropped_id = 7; }, {"dropped_id = 7"});
    EPAll2AllLayer layer(world, at_rank(good(), world));  // nothing above has told anybody
    layer.finalize();
  });
}

TEST(EPLayerErrors, ComeBeforeAnyCommunicationAndTheCallMayBeRepeated) {
  Random random(41);
  const EPLayerOptions options{.max_per_expert =
                                   9};  // that a token chooses an expert twice is no error
  const auto round = make_round(random_case(good(), random, {.tokens = 5}), options, random);
  run_thread_world(2, [&](World& world) {
    const auto rank = static_cast<std::size_t>(to_int(world.rank()));
    EPAll2AllLayer layer(world, at_rank(good(), world), options);
    const auto refuses = [&](auto&& change, std::initializer_list<std::string_view> parts) {
      ExpertDispatchInput input = input_of(round, rank);
      change(input);
      EXPECT_TRUE(rejects([&] { (void)layer.dispatch(input); }, parts));
    };
    const HostTensor wide(DType::bfloat16, {5, 17});
    const HostTensor other(DType::float32, {5, 16});
    const HostTensor many(DType::bfloat16, {9, 16});
    HostTensor ids(DType::int32, {5, 2});
    ids.as<std::int32_t>()[3] = 5;
    refuses([&](auto& in) { in.tokens = wide.view(); }, {"dispatch: input has shape [5, 17]"});
    refuses([&](auto& in) { in.tokens = other.view(); }, {"input is float32", "bfloat16"});
    refuses([&](auto& in) { in.tokens = many.view(); }, {"9 tokens", "max_tokens = 8"});
    refuses([&](auto& in) { in.tokens.strides = {1, 5}; }, {"input has strides", "contiguous"});
    refuses([&](auto& in) { in.tokens.data = nullptr; }, {"input is null"});
    refuses([&](auto& in) { in.ids = ids.view(); }, {"exp_indices[1][1] = 5", "0..3"});
    HostTensor often(DType::int32, {5, 2});
    std::ranges::fill(often.as<std::int32_t>(), 3);
    refuses(
        [&](auto& in) { in.ids = often.view(); },
        {"dispatch: exp_indices of rank ", " hold expert 3 more than max_per_expert = 9 times"});
    often.as<std::int32_t>()[0] = 2;  // and now 9 times
    ExpertDispatchInput as_often_as_may_be = input_of(round, rank);
    as_often_as_may_be.ids = often.view();
    EXPECT_NO_THROW((void)layer.dispatch(as_often_as_may_be));
    refuses([&](auto& in) { in.ids.shape = {4, 2}; }, {"exp_indices has shape [4, 2]"});
    refuses([&](auto& in) { in.ids = other.view(); }, {"exp_indices is float32"});
    refuses([&](auto& in) { in.ids = {}; }, {"exp_indices is not given, expected ["});
    refuses([&](auto& in) { in.weights = wide.view(); }, {"weight is bfloat16"});
    refuses([&](auto& in) { in.scales = other.view(); }, {"scales"});
    refuses([&](auto& in) { in.full_scatter_indices = other.view(); }, {"full_scatter_indices"});
    const HostTensor none(DType::int32, {0, 2});  // not the same as not given
    refuses([&](auto& in) { in.full_scatter_indices = none.view(); },
            {"full_scatter_indices has 0 tokens, expected those of all ranks"});
    const HostTensor more(DType::int32, {17, 2});
    refuses([&](auto& in) { in.full_scatter_indices = more.view(); },
            {"full_scatter_indices has 17 tokens, expected those of all ranks, at most 2 * 8"});

    const EPDispatched got = layer.dispatch(input_of(round, rank));
    expect_dispatched(got, round, rank);
    HostTensor sums(DType::bfloat16, {5, 16});
    const auto refuses_combine = [&](auto&& change, std::initializer_list<std::string_view> parts) {
      ExpertCombineInput input{
          .rows = round.outputs[rank].view(), .options = {}, .biases = {}, .output = sums.view()};
      change(input);
      EXPECT_TRUE(rejects([&] { layer.combine(input, *got.layout); }, parts));
    };
    HostTensor short_sums(DType::bfloat16, {4, 16});
    const std::vector<ConstTensorView> three(3, ConstTensorView(sums.view()));
    refuses_combine([](auto& in) { in.rows.shape[0] += 1; }, {"combine: input has shape"});
    refuses_combine([](auto& in) { in.rows.dtype = DType::float32; }, {"input is float32"});
    refuses_combine([&](auto& in) { in.output = short_sums.view(); }, {"output has shape [4, 16]"});
    refuses_combine([&](auto& in) { in.biases = three; }, {"3 biases"});
    EXPECT_TRUE(rejects(
        [&] {
          layer.combine({.rows = round.outputs[rank].view(),
                         .options = {},
                         .biases = {},
                         .output = sums.view()},
                        EPLayout{});
        },
        {"belongs to another layer"}));
    EXPECT_TRUE(rejects([&] { (void)layer.combine_input(1 << 20, {}); }, {"combine_input: rows"}));
    expect_combined(layer, *got.layout, round, rank);
    layer.finalize();
    EXPECT_THROW((void)layer.dispatch(input_of(round, rank)), TransportError);
  });
}

TEST(EPLayerErrors, PositionsThatFitNoRowAreNamedAndTheLayerLivesOn) {
  Random random(42);
  const EPLayerOptions options;
  for (const std::int32_t per_node : {2, 1}) {
    ExpertCase one = random_case(good(per_node), random, {.drop = 0, .tokens = 5});
    const auto plain = make_round(one, options, random);
    const auto positions = canonical_scatter_indices(one.config, plain.dispatch.ids);
    one.positions = HostTensor(DType::int32, {10, 2});
    std::ranges::copy(positions, one.positions->as<std::int32_t>().begin());
    const auto fixed = make_round(one, options, random);
    auto wrong = fixed;
    wrong.inputs.positions->as<std::int32_t>()[0] = 1000;
    auto own = fixed;  // of rank 0 alone
    own.inputs.positions = HostTensor(DType::int32, {5, 2});
    run_thread_world(2,
                     [&](World& world) {
                       const auto rank = static_cast<std::size_t>(to_int(world.rank()));
                       EPAll2AllLayer layer(world, at_rank(good(per_node), world), options);
                       for (int i = 0; i < 3; ++i) {
                         const EPDispatched got = layer.dispatch(input_of(fixed, rank));
                         expect_dispatched(got, fixed, rank);
                         expect_combined(layer, *got.layout, fixed, rank);
                         EXPECT_TRUE(rejects([&] { (void)layer.dispatch(input_of(wrong, rank)); },
                                             {"full_scatter_indices"}));
                       }
                       EXPECT_TRUE(rejects([&] { (void)layer.dispatch(input_of(own, rank)); },
                                           {"full_scatter_indices has 5 tokens, expected 10: those "
                                            "of all ranks, one rank after another"}));
                       layer.finalize();
                     },
                     {.ranks_per_node = per_node});
  }
}

TEST(EPLayerErrors, ARankThatNeverCallsIsNamed) {
  Random random(43);
  for (const bool in_combine : {false, true}) {
    const EPLayerOptions options;
    EPConfig config = good(3);
    config.world_size = 3;
    config.num_experts = 6;
    const auto round = make_round(random_case(config, random, {.tokens = 5}), options, random);
    const auto results = run_with_bootstrap(3, 0.5, [&](std::shared_ptr<Bootstrap> bootstrap) {
      World world = make_thread_world(std::move(bootstrap));
      const auto rank = static_cast<std::size_t>(to_int(world.rank()));
      EPAll2AllLayer layer(world, at_rank(config, world), options);
      const EPDispatched got = layer.dispatch(input_of(round, rank));
      if (rank == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1500));
        return;
      }
      const auto next = [&] {
        if (in_combine) {
          expect_combined(layer, *got.layout, round, rank);
        } else {
          (void)layer.dispatch(input_of(round, rank));
        }
      };
      EXPECT_THROW(next(), Timeout);
      EXPECT_THROW(next(), TransportError);  // of no use any more, and says so at once
      try {
        layer.ep_barrier_all();
      } catch (const TransportError& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find("from rank 1"), std::string::npos) << text;
        EXPECT_NE(text.find(in_combine ? "combine" : "dispatch"), std::string::npos) << text;
      }
    });
    expect_no_errors(results);
  }
}

TEST(BarrierAllContext, WaitsForTheNodeAlone) {
  std::atomic<int> arrived{0};
  run_thread_world(4,
                   [&](World& world) {
                     BarrierAllContext node(world);
                     BarrierAllContext all(world, false);
                     const bool second_node = to_int(world.rank()) >= 2;
                     for (int i = 1; i <= 20; ++i) {
                       if (!second_node) {
                         ++arrived;
                         node.barrier_all();
                         EXPECT_GE(arrived.load(), 2 * i);
                         node.barrier_all();
                       }
                     }
                     all.barrier_all();
                     EXPECT_EQ(arrived.load(), 40);
                     node.finalize();
                     node.finalize();
                     all.finalize();
                     EXPECT_THROW(node.barrier_all(), TransportError);
                   },
                   {.ranks_per_node = 2});
}

TEST(DispatchCombineContext, KeepsItsBuffersUntilTheyMustGrow) {
  run_thread_world(2, [](World& world) {
    auto context = DispatchCombineContext::create(world, at_rank(good(), world));
    EXPECT_EQ(context.capacity_rows(), 32);  // max_tokens * topk * 2
    const auto before = context.reallocate_dispatch_output_buf(32);
    const auto same = context.reallocate_dispatch_output_buf(5);
    EXPECT_EQ(before.rows.data, same.rows.data);
    EXPECT_EQ(before.rows.shape, (Shape{32, 16}));
    EXPECT_EQ(before.weights.shape, Shape{32});
    const auto grown = context.reallocate_dispatch_output_buf(33);
    EXPECT_EQ(grown.rows.shape, (Shape{33, 16}));
    EXPECT_EQ(grown.weights.shape, Shape{33});  // Triton-distributed makes it [rows, topk]
    EXPECT_NE(grown.rows.data, before.rows.data);
    before.rows.data[0] = std::byte{1};  // what they held may still be read
    EXPECT_TRUE(rejects([&] { (void)context.reallocate_dispatch_output_buf(-1); }, {"= -1"}));
    context.finalize();
    context.finalize();
    EXPECT_THROW((void)context.reallocate_dispatch_output_buf(1), TransportError);
  });
}

}  // namespace
}  // namespace waybill::test
