#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "experts/expert_rounds.h"
#include "support/expert_disagreements.h"
#include "support/run_processes.h"
#include "support/run_ranks.h"
#include "waybill/runtime/world.h"
#include "waybill/transport/bootstrap.h"

namespace waybill::test {

/// What ranks are.
enum class RankKind { threads, processes };

struct RankWay {
  RankKind kind;
  std::int32_t world_size;
  std::int32_t num_nodes;

  [[nodiscard]] std::int32_t per_node() const { return world_size / num_nodes; }
  friend std::ostream& operator<<(std::ostream& out, const RankWay& way) {
    return out << way.world_size
               << (way.kind == RankKind::threads ? " threads on " : " processes on ")
               << way.num_nodes << " nodes";
  }
};

/// Threads and processes, 2, 4 and 8 ranks, one node and two.
inline std::vector<RankWay> all_rank_ways() {
  std::vector<RankWay> ways;
  for (const RankKind kind : {RankKind::threads, RankKind::processes}) {
    for (const std::int32_t world_size : {2, 4, 8}) {
      for (const std::int32_t num_nodes : {1, 2}) ways.push_back({kind, world_size, num_nodes});
    }
  }
  return ways;
}

/// Runs body on all ranks and expects that none throws.
inline void run_way(const RankWay& way, double timeout_s, const std::function<void(World&)>& body) {
  if (way.kind == RankKind::threads) {
    expect_no_errors(
        run_with_bootstrap(way.world_size, timeout_s, [&](std::shared_ptr<Bootstrap> bootstrap) {
          World world = make_thread_world(std::move(bootstrap), way.per_node());
          body(world);
        }));
    return;
  }
  const MeetingFolder folder;
  expect_no_errors(run_processes(way.world_size, [&](std::int32_t rank) {
    World world = make_process_world(
        make_file_bootstrap(rank, way.world_size, folder.path(), timeout_s), way.per_node());
    body(world);
  }));
}

/// The rank that does otherwise: not one of those that others name first anyway.
inline bool is_odd(const World& world) { return to_int(world.rank()) == world.world_size() - 1; }

/// A layer of a rank, and what it needs for calls.
class LayerStep {
 public:
  explicit LayerStep(World& world, const EPLayerOptions& options = {})
      : config_(config_of(world)), layer_(world, config_, options) {
    Random random(5);
    case_ = random_case(config_, random, {.drop = 0, .tokens = 3});
  }

  static EPConfig config_of(const World& world) {
    EPConfig config;
    config.max_tokens = 4;
    config.hidden = 8;
    config.topk = 2;
    config.num_experts = 2 * world.world_size();
    config.rank = to_int(world.rank());
    config.world_size = world.world_size();
    config.local_world_size = world.topology().ranks_per_node;
    return config;
  }

  [[nodiscard]] ExpertDispatchInput input() const {
    const std::size_t r = config_.rank;
    ExpertDispatchInput input;
    input.tokens = case_.tokens[r].view();
    input.ids = case_.ids[r].view();
    input.weights = case_.weights[r].view();
    return input;
  }

  [[nodiscard]] ConstTensorView positions() const { return positions_.view(); }

  EPDispatched dispatch(const ExpertDispatchInput& input) { return layer_.dispatch(input); }
  EPDispatched dispatch(const ExpertDispatchInput& input, const EPLayout& layout) {
    return layer_.dispatch(input, layout);
  }

  void combine(const EPLayout& layout, bool weighted = false, bool needs_gradients = false) {
    const HostTensor rows(config_.token_dtype, {layout.num_recv_rows(), config_.hidden});
    HostTensor sums(config_.token_dtype, {layout.num_tokens(), config_.hidden});
    layer_.combine({.rows = rows.view(),
                    .options = {.weighted = weighted},
                    .biases = {},
                    .output = sums.view(),
                    .needs_gradients = needs_gradients},
                   layout);
  }

  [[nodiscard]] EPAll2AllLayer& layer() { return layer_; }

 private:
  EPConfig config_;
  EPAll2AllLayer layer_;
  ExpertCase case_;
  HostTensor positions_{DType::int32, {3, 2}};
};

}  // namespace waybill::test
