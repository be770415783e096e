#include <gtest/gtest.h>

#include <atomic>

#include "runtime/executor.h"
#include "support/faulty_transport.h"
#include "support/node_case.h"
#include "support/run_ranks.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/generators.h"

namespace waybill {
namespace {

using test::check_step;
using test::eager_options;
using test::NetworkFaults;
using test::NodeCase;
using test::to_size;

World faulty_world(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node,
                   const NetworkFaults& faults) {
  auto transport = std::make_unique<test::FaultyTransport>(
      make_thread_transport(std::move(bootstrap), ranks_per_node), faults);
  auto executor = make_host_executor(*transport);
  return {std::move(transport), std::move(executor)};
}

TEST(Nodes, equal_the_simulation) {
  for (const Topology topology :
       {Topology{4, 2}, Topology{8, 4}, Topology{8, 2}, Topology{3, 1}, Topology{5, 5}}) {
    const auto cases = test::node_cases(topology, 16);
    run_thread_world(topology.world_size,
                     [&](World& world) {
                       SequenceDispatcher dispatcher(world, eager_options());
                       for (const auto& node : cases) check_step(world, dispatcher, *node);
                       dispatcher.close();
                     },
                     {.ranks_per_node = topology.ranks_per_node});
  }
}

/// A 32nd of the lengths of a real list, on 8 ranks, where bytes out dominate.
NodeCase real_case(const std::string& list, Topology topology) {
  const LengthDistribution& lengths = length_distribution(list);
  for (std::uint64_t seed = 1;; ++seed) {
    std::vector<std::int64_t> documents = sample_documents(lengths, 8 * 65536, seed);
    for (std::int64_t& length : documents) length = (length + 31) / 32;
    PlannerOptions options{.world_size = 8, .tokens_per_rank = 0, .block_tokens = 8};
    options.hardware.ranks_per_node = topology.ranks_per_node;
    const AttentionPlan plan = plan_attention(documents, options);
    if (std::ranges::max(plan.bytes_out()) < 3 * std::ranges::max(plan.bytes_in())) continue;
    test::SequenceCase sample{list, compute_qkv_routing(plan.plan)};
    sample.q.hidden = 2;
    sample.k.hidden = sample.v.hidden = 3;
    return {std::move(sample), topology, plan.relay};
  }
}

TEST(Nodes, real_skewed_plans_equal_the_simulation) {
  for (const std::string list : {"wlbllm", "prolong"}) {
    for (const Topology topology : {Topology{8, 8}, Topology{8, 4}, Topology{8, 2}}) {
      const NodeCase node = real_case(list, topology);
      for (const RelayUse use : {RelayUse::always, RelayUse::automatic}) {
        SequenceDispatcherOptions options = eager_options();
        options.plan.relay = use;
        options.plan.batch_bytes = 1024;
        run_thread_world(8,
                         [&](World& world) {
                           SequenceDispatcher dispatcher(world, options);
                           const auto forward = dispatcher.plan_dispatch(node.forward());
                           if (use == RelayUse::always) {
                             check_step(world, dispatcher, node);
                           } else if (topology.num_nodes() == 1) {  // a real plan needs no order
                             EXPECT_EQ(forward.limits().way, TransferMode::relay);
                             EXPECT_GT(forward.limits().direct_seconds,
                                       1.8 * forward.limits().relay_seconds);
                           }
                         },
                         {.ranks_per_node = topology.ranks_per_node});
      }
    }
  }
}

TEST(Nodes, late_reordered_and_repeated_pieces_change_nothing) {
  for (const Topology topology : {Topology{4, 2}, Topology{8, 4}, Topology{8, 2}}) {
    const auto cases = test::node_cases(topology, 6);
    for (const std::uint64_t seed : {1U, 2U}) {
      test::expect_no_errors(test::run_with_bootstrap(
          topology.world_size, 20, [&](std::shared_ptr<Bootstrap> bootstrap) {
            World world = faulty_world(std::move(bootstrap), topology.ranks_per_node,
                                       {.seed = seed, .delay_share = 0.05});
            SequenceDispatcher dispatcher(world, eager_options());
            for (const auto& node : cases) check_step(world, dispatcher, *node);
            dispatcher.close();
          }));
    }
  }
}

TEST(Nodes, options_that_differ_are_named) {
  const auto results = test::run_with_bootstrap(3, 20, [](std::shared_ptr<Bootstrap> bootstrap) {
    World world = make_thread_world(std::move(bootstrap));
    SequenceDispatcherOptions options;
    if (world.rank() == Rank{1}) options.plan.batch_bytes = 4096;
    SequenceDispatcher dispatcher(world, options);
  });
  for (const auto& result : results) {
    EXPECT_EQ(result.text,
              "SequenceDispatcher: rank 1 with plan.batch_bytes = 4096, the others 0, expected the "
              "same on all ranks");
  }
}

/// A case in which every rank sends to, forwards to and adds up for others.
NodeCase busy_case(Topology topology) {
  const std::size_t world = topology.world_size;
  const std::vector<std::vector<std::int64_t>> shards(world, {4, 3});
  std::vector<std::int32_t> dst;
  for (std::int32_t s = 0; s < 2 * topology.world_size; ++s)
    dst.push_back((s * 5 + 1) % topology.world_size);
  test::SequenceCase sample{"busy", compute_qkv_routing(test::plain_plan(
                                        topology.world_size, shards, dst, KvLayout::per_rank))};
  RelaySchedule relay;
  if (topology.num_nodes() == 1) relay = test::random_relay(sample.routing.fwd_kv, 3);
  return {std::move(sample), topology, std::move(relay)};
}

TEST(Nodes, a_dead_link_is_named) {
  const NodeCase node = busy_case({4, 2});
  for (const std::int64_t after : {0, 3}) {
    const auto results = test::run_with_bootstrap(4, 1, [&](std::shared_ptr<Bootstrap> bootstrap) {
      const bool source = bootstrap->rank() == Rank{1};
      World world =
          faulty_world(std::move(bootstrap), 2, {.drop_to = source ? 3 : -1, .drop_after = after});
      SequenceDispatcher dispatcher(world, eager_options());
      for (;;) check_step(world, dispatcher, node);
    });
    EXPECT_EQ(test::timeout_of(results[3]).peer, 1);
    EXPECT_LT(test::timeout_of(results[3]).seconds, 2);
  }
}

/// Long enough for threads that share a busy processor to be heard.
constexpr double missed_deadline_s = 2;

/// Runs two steps; or step after step until one rank stops at its n-th put or signal.
std::vector<test::RankResult> run_with_stop(const NodeCase& node, std::int32_t stopping,
                                            std::int64_t stop_at,
                                            std::atomic<std::int64_t>& num_steps) {
  return test::run_with_bootstrap(
      node.topology.world_size, missed_deadline_s, [&](std::shared_ptr<Bootstrap> bootstrap) {
        const bool stops = to_int(bootstrap->rank()) == stopping;
        auto transport = std::make_unique<test::FaultyTransport>(
            make_thread_transport(std::move(bootstrap), node.topology.ranks_per_node),
            NetworkFaults{.delay_share = 0.05, .stop_at = stops ? stop_at : -1});
        test::FaultyTransport& steps = *transport;
        auto executor = make_host_executor(steps);
        World world(std::move(transport), std::move(executor));
        SequenceDispatcher dispatcher(world, eager_options());
        for (int i = 0; i < 2 || stop_at >= 0; ++i) check_step(world, dispatcher, node);
        if (stops) num_steps = steps.num_steps();
      });
}

void check_stops(const NodeCase& node, std::int32_t stopping, int num_stops) {
  std::atomic<std::int64_t> num_steps = 0;
  test::expect_no_errors(run_with_stop(node, stopping, -1, num_steps));
  const std::int64_t steps = num_steps;
  ASSERT_GT(steps, 2 * num_stops);
  for (int i = 0; i < num_stops; ++i) {
    const std::int64_t stop_at = steps * i / num_stops;
    const auto results = run_with_stop(node, stopping, stop_at, num_steps);
    for (std::int32_t r = 0; r < node.topology.world_size; ++r) {
      if (r == stopping) {
        EXPECT_EQ(results[r].text, "this rank was stopped");
        continue;
      }
      const TimeoutInfo missed = test::timeout_of(results[r]);
      EXPECT_EQ(missed.peer, stopping)
          << "rank " << r << ", stop at " << stop_at << " of " << steps << ": " << results[r].text;
      EXPECT_LT(missed.seconds, 3 * missed_deadline_s);
    }
  }
}

TEST(Nodes, a_rank_that_stops_in_any_phase_is_named_by_all_others) {
  check_stops(busy_case({4, 2}), 2, 8);
}

TEST(Nodes, a_rank_that_stops_within_a_relay_is_named_by_all_others) {
  check_stops(busy_case({5, 5}), 1, 5);
}

}  // namespace
}  // namespace waybill
