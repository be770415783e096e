#include <algorithm>
#include <cstring>
#include <utility>

#include "experts/expert_executor.h"
#include "host_expert_combine.h"
#include "host_expert_dispatch.h"
#include "waybill/runtime/world.h"
#include "weigh_gradients.h"

namespace waybill::detail {
namespace {

class HostExpertExecutor final : public ExpertExecutor {
 public:
  HostExpertExecutor(Transport& transport, const EPConfig& config, const EPDispatchOptions& options,
                     const ExpertMemory& memory)
      : transport_(transport),
        config_(config),
        options_(options),
        memory_(memory),
        dispatch_(transport, config_, options_, memory_),
        combine_(transport, config_, options_, memory_) {}

  std::shared_ptr<ExpertTables> route(const ExpertCall& call,
                                      const ExpertDispatchInput& input) override {
    return dispatch_.route(call, input);
  }

  std::shared_ptr<ExpertTables> enter(const ExpertCall& call, const ExpertDispatchInput& input,
                                      const ExpertTables& earlier) override {
    return dispatch_.enter(call, input, static_cast<const HostExpertTables&>(earlier));
  }

  void dispatch(const ExpertCall& call, const ExpertDispatchInput& input,
                ExpertTables& begun) override {
    auto& tables = static_cast<HostExpertTables&>(begun);
    const std::int64_t largest = tables.routing().rows->largest_recv_rows;
    if (largest > std::max(memory_.capacity_rows, overflow_.rows))
      overflow_ = {largest, call.epoch};
    dispatch_.run(call, input, tables);
  }

  void combine(const ExpertCall& call, const ExpertCombineInput& input,
               const ExpertTables& tables) override {
    combine_.run(call, input, static_cast<const HostExpertTables&>(tables));
  }

  void weigh_gradients(const ExpertGradientInput& input, const ExpertTables& tables,
                       const Stream& /*stream*/) override {
    detail::weigh_gradients(input, num_rows(tables, input.gradients));
  }

  void copy_rows(const ConstTensorView& from, const TensorView& to, const ExpertTables& tables,
                 const Stream& /*stream*/) override {
    const std::int64_t row_bytes = config_.hidden * dtype_bytes(from.dtype);
    const std::int64_t bytes = num_rows(tables, from) * row_bytes;
    if (bytes > 0) std::memcpy(to.data, from.data, bytes);
  }

  void barrier(const ExpertBarrier& call) override {
    const auto slot = [&](std::int32_t rank) {
      return SignalSlot{call.signals, call.first_slot + rank};
    };
    const auto other = [&](std::int32_t k) {
      return Rank{call.first + (config_.rank - call.first + k) % call.count};
    };
    for (std::int32_t k = 1; k < call.count; ++k) {
      transport_.signal(other(k), slot(config_.rank), call.epoch);
    }
    for (std::int32_t k = 1; k < call.count; ++k) {
      (void)transport_.wait(slot(to_int(other(k))), call.epoch, other(k), "ep_barrier_all");
    }
  }

  ExpertOverflow take_overflow() override { return std::exchange(overflow_, {}); }

 private:
  /// That have arrived, of those of a tensor.
  [[nodiscard]] std::int64_t num_rows(const ExpertTables& tables,
                                      const ConstTensorView& tensor) const {
    const std::int32_t arrived = tables.routing().known_counts()[std::int64_t{config_.rank}];
    return std::min<std::int64_t>(arrived, tensor.shape[0]);
  }

  Transport& transport_;
  EPConfig config_;
  EPDispatchOptions options_;
  const ExpertMemory& memory_;
  HostExpertDispatch dispatch_;
  HostExpertCombine combine_;
  ExpertOverflow overflow_;
};

}  // namespace

}  // namespace waybill::detail

namespace waybill {

std::unique_ptr<ExpertExecutor> make_expert_executor(const World& world, const EPConfig& config,
                                                     const EPDispatchOptions& options,
                                                     const ExpertMemory& memory) {
  if (auto* const factory = dynamic_cast<ExpertExecutorFactory*>(&world.executor())) {
    return factory->make_expert_executor(config, options, memory);
  }
  return std::make_unique<detail::HostExpertExecutor>(world.transport(), config, options, memory);
}

}  // namespace waybill
