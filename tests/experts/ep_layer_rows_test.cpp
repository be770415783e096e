// Rows that do not fit, rows that are too few, and where combine takes them from.

#include <gtest/gtest.h>

#include <atomic>

#include "experts/expert_rounds.h"
#include "moe/overflow.h"
#include "support/expect_error.h"

namespace waybill::test {
namespace {

struct RowWays {
  std::int32_t per_node;
  bool local_combine;
  EPRows rows;
};

HostTensor copy_of(const TensorView& view) {
  HostTensor tensor(view.dtype, view.shape);
  std::copy(view.data, view.data + tensor.size_bytes(), tensor.bytes().begin());
  return tensor;
}

/// Dispatches of few tokens and of too many, again and again.
class OverflowSteps {
 public:
  OverflowSteps(World& world, const EPLayerOptions& options, const ExpertRoundCase& few,
                const ExpertRoundCase& many, std::atomic<std::int64_t>& num_lost)
      : few_(few),
        many_(many),
        num_lost_(num_lost),
        rank_(static_cast<std::size_t>(to_int(world.rank()))),
        layer_(world, at_rank(few.inputs.config, world), options) {}

  void run() {
    for (int i = 0; i < 3; ++i) {
      const EPDispatched good = layer_.dispatch(input_of(few_, rank_));
      const std::int64_t capacity = layer_.options().fixed_rows;
      EXPECT_EQ(good.rows.shape[0], capacity);
      expect_rows_that_fit(copy_of(good.rows), few_.dispatch.recv_tokens[rank_], capacity);
      expect_combined(layer_, *good.layout, few_, rank_);
      EXPECT_EQ(layer_.overflow().rows, 0);
      num_calls_ += 2;
      lose_rows();
    }
    layer_.synchronize();
    layer_.finalize();
  }

 private:
  void lose_rows() {
    const std::int64_t capacity = layer_.options().fixed_rows;
    const EPConfig& config = layer_.config();
    const EPDispatched cut = layer_.dispatch(input_of(many_, rank_));
    expect_rows_that_fit(copy_of(cut.rows), many_.dispatch.recv_tokens[rank_], capacity);
    const auto sums =
        simulate_expert_combine(many_.dispatch, views_of(many_.dispatch.recv_tokens),
                                {.local_combine = layer_.options().enable_local_combine});
    HostTensor got(config.token_dtype, sums[rank_].shape());
    layer_.combine({.rows = cut.rows, .options = {}, .biases = {}, .output = got.view()},
                   *cut.layout);
    num_lost_ += expect_lost_are_nan(many_.dispatch, rank_, got, sums[rank_], capacity);
    const std::string rows = concat(many_.dispatch.rows.largest_recv_rows, " rows");
    EXPECT_TRUE(rejects([&] { layer_.synchronize(); },
                        {concat("dispatch ", num_calls_ + 1, ": "), rows, "fixed_rows = 30"}));
    EXPECT_EQ(layer_.overflow().rows, 0);
    (void)layer_.dispatch(input_of(many_, rank_), *cut.layout);  // by its routing: the same again
    const ExpertOverflow over = layer_.overflow();
    EXPECT_EQ(over.rows, many_.dispatch.rows.largest_recv_rows);
    EXPECT_EQ(over.call, num_calls_ + 3);
    EXPECT_EQ(layer_.output_rows(), capacity);
    num_calls_ += 3;
  }

  const ExpertRoundCase& few_;
  const ExpertRoundCase& many_;
  std::atomic<std::int64_t>& num_lost_;  ///< tokens of all ranks
  std::size_t rank_;
  EPAll2AllLayer layer_;
  std::uint64_t num_calls_ = 0;
};

TEST(EPLayerRows, ThatDoNotFitAreReportedToAllRanksAndTheirSumsAreNaN) {
  Random random(35);
  for (const RowWays& way :
       {RowWays{4, false, EPRows::grouped}, RowWays{4, true, EPRows::grouped},
        RowWays{2, false, EPRows::grouped}, RowWays{4, false, EPRows::compact}}) {
    const EPConfig config = config_of_four(way.per_node);
    EPLayerOptions options;
    options.dispatch.rows = way.rows;
    options.enable_local_combine = way.local_combine;
    options.fixed_rows = 30;
    const auto few = make_round(random_case(config, random, {.tokens = 2}), options, random);
    const auto many =
        make_round(random_case(config, random, {.draw = Draw::repeats, .drop = 0, .tokens = 13}),
                   options, random);
    ASSERT_LE(few.dispatch.rows.largest_recv_rows, 30);
    ASSERT_GT(many.dispatch.rows.largest_recv_rows, 30);
    std::atomic<std::int64_t> num_lost{0};
    run_thread_world(
        4, [&](World& world) { OverflowSteps(world, options, few, many, num_lost).run(); },
        {.ranks_per_node = way.per_node});
    EXPECT_GT(num_lost, 0);
  }
}

TEST(EPLayerRows, OfACombineAreAtLeastThoseThatArrived) {
  Random random(36);
  for (const std::int64_t fixed : {0, 60}) {
    const EPLayerOptions options{.fixed_rows = fixed};
    const auto round = make_round(random_case(config_of_four(4), random, {.drop = 0, .tokens = 6}),
                                  options, random);
    run_thread_world(4, [&](World& world) {
      const auto rank = static_cast<std::size_t>(to_int(world.rank()));
      EPAll2AllLayer layer(world, at_rank(config_of_four(4), world), options);
      const EPDispatched got = layer.dispatch(input_of(round, rank));
      const std::int64_t arrived = round.outputs[rank].shape()[0];
      ASSERT_GT(arrived, 1);
      HostTensor sums(round.combined[rank].dtype(), round.combined[rank].shape());
      for (const std::int64_t rows : {std::int64_t{0}, arrived - 1}) {
        ConstTensorView shorter = round.outputs[rank].view();
        shorter.shape[0] = rows;
        const auto combine = [&] {
          layer.combine({.rows = shorter, .options = {}, .biases = {}, .output = sums.view()},
                        *got.layout);
        };
        const std::string least = fixed > 0
                                      ? concat("has ", rows, " rows, expected at least ", arrived)
                                      : concat("expected [", arrived, ", 24]");
        EXPECT_TRUE(rejects(combine, {"combine: input", least}));
      }
      expect_combined(layer, *got.layout, round, rank);  // told nobody
      layer.finalize();
    });
  }
}

void fill(const TensorView& place, const HostTensor& rows) {
  std::ranges::copy(rows.bytes(), place.data);
}

/// Two dispatches, whose experts both write where combine wants it.
TEST(EPLayerRows, OfTwoCombinesHaveAPlaceEach) {
  Random random(37);
  const EPLayerOptions options;
  std::vector<ExpertRoundCase> rounds;
  for (int i = 0; i < 8; ++i) {
    rounds.push_back(make_round(random_case(config_of_four(4), random, {.edges = false, .drop = 0}),
                                options, random));
  }
  run_thread_world(4, [&](World& world) {
    const auto rank = static_cast<std::size_t>(to_int(world.rank()));
    EPAll2AllLayer layer(world, at_rank(config_of_four(4), world), options);
    for (std::size_t i = 0; i < rounds.size(); i += 2) {
      const EPDispatched made[] = {layer.dispatch(input_of(rounds[i], rank)),
                                   layer.dispatch(input_of(rounds[i + 1], rank))};
      TensorView places[2];
      for (std::size_t k = 0; k < 2; ++k) {
        places[k] = layer.combine_input(rounds[i + k].outputs[rank].shape()[0], {});
        fill(places[k], rounds[i + k].outputs[rank]);
      }
      EXPECT_NE(places[0].data, places[1].data);
      EXPECT_TRUE(
          rejects([&] { (void)layer.combine_input(1, {}); }, {"combine_input: the memory"}));
      for (std::size_t k = 0; k < 2; ++k) {
        const HostTensor& expected = rounds[i + k].combined[rank];
        HostTensor sums(expected.dtype(), expected.shape());
        const auto combine = [&](const TensorView& place) {
          layer.combine({.rows = place, .options = {}, .biases = {}, .output = sums.view()},
                        *made[k].layout);
        };
        if (k == 0 && places[0].shape == places[1].shape) {
          EXPECT_TRUE(rejects([&] { combine(places[1]); }, {"combine: input is in the memory"}));
        }
        combine(places[k]);
        EXPECT_TRUE(same_bytes(ConstTensorView(sums.view()), expected));
      }
    }
    layer.finalize();
  });
}

TEST(EPLayerRows, DoNotGoWhereOtherRanksMayStillRead) {
  Random random(38);
  const EPLayerOptions options;
  const auto round =
      make_round(random_case(config_of_four(4), random, {.drop = 0, .tokens = 6}), options, random);
  run_thread_world(4, [&](World& world) {
    const auto rank = static_cast<std::size_t>(to_int(world.rank()));
    EPAll2AllLayer layer(world, at_rank(config_of_four(4), world), options);
    const EPDispatched got = layer.dispatch(input_of(round, rank));
    const std::int64_t rows = round.outputs[rank].shape()[0];
    HostTensor sums(round.combined[rank].dtype(), round.combined[rank].shape());
    const auto combine = [&](const ConstTensorView& from) {
      layer.combine({.rows = from, .options = {}, .biases = {}, .output = sums.view()},
                    *got.layout);
      EXPECT_TRUE(same_bytes(ConstTensorView(sums.view()), round.combined[rank]));
    };
    const TensorView first = layer.combine_input(rows, {});
    fill(first, round.outputs[rank]);
    combine(first);
    // The place of the combine that has just been, and one that was used already.
    EXPECT_TRUE(rejects([&] { combine(first); }, {"combine: input is in the memory of another"}));
    const TensorView second = layer.combine_input(rows, {});
    EXPECT_TRUE(rejects([&] { (void)layer.combine_input(rows, {}); },
                        {"combine_input: other ranks may still read"}));
    combine(round.outputs[rank].view());  // elsewhere: the place is used up
    EXPECT_TRUE(rejects([&] { combine(second); }, {"combine: input is in the memory of another"}));
    combine(round.outputs[rank].view());
    EXPECT_TRUE(rejects([&] { combine(second); }, {"combine: input is in the memory of another"}));
    layer.finalize();
  });
}

/// Nothing but the combines themselves keeps a rank from writing what another still sums.
void combine_in_a_row(bool local_combine, EPRows rows) {
  const EPConfig config = config_of_four(4);
  EPLayerOptions options;
  options.enable_local_combine = local_combine;
  options.dispatch.rows = rows;
  Random random(83);
  const ExpertCase inputs = random_case(config, random, {.edges = false});
  std::vector<ExpertRoundCase> rounds;
  for (int i = 0; i < 24; ++i) rounds.push_back(make_round(inputs, options, random, i % 3));
  run_thread_world(config.world_size, [&](World& world) {
    const auto rank = static_cast<std::size_t>(to_int(world.rank()));
    EPAll2AllLayer layer(world, at_rank(config, world), options);
    const EPDispatched got = layer.dispatch(input_of(rounds[0], rank));
    for (std::size_t i = 0; i < rounds.size(); ++i) {
      if (i / 6 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      expect_combined(layer, *got.layout, rounds[i], rank, i % 5 == 4);
    }
    layer.finalize();
  });
}

TEST(EPLayerRows, AreKeptUntilASlowHomeHasSummedThem) {
  combine_in_a_row(false, EPRows::grouped);
  combine_in_a_row(true, EPRows::grouped);
  combine_in_a_row(false, EPRows::compact);
}

}  // namespace
}  // namespace waybill::test
