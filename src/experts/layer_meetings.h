#pragma once

#include <cstdint>
#include <span>

#include "experts/expert_executor.h"
#include "runtime/executor.h"
#include "transport/transport.h"
#include "waybill/moe/ep_config.h"

namespace waybill::detail {

/// Where the ranks of a layer meet, and ask each other, beside its calls. Collective to make.
class LayerMeetings {
 public:
  LayerMeetings(Transport& transport, const EPConfig& config);
  LayerMeetings(const LayerMeetings&) = delete;
  LayerMeetings& operator=(const LayerMeetings&) = delete;
  ~LayerMeetings();

  /// Of the ranks of this node, or all.
  void barrier(ExpertExecutor& executor, Stream stream, bool intra_node_only);

  /// Whether combine `number` will have a backward, where a rank without rows cannot know: what the
  /// first rank with rows says. Those with rows go by what they say themselves.
  /// @param counts rows that each rank received [W]
  /// @param number of the combine, from 1 on
  /// @param asks whether this rank wants to know
  [[nodiscard]] bool needs_gradients(std::span<const std::int32_t> counts, std::uint64_t number,
                                     bool mine, bool asks);

  /// Collective.
  void release();

 private:
  [[nodiscard]] bool reaches_all() const;
  [[nodiscard]] bool exchange(bool mine);
  [[nodiscard]] bool ask(std::int32_t teller, std::uint64_t number);
  void answer(std::span<const std::int32_t> counts, std::uint64_t number, bool mine);

  Transport& transport_;
  EPConfig config_;
  SignalPad signals_;  ///< [3, W]: barriers of the node, of the world, answers
  std::uint64_t node_barriers_ = 0;
  std::uint64_t world_barriers_ = 0;
  std::uint64_t answered_ = 0;  ///< last combine for which this rank answered
  std::uint32_t answers_ = 0;   ///< bit i: what it said in combine answered_ - i
};

}  // namespace waybill::detail
