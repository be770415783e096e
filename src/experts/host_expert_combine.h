#pragma once

#include <cstdint>
#include <vector>

#include "expert_round.h"
#include "host_executor.h"
#include "moe/row_accumulator.h"

namespace waybill::detail {

/// The combine half of the host executor. Orders and roundings are those of
/// simulate_expert_combine.
class HostExpertCombine {
 public:
  HostExpertCombine(Transport& transport, const EPConfig& config, const EPDispatchOptions& options,
                    const ExpertMemory& memory)
      : config_(config),
        compact_(options.rows == EPRows::compact),
        memory_(memory),
        row_bytes_(config.hidden * dtype_bytes(config.token_dtype)),
        round_(transport, config, memory),
        sum_(config.hidden, config.token_dtype),
        nan_row_(row_bytes_, std::byte{0xFF}) {}

  void run(const ExpertCall& call, const ExpertCombineInput& input, const HostExpertTables& tables);

 private:
  void stage(const ExpertCall& call, const ExpertCombineInput& input) const;
  void sum_local(const ExpertCombineInput& input, const HostExpertTables& tables,
                 const std::byte* rows, std::int64_t primary_row);
  void sum_in_window(const ExpertCall& call, const ExpertCombineInput& input,
                     const HostExpertTables& tables);
  void push(const ExpertCall& call, const ExpertCombineInput& input,
            const HostExpertTables& tables);
  void add_token(const ExpertCall& call, const HostExpertTables& tables, std::int32_t node,
                 std::int64_t token, const EPCombineOptions& options);
  void share_node(const ExpertCall& call, const HostExpertTables& tables, std::int32_t node,
                  const EPCombineOptions& options);
  void add_partial_sums(const HostExpertRouting& routing, std::int64_t token);
  /// Whether a rank's rows of a token are one.
  [[nodiscard]] bool is_once(const EPCombineOptions& options) const {
    return compact_ || (options.local_combine && config_.is_intra_node());
  }
  [[nodiscard]] bool pushes(const EPCombineOptions& options) const {
    return memory_.slab_slots >= slab_slots(config_, is_once(options));
  }
  void add_biases(const ExpertCombineInput& input, std::int64_t token);
  [[nodiscard]] std::int64_t partial_sum_offset(std::int32_t node, std::int64_t token) const {
    return memory_.workspace_layout.partial_sums + (node * config_.max_tokens + token) * row_bytes_;
  }

  const EPConfig& config_;
  bool compact_;
  const ExpertMemory& memory_;
  std::int64_t row_bytes_;
  ExpertRound round_;
  RowAccumulator sum_;
  std::vector<std::byte> nan_row_;
};

}  // namespace waybill::detail
