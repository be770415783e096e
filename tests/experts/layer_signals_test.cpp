// What the ranks of a layer do beside its calls: barriers, and the question what needs gradients.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/executor.h"
#include "transport/transport.h"
#include "waybill/core/host_tensor.h"
#include "waybill/experts/ep_all2all_layer.h"
#include "waybill/runtime/world.h"

namespace waybill::test {
namespace {

constexpr std::int32_t num_ranks = 4;

/// Ranks of other nodes cannot be signalled from a layer between calls, as over NCCL.
class FarTransport final : public Transport {
 public:
  explicit FarTransport(std::unique_ptr<Transport> near)
      : Transport(near->rank(), near->topology(), near->timeout_s()), near_(std::move(near)) {}

  SymmetricBuffer allocate(std::int64_t size_bytes, std::string_view name) override {
    return near_->allocate(size_bytes, name);
  }
  SignalPad allocate_signals(std::int64_t count, std::string_view name) override {
    SignalPad pad = near_->allocate_signals(count, name);
    if (name != "signals between calls of experts") return pad;
    for (std::size_t r = 0; r < pad.memory.size(); ++r) {
      if (pad.peers[r] == nullptr) pad.memory[r].reset();
    }
    return pad;
  }
  void release(SymmetricBuffer& buffer) override { near_->release(buffer); }
  void release(SignalPad& pad) override { near_->release(pad); }
  void defer_release(std::vector<std::shared_ptr<void>> memory) override {
    near_->defer_release(std::move(memory));
  }
  void put(const SymmetricBuffer& to, const PutRequest& piece) override { near_->put(to, piece); }
  void signal(Rank peer, SignalSlot slot, std::uint64_t epoch) override {
    near_->signal(peer, slot, epoch);
  }
  std::uint64_t wait(SignalSlot slot, std::uint64_t wanted, Rank peer,
                     std::string_view operation) override {
    return near_->wait(slot, wanted, peer, operation);
  }
  void quiet() override { near_->quiet(); }
  void check_peers(std::string_view operation, Rank awaited) override {
    near_->check_peers(operation, awaited);
  }
  void barrier(std::string_view operation) override { near_->barrier(operation); }
  void require_same(std::string_view who, std::span<const Setting> mine) override {
    near_->require_same(who, mine);
  }

 private:
  std::unique_ptr<Transport> near_;
};

struct SignalsCase {
  std::int32_t per_node;
  bool far;
};

class SignalsOfLayers : public testing::TestWithParam<SignalsCase> {
 protected:
  template <class Body>
  void run(const Body& body) {
    run_ranks_as_threads(
        num_ranks,
        [&](std::shared_ptr<Bootstrap> bootstrap) {
          auto transport = make_thread_transport(std::move(bootstrap), GetParam().per_node);
          if (GetParam().far) transport = std::make_unique<FarTransport>(std::move(transport));
          auto executor = make_host_executor(*transport);
          World world(std::move(transport), std::move(executor));
          body(world);
        },
        10);
  }

  [[nodiscard]] static EPConfig config_of(const World& world) {
    EPConfig config;
    config.max_tokens = 4;
    config.hidden = 4;
    config.topk = 1;
    config.num_experts = num_ranks;
    config.rank = to_int(world.rank());
    config.world_size = num_ranks;
    config.local_world_size = GetParam().per_node;
    config.token_dtype = DType::float32;
    return config;
  }

  /// All tokens of all ranks to these experts, one per rank, in turn; none: they are dropped.
  static EPDispatched send_to(EPAll2AllLayer& layer, const std::vector<std::int32_t>& experts) {
    const HostTensor tokens(DType::float32, {4, 4});
    HostTensor ids(DType::int32, {4, 1});
    for (std::size_t t = 0; t < 4; ++t) {
      ids.as<std::int32_t>()[t] = experts.empty() ? num_ranks : experts[t % experts.size()];
    }
    ExpertDispatchInput input;
    input.tokens = tokens.view();
    input.ids = ids.view();
    return layer.dispatch(input);
  }
};

INSTANTIATE_TEST_SUITE_P(Nodes, SignalsOfLayers,
                         testing::Values(SignalsCase{4, false}, SignalsCase{2, false},
                                         SignalsCase{2, true}, SignalsCase{1, true}));

TEST_P(SignalsOfLayers, RanksWithoutRowsLearnWhatTheOthersNeed) {
  run([](World& world) {
    EPAll2AllLayer layer(world, config_of(world));
    const std::int32_t me = to_int(world.rank());
    const std::vector<std::vector<std::int32_t>> routes = {{2}, {3, 1}, {0}, {0, 1, 2, 3}, {}, {3}};
    std::vector<EPDispatched> there;
    for (const auto& experts : routes) there.push_back(send_to(layer, experts));
    for (const bool needed : {true, false, true}) {
      for (std::size_t i = 0; i < routes.size(); ++i) {
        const bool has_rows = std::ranges::find(routes[i], me) != routes[i].end();
        const bool tells = routes[i].empty() && me == 0;
        const bool mine = (has_rows || tells) && needed;
        EXPECT_EQ(layer.combine_needs_gradients(*there[i].layout, mine, true), needed);
        HostTensor outputs(DType::float32, there[i].rows.shape);
        HostTensor sums(DType::float32, {4, 4});
        layer.combine({.rows = outputs.view(),
                       .options = {},
                       .biases = {},
                       .output = sums.view(),
                       .needs_gradients = needed},
                      *there[i].layout);
      }
    }
    layer.finalize();
  });
}

TEST_P(SignalsOfLayers, WhoDoesNotAskNeedsNone) {
  run([](World& world) {
    EPAll2AllLayer layer(world, config_of(world));
    const auto there = send_to(layer, {1});
    const bool has_rows = to_int(world.rank()) == 1;
    EXPECT_EQ(layer.combine_needs_gradients(*there.layout, has_rows, false), has_rows);
    layer.finalize();
    EXPECT_THROW((void)layer.combine_needs_gradients(*there.layout, true, true), TransportError);
  });
}

TEST_P(SignalsOfLayers, BarriersOfTheNodeAndOfAll) {
  if (GetParam().far) GTEST_SKIP() << "in host memory signals get everywhere";
  std::atomic<int> in_node[num_ranks] = {};
  std::atomic<int> in_world = 0;
  run([&](World& world) {
    EPAll2AllLayer layer(world, config_of(world));
    const std::int32_t node = to_int(world.topology().node(world.rank()));
    for (int i = 1; i <= 10; ++i) {
      if (node == 0 && i % 3 == 0) {  // other nodes do not come
        ++in_node[node];
        layer.ep_barrier_all({}, true);
        EXPECT_GE(in_node[node].load(), i / 3 * GetParam().per_node);
      }
      ++in_world;
      layer.ep_barrier_all();
      EXPECT_GE(in_world.load(), i * num_ranks);
    }
    layer.finalize();
    EXPECT_THROW(layer.ep_barrier_all(), TransportError);
  });
}

TEST_P(SignalsOfLayers, ABarrierToWhichARankDoesNotComeNamesIt) {
  if (GetParam().far) GTEST_SKIP() << "in host memory signals get everywhere";
  run_thread_world(num_ranks,
                   [](World& world) {
                     EPAll2AllLayer layer(world, config_of(world));
                     if (to_int(world.rank()) == 2) {
                       std::this_thread::sleep_for(std::chrono::seconds(1));
                       return;
                     }
                     try {
                       layer.ep_barrier_all();
                       ADD_FAILURE() << "rank 2 did not come";
                     } catch (const Timeout& error) {
                       EXPECT_EQ(error.missed().operation, "ep_barrier_all");
                       EXPECT_EQ(error.missed().peer, 2);
                     }
                   },
                   {.ranks_per_node = GetParam().per_node, .timeout_s = 0.5});
}

}  // namespace
}  // namespace waybill::test
