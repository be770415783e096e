// Ranks of a dispatcher on GPUs that do not mean the same. Who finds that loses its device, so each
// case has a process, or one a rank; this one stays without CUDA.

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "cuda/captured.h"
#include "cuda/gpu_disagreements.h"
#include "cuda/simulated_hosts.h"
#include "support/run_ranks.h"

namespace waybill {
namespace {

using test::Captured;
using test::DeviceArena;
using test::DisagreeingRank;
using test::DocumentRoutings;
using test::PlantedDisagreement;

constexpr double deadline_s = 4;

using Calls = std::function<void(DisagreeingRank&)>;

struct GpuRanks {
  std::int32_t world_size = 2;
  std::int32_t ranks_per_node = 0;
  SequenceDispatcherOptions options = test::disagreement_options();
};

/// Texts of all ranks, as threads of one child process.
std::vector<std::string> ends_of_threads(const GpuRanks& ranks, const Calls& calls) {
  const test::MeetingFolder folder;
  const auto file = [&](std::int32_t rank) { return concat(folder.path(), "/end", rank); };
  const test::ProcessEnd child = test::run_processes(1, [&](std::int32_t) {
    const DocumentRoutings documents(ranks.world_size);
    const auto results = test::run_with_bootstrap(
        ranks.world_size, deadline_s, [&](std::shared_ptr<Bootstrap> bootstrap) {
          const std::int32_t rank = to_int(bootstrap->rank());
          if (num_gpus() == 0) throw Unsupported("there is no GPU");
          World world =
              make_gpu_thread_world(std::move(bootstrap), rank % num_gpus(), ranks.ranks_per_node);
          std::ofstream(file(rank)) << test::text_of_end(world, documents, ranks.options, calls);
        });
    for (std::size_t r = 0; r < results.size(); ++r) {
      // Behind what was written before, if anything was.
      if (!results[r].text.empty())
        std::ofstream(file(static_cast<std::int32_t>(r)), std::ios::app)
            << "; and then: " << results[r].text;
    }
  })[0];
  EXPECT_EQ(child.signal, 0) << child.text;
  EXPECT_EQ(child.text, "");
  std::vector<std::string> texts;
  for (std::int32_t r = 0; r < ranks.world_size; ++r) {
    std::ifstream in(file(r));
    texts.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return texts;
}

/// The cases with these names; without names all.
void check_threads(const GpuRanks& ranks, const std::vector<std::string>& names = {}) {
  for (const PlantedDisagreement& sample : test::planted_disagreements()) {
    if (!names.empty() && std::ranges::find(names, sample.name) == names.end()) continue;
    SCOPED_TRACE(sample.name);
    auto parts = sample.named;
    parts.emplace_back("ranks disagree in call ");
    parts.push_back(concat("rank ", ranks.world_size - 1));
    test::expect_named(ends_of_threads(ranks, sample.calls), parts);
  }
}

TEST(GpuAgreement, two_ranks) { check_threads({}); }

TEST(GpuAgreement, four_ranks) {
  check_threads({.world_size = 4},
                {"lengths_by_one_token", "order_of_dispatches", "dispatch_against_gradient",
                 "order_of_gradients", "replaced_routing"});
}

TEST(GpuAgreement, eight_ranks) {
  check_threads({.world_size = 8}, {"lengths_by_one_token", "order_of_gradients"});
}

TEST(GpuAgreement, two_nodes) { check_threads({.world_size = 2, .ranks_per_node = 1}); }

TEST(GpuAgreement, two_nodes_of_two_ranks) {
  check_threads({.world_size = 4, .ranks_per_node = 2},
                {"lengths_by_one_token", "dispatch_against_gradient", "order_of_gradients"});
}

TEST(GpuAgreement, copy_engines) {
  GpuRanks ranks;
  ranks.options.num_sms = 0;
  ranks.options.plan.relay = RelayUse::never;
  check_threads(
      ranks, {"lengths_by_one_token", "order_of_dispatches", "dispatch_against_gradient", "dtype"});
}

TEST(GpuAgreement, threads_that_copy) {
  GpuRanks ranks;
  ranks.options.plan.chunk_bytes = 16384;  // too large for bulk copies
  check_threads(ranks, {"lengths_by_one_token", "a_relay_for_one_rank", "order_of_gradients"});
}

/// A plan replaced on one rank, where the graph that holds its launch stays.
TEST(GpuAgreement, a_plan_replaced_in_a_graph_on_one_rank) {
  const auto calls = [](DisagreeingRank& rank) {
    auto plan = rank.plan(DisagreeingRank::forward_of(rank.documents().usual));
    rank.dispatch(plan);
    rank.synchronize();
    const auto stream = static_cast<cudaStream_t>(rank.stream().handle);
    const Captured graph(stream, [&] {
      rank.dispatch(plan);
      rank.dispatch(plan);
    });
    for (int i = 0; i < 3; ++i) graph.launch(rank.world());
    rank.synchronize();
    const auto other = [&](const QkvRouting& routing) {
      rank.dispatcher().replace_plan(plan, DisagreeingRank::forward_of(routing), rank.stream());
      graph.launch(rank.world());
      rank.synchronize();
    };
    other(rank.documents().same_sizes);  // on all ranks: that is agreed
    other(rank.documents().usual);
    other(rank.is_odd() ? rank.documents().same_sizes : rank.documents().usual);
  };
  for (const std::int32_t world_size : {2, 4}) {
    test::expect_named(ends_of_threads({.world_size = world_size}, calls),
                       {"dispatch: ranks disagree in call ", "the plan differs"});
  }
}

TEST(GpuAgreement, graphs_replayed_in_another_order_on_one_rank) {
  const auto calls = [](DisagreeingRank& rank) {
    const auto one = rank.plan(DisagreeingRank::forward_of(rank.documents().usual));
    const auto two = rank.plan(DisagreeingRank::forward_of(rank.documents().same_sizes));
    const auto back = rank.gradient_plan(DisagreeingRank::kv_of(rank.documents().usual));
    rank.dispatch(one);
    rank.synchronize();
    const auto stream = static_cast<cudaStream_t>(rank.stream().handle);
    const Captured first(stream, [&] {
      rank.dispatch(one);
      rank.gradient(back, rank.dispatcher().last_dispatch());
    });
    const Captured second(stream, [&] { rank.dispatch(two); });
    for (int i = 0; i < 3; ++i) {
      first.launch(rank.world());
      second.launch(rank.world());
    }
    rank.synchronize();
    (rank.is_odd() ? second : first).launch(rank.world());
    rank.synchronize();
  };
  test::expect_named(ends_of_threads({}, calls), {"ranks disagree in call "});
}

TEST(GpuAgreement, what_cannot_be_compared_ends_by_the_deadline) {
  const auto grows = [](DisagreeingRank& rank) {
    if (rank.is_odd()) rank.dispatcher().reserve(std::int64_t{2} << 20, rank.stream());
    test::planted::agree_first(rank);
  };
  test::expect_named(ends_of_threads({}, grows), {"; ranks may be in different calls"});
  const auto swaps = [](DisagreeingRank& rank) {
    DeviceArena arena(rank.world(), std::int64_t{1} << 20);
    DisagreeingRank other(
        rank.world(), rank.documents(),
        [&](DType dtype, Shape shape) { return arena.take(dtype, shape); },
        rank.dispatcher().options(), rank.stream());
    const auto parts = DisagreeingRank::forward_of(rank.documents().usual);
    const auto plan = rank.plan(parts);
    const auto of_other = other.plan(parts);
    rank.is_odd() ? other.dispatch(of_other) : rank.dispatch(plan);
    (rank.is_odd() ? other : rank).synchronize();
  };
  test::expect_named(ends_of_threads({}, swaps), {"; ranks may be in different calls"});
}

World make_process_world(std::shared_ptr<Bootstrap> bootstrap, int device) {
  return make_gpu_process_world(std::move(bootstrap), device);
}

TEST(GpuAgreement, processes) { test::check_disagreeing_processes(2, make_process_world); }

/// They keep their devices; the rest of the kernels is done with what is there, and every later
/// call throws.
TEST(GpuAgreement, processes_that_share_a_gpu) {
  test::check_disagreeing_processes(2 * test::num_gpus_seen_by_a_child(), make_process_world);
}

TEST(GpuAgreement, nodes_over_nccl) {
  test::check_disagreeing_processes(2, test::SimulatedHosts{1}, 20);
}

}  // namespace
}  // namespace waybill
