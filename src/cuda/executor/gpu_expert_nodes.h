#pragma once

#include <memory>

#include "../moe/nodes_params.h"
#include "gpu_expert_params.h"
#include "gpu_expert_tables.h"
#include "gpu_rank.h"
#include "waybill/runtime/expert_executor.h"
#include "waybill/transport/transport.h"

namespace waybill::cuda {

/// What a layer on several nodes does beside the work of one node: a token goes once to each other
/// node, to the rank of this one's local index, which then does with it as with its own; sums come
/// back the same way. What goes there lies in this rank's part of its own board (slice of its own
/// node) first, where the kernels of the node find it as well. Collective to make.
class ExpertNodes {
 public:
  /// @throws Unsupported where the memory of a rank of the same local index is not mapped
  ExpertNodes(Transport& transport, std::shared_ptr<GpuRank> gpu, const EPConfig& config,
              const EPDispatchOptions& options, const ExpertMemory& memory,
              const ExpertParams& params);
  ExpertNodes(const ExpertNodes&) = delete;
  ExpertNodes& operator=(const ExpertNodes&) = delete;
  ~ExpertNodes();

  /// Meets all ranks, then exchanges ids, and weights where there are any.
  void exchange_ids(const ExpertCall& call, const ExpertDispatchInput& input,
                    const GpuExpertTables& tables, int num_sms) const;

  /// The same for tables that are there: no ids.
  void exchange_weights(const ExpertCall& call, const ExpertDispatchInput& input,
                        const GpuExpertTables& tables, int num_sms) const;

  /// The table of runs, from the ids in the tables.
  void note_runs(const ExpertCall& call, const GpuExpertTables& tables) const;

  /// Exchanges rows. @param input null pointers where payload and scales are in place already
  void exchange_rows(const ExpertCall& call, const ExpertDispatchInput& input,
                     const GpuExpertTables& tables, int num_sms) const;

  /// Meets all ranks: their expert outputs are in the combine windows.
  void meet(const ExpertCall& call) const;

  /// Where the combine of a node's ranks leaves sums: [nodes, M] rows, by home node.
  [[nodiscard]] std::byte* sums() const { return sums_.local; }

  /// Sends the sums home, and adds those that come.
  void add_shares(const ExpertCall& call, const ExpertCombineInput& input,
                  const GpuExpertTables& tables, int num_sms) const;

  /// This rank's part of the board: where its payload and scales lie.
  [[nodiscard]] std::byte* own_rows() const;
  [[nodiscard]] std::byte* own_scales() const;

 private:
  [[nodiscard]] ExchangeParams exchange(const ExpertCall& call, const GpuExpertTables& tables,
                                        FaultKind kind) const;
  void add_array(ExchangeParams& params, std::int64_t part, std::int64_t row_bytes) const;
  void add_weights(const ExpertCall& call, const ExpertDispatchInput& input,
                   ExchangeParams& params) const;
  void run(const ExchangeParams& params, const std::uint64_t* signals, const ExpertCall& call,
           int num_sms) const;
  void copy(std::byte* to, const ConstTensorView& from, std::int64_t row_bytes,
            const ExpertCall& call) const;
  [[nodiscard]] std::int64_t own_slice() const { return own_node_ * config_.max_tokens; }

  Transport& transport_;
  std::shared_ptr<GpuRank> gpu_;
  EPConfig config_;
  EPDispatchOptions options_;
  const ExpertMemory& memory_;
  const ExpertParams& params_;
  std::int32_t own_node_;
  SymmetricBuffer sums_;
  SignalPad posted_;  ///< [W]: ids and weights of a rank have arrived
};

}  // namespace waybill::cuda
