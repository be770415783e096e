// Uses the installed library through its three headers alone: plans and predicts a step, moves its
// rows between two ranks, and takes tokens to their experts and back.
#include <cstdint>
#include <cstring>
#include <iostream>
#include <utility>
#include <vector>

#include "waybill/experts.h"
#include "waybill/plan.h"
#include "waybill/sequence.h"

namespace {

bool check(bool ok, const char* what) {
  if (!ok) std::cerr << "install test: " << what << " is wrong\n";
  return ok;
}

waybill::QkvRouting plan_and_predict() {
  const waybill::PlannerOptions options{.world_size = 2, .tokens_per_rank = 64};
  const waybill::AttentionPlan plan =
      waybill::plan_attention(std::vector<std::int64_t>{100, 28}, options);
  std::cout << plan.plan.num_shards() << " shards, step "
            << waybill::predict_step(plan.plan).seconds << " s\n";
  return waybill::compute_qkv_routing(plan.plan);
}

/// Rows of Q go to their attention ranks and back; the dispatcher is moved on the way.
bool move_rows(const waybill::World& world, const waybill::QkvRouting& routing) {
  waybill::SequenceDispatcher made(world);
  waybill::SequenceDispatcher dispatcher = std::move(made);
  const waybill::TensorFormat format{waybill::DType::float32, 2};
  const waybill::SequencePart there{&routing.fwd_q, {format}};
  const waybill::SequencePart back{&routing.rev_q, {format}};
  const auto forward = dispatcher.plan_dispatch({&there, 1});
  const auto reverse = dispatcher.plan_dispatch({&back, 1});
  waybill::HostTensor rows(waybill::DType::float32, {forward.own_rows()[0], 2});
  std::memset(rows.bytes().data(), 0x3F, rows.bytes().size());
  const std::vector<waybill::ConstTensorView> given{rows.view()};
  const auto arrived = dispatcher.dispatch(forward, given);
  const std::vector<waybill::ConstTensorView> sent{arrived[0]};
  const auto home = dispatcher.dispatch(reverse, sent);
  return check(std::memcmp(home[0].data, rows.bytes().data(), rows.bytes().size()) == 0, "a row");
}

/// Every token goes to both experts, which give it back as it is.
bool run_layer(const waybill::World& world) {
  const waybill::EPConfig config{.max_tokens = 4,
                                 .hidden = 8,
                                 .topk = 2,
                                 .num_experts = 2,
                                 .rank = waybill::to_int(world.rank()),
                                 .world_size = 2,
                                 .local_world_size = 2,
                                 .token_dtype = waybill::DType::float32};
  waybill::EPAll2AllLayer layer(world, config);
  std::vector<float> tokens(32, 1.5F);
  std::vector<float> sums(32);
  std::vector<std::int32_t> ids{0, 1, 0, 1, 0, 1, 0, 1};
  const waybill::EPDispatched dispatched = layer.dispatch(
      {.tokens = waybill::ConstTensorView(tokens.data(), waybill::DType::float32, {4, 8}),
       .ids = waybill::ConstTensorView(ids.data(), waybill::DType::int32, {4, 2})});
  layer.combine({.rows = dispatched.rows,
                 .output = waybill::TensorView(sums.data(), waybill::DType::float32, {4, 8})},
                *dispatched.layout);
  return check(sums == std::vector<float>(32, 3.0F), "a sum of experts");
}

}  // namespace

int main() {
  std::cout << "waybill " << waybill::version_text << "\n";
  const waybill::QkvRouting routing = plan_and_predict();
  bool ok = true;
  waybill::run_thread_world(2, [&](waybill::World& world) {
    const bool good = move_rows(world, routing) && run_layer(world);
    if (world.rank() == waybill::Rank{0}) ok = good;
  });
  try {
    const waybill::IndexArray lengths({2, 2}, {3, 1, 2, 2});
    (void)waybill::compute_metadata(lengths, waybill::IndexArray({2, 2}, {0, 1, 7, 0}));
  } catch (const waybill::InvalidArgument& error) {
    std::cout << "as it should, rank 7 is an error: " << error.what() << "\n";
    return ok ? 0 : 1;
  }
  std::cerr << "rank 7 of 2 was accepted\n";
  return 1;
}
