#include <algorithm>
#include <utility>

#include "experts/expert_executor.h"
#include "host_expert_combine.h"
#include "host_expert_dispatch.h"
#include "waybill/runtime/world.h"

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
