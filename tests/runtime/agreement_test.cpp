// Ranks of a dispatcher that do not mean the same: none gets a wrong result, all are told.

#include <gtest/gtest.h>

#include <chrono>
#include <deque>

#include "support/expect_error.h"
#include "support/run_processes.h"
#include "support/run_ranks.h"
#include "support/sanitizers.h"
#include "support/sequence_disagreements.h"
#include "waybill/core/host_tensor.h"
#include "waybill/runtime/world.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {
namespace {

using test::DisagreeingRank;
using test::DocumentRoutings;
using test::PlantedDisagreement;

constexpr double deadline_s = 10;  ///< of worlds in which nobody should have to wait for it
constexpr double at_once_s = 5;
constexpr double short_deadline_s = 0.5;

struct Ranks {
  bool are_processes;
  std::int32_t world_size;
  std::int32_t num_nodes;

  /// Runs body on all ranks and expects that none throws.
  void run(double timeout_s, const std::function<void(World&)>& body) const {
    const std::int32_t per_node = world_size / num_nodes;
    if (!are_processes) {
      test::expect_no_errors(test::run_with_bootstrap(
          world_size, timeout_s, [&](std::shared_ptr<Bootstrap> bootstrap) {
            World world = make_thread_world(std::move(bootstrap), per_node);
            body(world);
          }));
      return;
    }
    const test::MeetingFolder folder;
    test::expect_no_errors(test::run_processes(world_size, [&](std::int32_t rank) {
      World world = make_process_world(
          make_file_bootstrap(rank, world_size, folder.path(), timeout_s), per_node);
      body(world);
    }));
  }

  friend std::ostream& operator<<(std::ostream& out, const Ranks& ranks) {
    return out << ranks.world_size << (ranks.are_processes ? " processes on " : " threads on ")
               << ranks.num_nodes << " nodes";
  }
};

std::vector<Ranks> all_ranks() {
  std::vector<Ranks> all;
  for (const bool are_processes : {false, true}) {
    for (const std::int32_t world_size : {2, 4, 8}) {
      for (const std::int32_t nodes : {1, 2}) all.push_back({are_processes, world_size, nodes});
    }
  }
  return all;
}

/// Relays wherever there are schedules; several batches.
SequenceDispatcherOptions options() {
  return {.plan = {.relay = RelayUse::always, .batch_bytes = 256}};
}

/// Tensors in host memory.
class HostTensors {
 public:
  [[nodiscard]] test::TakeTensor take() {
    return [this](DType dtype, Shape shape) { return tensors_.emplace_back(dtype, shape).view(); };
  }

 private:
  std::deque<HostTensor> tensors_;
};

/// Expects an error of this kind within `within_s` that names all `parts`; and that the dispatcher
/// is of no use afterwards, and says why.
template <class Kind>
void expect_end(DisagreeingRank& rank, const std::function<void(DisagreeingRank&)>& calls,
                double within_s, const std::vector<std::string>& parts) {
  const auto start = std::chrono::steady_clock::now();
  std::string text;
  try {
    calls(rank);
    ADD_FAILURE() << "expected an error on rank " << rank.world().rank();
    return;
  } catch (const Kind& error) {
    text = error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << rank.world().rank() << ": another error: " << error.what();
    return;
  }
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
  EXPECT_LT(passed.count(), within_s) << text;
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks " << part;
  }
  const auto again = rank.plan(DisagreeingRank::forward_of(rank.documents().usual));
  try {
    rank.dispatch(again);
    ADD_FAILURE() << "the dispatcher is still of use";
  } catch (const TransportError& error) {
    EXPECT_NE(std::string(error.what()).find("unusable after a failure: " + text),
              std::string::npos)
        << error.what();
  }
}

class Agreement : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(Ways, Agreement, testing::ValuesIn(all_ranks()));

TEST_P(Agreement, what_differs_in_a_call_is_named_by_all) {
#ifdef WAYBILL_TEST_TSAN
  if (!GetParam().are_processes) {
    GTEST_SKIP() << "ranks with different plans race for rows of windows, which nobody gets then";
  }
#endif
  const DocumentRoutings documents(GetParam().world_size);
  GetParam().run(deadline_s, [&](World& world) {
    const std::string odd = concat("rank ", world.world_size() - 1);
    for (const PlantedDisagreement& sample : test::planted_disagreements()) {
      SCOPED_TRACE(sample.name);
      HostTensors tensors;
      DisagreeingRank rank(world, documents, tensors.take(), options());
      auto parts = sample.named;
      parts.push_back(odd);
      parts.push_back(concat("rank ", world.rank()));
      parts.emplace_back("expected the same on all ranks");
      expect_end<Disagreement>(rank, sample.calls, at_once_s, parts);
    }
  });
}

TEST_P(Agreement, what_a_rank_may_choose_is_not_compared) {
  const DocumentRoutings documents(GetParam().world_size);
  GetParam().run(deadline_s, [&](World& world) {
    HostTensors tensors;
    SequenceDispatcherOptions own = options();
    own.num_sms += to_int(world.rank());
    own.plan.chunk_bytes = 64 << (to_int(world.rank()) % 4);
    own.local_by_copy_engine = world.rank() == Rank{0};
    DisagreeingRank rank(world, documents, tensors.take(), own);
    const auto plan = rank.plan(DisagreeingRank::forward_of(documents.usual, {}, &documents.relay));
    const auto back = rank.gradient_plan(DisagreeingRank::kv_of(documents.usual));
    for (int i = 0; i < 5; ++i) {
      rank.dispatch(plan);
      rank.gradient(back, rank.dispatcher().last_dispatch());
      if (i == 2) rank.dispatch(plan);  // the other parity
    }
    rank.dispatcher().close();
  });
}

TEST_P(Agreement, settings_are_compared_when_the_dispatcher_is_made) {
  GetParam().run(deadline_s, [&](World& world) {
    const bool odd = to_int(world.rank()) == world.world_size() - 1;
    const auto differs = [&](const char* named, const auto& change) {
      SequenceDispatcherOptions changed;
      if (odd) change(changed);
      EXPECT_TRUE(test::rejects(
          [&] { const SequenceDispatcher made(world, changed); },
          {"SequenceDispatcher: rank", named, "the others", "expected the same on all ranks"}));
    };
    differs("plan.relay = ", [](auto& o) { o.plan.relay = RelayUse::never; });
    differs("plan.batch_bytes = ", [](auto& o) { o.plan.batch_bytes = 512; });
    differs("plan.phase_bytes = ", [](auto& o) { o.plan.phase_bytes = 512; });
    differs("max_window_bytes = ", [](auto& o) { o.max_window_bytes = 512; });
    differs("plan.nvlink_bytes_per_second = ",
            [](auto& o) { o.plan.nvlink_bytes_per_second = 1e9; });
    differs("plan.network_bytes_per_second = ",
            [](auto& o) { o.plan.network_bytes_per_second = 1e9; });
  });
}

/// Expects a missed wait that says that ranks may be in different calls; among processes also that
/// a peer is gone, whose deadline came first.
void expect_missed(const Ranks& ranks, DisagreeingRank& rank,
                   const std::function<void(DisagreeingRank&)>& calls) {
  if (ranks.are_processes) return expect_end<Error>(rank, calls, at_once_s, {"rank "});
  expect_end<Timeout>(rank, calls, at_once_s, {"; ranks may be in different calls"});
}

TEST_P(Agreement, calls_of_two_dispatchers_in_another_order_end_by_the_deadline) {
  const DocumentRoutings documents(GetParam().world_size);
  GetParam().run(short_deadline_s, [&](World& world) {
    HostTensors tensors;
    DisagreeingRank one(world, documents, tensors.take(), options());
    DisagreeingRank two(world, documents, tensors.take(), options());
    const auto plan = [&](DisagreeingRank& rank) {
      return rank.plan(DisagreeingRank::forward_of(documents.usual));
    };
    const PlanHandle plans[] = {plan(one), plan(two)};
    const auto first = [&](DisagreeingRank& rank) { rank.dispatch(plans[&rank == &one ? 0 : 1]); };
    expect_missed(GetParam(), one.is_odd() ? two : one, first);
  });
}

TEST_P(Agreement, windows_that_grow_on_one_rank_end_by_the_deadline) {
  const DocumentRoutings documents(GetParam().world_size);
  GetParam().run(short_deadline_s, [&](World& world) {
    HostTensors tensors;
    DisagreeingRank rank(world, documents, tensors.take(), options());
    const auto calls = [&](DisagreeingRank& self) {
      if (self.is_odd()) self.dispatcher().reserve(std::int64_t{2} << 20);
      test::planted::agree_first(self);
    };
    expect_missed(GetParam(), rank, calls);
  });
}

}  // namespace
}  // namespace waybill
