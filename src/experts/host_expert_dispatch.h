#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "expert_round.h"
#include "expert_window.h"
#include "host_executor.h"

namespace waybill::detail {

/// The dispatch half of the host executor.
class HostExpertDispatch {
 public:
  HostExpertDispatch(Transport& transport, const EPConfig& config, const EPDispatchOptions& options,
                     const ExpertMemory& memory)
      : config_(config), options_(options), memory_(memory), round_(transport, config, memory) {}

  [[nodiscard]] std::shared_ptr<HostExpertTables> route(const ExpertCall& call,
                                                        const ExpertDispatchInput& input);
  [[nodiscard]] std::shared_ptr<HostExpertTables> enter(const ExpertCall& call,
                                                        const ExpertDispatchInput& input,
                                                        const HostExpertTables& earlier);
  void run(const ExpertCall& call, const ExpertDispatchInput& input, HostExpertTables& tables);

 private:
  void tell_counts(const ExpertCall& call, std::span<const std::int32_t> counts);
  [[nodiscard]] std::vector<std::span<const std::int32_t>> told_counts(
      const ExpertCall& call) const;
  void take_weights(const ExpertDispatchInput& input, HostExpertTables& tables) const;
  void place_own(HostExpertRouting& routing) const;
  void place_forwarded(std::int32_t node, HostExpertRouting& routing) const;
  void place(std::int32_t node, HostExpertRouting& routing) const;
  void prepare_payload(const ExpertDispatchInput& input);
  void send_to_node(const ExpertCall& call, std::int32_t node, const HostExpertTables& tables);
  void take_from_node(const ExpertCall& call, std::int32_t node, HostExpertTables& tables);
  void deliver_from(std::int32_t node, const TokenBlock& payload, const HostExpertTables& tables,
                    const ExpertCall& call) const;
  void finish_rows(const ExpertCall& call, HostExpertTables& tables) const;
  void clear_tags(const ExpertCall& call);
  void check_positions(const ExpertCall& call, const HostExpertRouting& routing) const;
  [[nodiscard]] ExpertWindow own_window(const ExpertCall& call) const;
  [[nodiscard]] std::int64_t slice(std::int32_t node) const { return node * config_.max_tokens; }

  const EPConfig& config_;
  const EPDispatchOptions& options_;
  const ExpertMemory& memory_;
  ExpertRound round_;
  TokenBlock payload_;  ///< of the running call
  std::vector<std::byte> quantized_rows_;
  std::vector<float> quantized_scales_;
  const std::byte* cleared_window_ = nullptr;
};

}  // namespace waybill::detail
