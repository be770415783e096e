// Layers of fixed rows on GPUs: rows that do not fit, and where combine takes its rows from.

#include <gtest/gtest.h>

#include <atomic>

#include "cuda/captured.h"
#include "cuda/gpu_expert_rounds.h"
#include "moe/overflow.h"
#include "support/expect_error.h"
#include "waybill/experts/ep_all2all_layer.h"

namespace waybill {
namespace {

using test::Captured;
using test::DeviceArena;
using test::DeviceInput;
using test::Draw;
using test::ExpertCase;
using test::rejects;
using test::same_bytes;
using test::small_config;
using test::to_size;

constexpr std::int64_t arena_bytes = std::int64_t{128} << 20;

/// One rank's layer on its device.
class Rank {
 public:
  Rank(World& world, EPConfig config, const EPLayerOptions& options)
      : world_(world), arena_(world, arena_bytes), r_(to_int(world.rank())) {
    config.rank = to_int(world.rank());
    layer_ = std::make_unique<EPAll2AllLayer>(world, config, options);
  }

  [[nodiscard]] EPAll2AllLayer& layer() { return *layer_; }
  [[nodiscard]] DeviceArena& arena() { return arena_; }
  [[nodiscard]] Stream stream() const { return {arena_.stream()}; }
  [[nodiscard]] std::size_t index() const { return r_; }

  EPDispatched dispatch(const ExpertCase& sample) {
    const DeviceInput device(arena_, sample, layer_->config().rank);
    return layer_->dispatch(device.input, stream());
  }

  HostTensor combine(const ConstTensorView& rows, const EPLayout& layout) {
    const TensorView sums =
        arena_.take(layer_->config().token_dtype, {layout.num_tokens(), layer_->config().hidden});
    layer_->combine({rows, {}, {}, sums}, layout, stream());
    EXPECT_TRUE(arena_.guards_hold(sums));
    return arena_.download(sums);
  }

  void close() {
    layer_->synchronize(stream());
    world_.barrier();
    layer_->finalize();
  }

 private:
  World& world_;
  DeviceArena arena_;
  std::size_t r_;
  std::unique_ptr<EPAll2AllLayer> layer_;
};

/// Too many rows, then few, again and again: what fits is right, the sums of the others are NaN,
/// and all ranks are told by the number of the call.
class OverflowSteps {
 public:
  OverflowSteps(Rank& rank, const ExpertCase& few, const ExpertCase& many)
      : rank_(rank),
        few_(few),
        many_(many),
        fits_(few.dispatch(rank.layer().options().dispatch)),
        cut_(many.dispatch(rank.layer().options().dispatch)) {}

  /// @return tokens of this rank whose rows did not fit
  std::int64_t run() {
    std::int64_t lost = 0;
    for (std::uint64_t i = 0; i < 3; ++i) {
      rank_.arena().reset();
      lost += lose_rows(4 * i + 1);
      const EPDispatched got = rank_.dispatch(few_);
      EXPECT_TRUE(same_bytes(rank_.combine(got.rows, *got.layout), sums_of(fits_)));
      EXPECT_NO_THROW(rank_.layer().synchronize(rank_.stream()));
    }
    return lost;
  }

 private:
  [[nodiscard]] HostTensor sums_of(const ExpertDispatch& dispatch) const {
    return simulate_expert_combine(
        dispatch, test::views_of(dispatch.recv_tokens),
        {.local_combine = rank_.layer().options().enable_local_combine})[rank_.index()];
  }

  std::int64_t lose_rows(std::uint64_t number) {
    EPAll2AllLayer& layer = rank_.layer();
    const std::int64_t capacity = layer.options().fixed_rows;
    const EPDispatched got = rank_.dispatch(many_);
    test::expect_rows_that_fit(rank_.arena().download(got.rows), cut_.recv_tokens[rank_.index()],
                               capacity);
    const HostTensor sums = rank_.combine(got.rows, *got.layout);
    const std::string rows = concat(cut_.rows.largest_recv_rows, " rows");
    EXPECT_TRUE(rejects([&] { layer.synchronize(rank_.stream()); },
                        {concat("dispatch ", number, ": "), rows, "fixed_rows = "}));
    return test::expect_lost_are_nan(cut_, rank_.index(), sums, sums_of(cut_), capacity);
  }

  Rank& rank_;
  const ExpertCase& few_;
  const ExpertCase& many_;
  ExpertDispatch fits_;
  ExpertDispatch cut_;
};

void check_overflow(const EPConfig& config, const EPDispatchOptions& dispatch = {},
                    bool local_combine = false) {
  Random random(91);
  for (const Draw draw : {Draw::one_expert, Draw::repeats}) {
    const ExpertCase few = test::random_case(config, random, {.drop = 0, .tokens = 3});
    const ExpertCase many =
        test::random_case(config, random, {.draw = draw, .drop = 0, .tokens = config.max_tokens});
    const ExpertDispatch cut = many.dispatch(dispatch);
    EPLayerOptions options{.dispatch = dispatch, .num_sms = 4};
    options.enable_local_combine = local_combine;
    options.fixed_rows = std::max<std::int64_t>(40, cut.rows.largest_recv_rows / 2);
    std::atomic<std::int64_t> num_lost{0};
    run_gpu_thread_world(
        config.world_size,
        [&](World& world) {
          Rank rank(world, config, options);
          num_lost += OverflowSteps(rank, few, many).run();
          rank.close();
        },
        test::options_of(config));
    EXPECT_GT(num_lost, 0);
  }
}

EPConfig many_tokens() {
  EPConfig config = small_config(2);
  config.max_tokens = 300;
  return config;
}

TEST(GpuLayerRows, that_do_not_fit_make_nan_sums) { check_overflow(small_config(2)); }
TEST(GpuLayerRows, that_do_not_fit_of_more_tokens) { check_overflow(many_tokens()); }
TEST(GpuLayerRows, that_do_not_fit_in_local_sums) { check_overflow(many_tokens(), {}, true); }
TEST(GpuLayerRows, that_do_not_fit_of_compact_rows) {
  check_overflow(small_config(2), {.rows = EPRows::compact});
}
TEST(GpuLayerRows, that_do_not_fit_with_padding) {
  check_overflow(many_tokens(), {.expert_alignment = 8});
}
TEST(GpuLayerRows, that_do_not_fit_on_nodes) { check_overflow(small_config(4, 2)); }
TEST(GpuLayerRows, that_do_not_fit_as_elements_that_bulk_copies_do_not_suit) {
  EPConfig config = many_tokens();
  config.hidden = 37;
  check_overflow(config);
}

/// Fewer rows than the window has are enough if they are those that arrived.
TEST(GpuLayerRows, of_a_combine_may_be_those_that_arrived) {
  const EPConfig config = small_config(2);
  Random random(92);
  const test::AnsweredCase sample =
      test::answered(test::random_case(config, random, {.drop = 0, .tokens = 20}));
  run_gpu_thread_world(
      2,
      [&](World& world) {
        Rank rank(world, config, {.num_sms = 4, .fixed_rows = most_recv_rows(config, {})});
        for (int i = 0; i < 4; ++i) {
          const EPDispatched got = rank.dispatch(sample.sample);
          const std::int64_t arrived = sample.dispatch.recv_tokens[rank.index()].shape()[0];
          TensorView rows = got.rows;
          rows.shape[0] = arrived;
          if (i % 2 == 1) {
            const TensorView place = rank.layer().combine_input(arrived, rank.stream());
            rank.arena().copy(place.data, rows.data,
                              arrived * config.hidden * dtype_bytes(config.token_dtype));
            rows = place;
          }
          EXPECT_TRUE(same_bytes(rank.combine(rows, *got.layout), sample.sums[rank.index()]));
          if (i < 2) continue;
          EXPECT_EQ(got.layout->num_recv_rows(), arrived);  // now the host knows
          rows.shape[0] = arrived - 1;
          EXPECT_TRUE(rejects([&] { (void)rank.combine(rows, *got.layout); },
                              {"combine: input has ", concat("expected at least ", arrived)}));
        }
        rank.close();
      },
      test::options_of(config));
}

/// Two dispatches whose experts both write where combine wants it, ranks being late; and graphs
/// with an odd number of combines between.
TEST(GpuLayerRows, of_two_combines_have_a_place_each) {
  const EPConfig config = small_config(2);
  Random random(93);
  std::vector<test::AnsweredCase> steps;
  for (int i = 0; i < 12; ++i) {
    steps.push_back(test::answered(test::random_case(config, random, {.tokens = 30})));
  }
  const std::int64_t fixed = most_recv_rows(config, {});
  run_gpu_thread_world(
      2,
      [&](World& world) {
        Rank rank(world, config, {.num_sms = 4, .fixed_rows = fixed});
        const auto bytes = fixed * config.hidden * dtype_bytes(config.token_dtype);
        for (std::size_t i = 0; i < steps.size(); i += 2) {
          const EPDispatched made[] = {rank.dispatch(steps[i].sample),
                                       rank.dispatch(steps[i + 1].sample)};
          TensorView places[2];
          for (std::size_t k = 0; k < 2; ++k) {
            places[k] = rank.layer().combine_input(fixed, rank.stream());
            rank.arena().copy(places[k].data, made[k].rows.data, bytes);
          }
          for (std::size_t k = 0; k < 2; ++k) {
            EXPECT_TRUE(same_bytes(rank.combine(places[k], *made[k].layout),
                                   steps[i + k].sums[rank.index()]));
          }
        }
        rank.close();
      },
      test::options_of(config));
}

TEST(GpuLayerRows, have_a_place_that_no_graph_still_reads) {
  const EPConfig config = small_config(2);
  Random random(94);
  const auto first = test::answered(test::random_case(config, random, {.tokens = 50}));
  const auto second = test::answered(test::random_case(config, random, {.tokens = 50}));
  const std::int64_t fixed = most_recv_rows(config, {});
  run_gpu_thread_world(
      2,
      [&](World& world) {
        Rank rank(world, config, {.num_sms = 4, .fixed_rows = fixed});
        DeviceArena& arena = rank.arena();
        const DeviceInput inputs[] = {{arena, first.sample, rank.layer().config().rank},
                                      {arena, second.sample, rank.layer().config().rank}};
        const TensorView graph_sums = arena.take(config.token_dtype, {50, config.hidden});
        const TensorView sums = arena.take(config.token_dtype, {50, config.hidden});
        const auto bytes = fixed * config.hidden * dtype_bytes(config.token_dtype);
        const auto step = [&](const DeviceInput& input, const TensorView& to) {
          const EPDispatched got = rank.layer().dispatch(input.input, rank.stream());
          const TensorView place = rank.layer().combine_input(fixed, rank.stream());
          arena.copy(place.data, got.rows.data, bytes);
          rank.layer().combine({place, {}, {}, to}, *got.layout, rank.stream());
        };
        step(inputs[0], graph_sums);
        arena.synchronize();
        world.barrier();
        const Captured graph(arena.stream(), [&] { step(inputs[0], graph_sums); });
        const EPDispatched known = rank.layer().dispatch(inputs[1].input, rank.stream());
        const TensorView kept = arena.take(config.token_dtype, {fixed, config.hidden});
        arena.copy(kept.data, known.rows.data, bytes);
        Random delays(rank.index());
        for (int i = 0; i < 20; ++i) {
          if (delays.below(3) == 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(delays.below(9)));
          }
          graph.launch(world);  // one combine; the next rows go where its rows are, or were
          const TensorView place = rank.layer().combine_input(fixed, rank.stream());
          arena.copy(place.data, kept.data, bytes);
          rank.layer().combine({place, {}, {}, sums}, *known.layout, rank.stream());
          ASSERT_TRUE(same_bytes(arena.download(graph_sums), first.sums[rank.index()])) << i;
          ASSERT_TRUE(same_bytes(arena.download(sums), second.sums[rank.index()])) << i;
        }
        rank.close();
      },
      test::options_of(config));
}

}  // namespace
}  // namespace waybill
