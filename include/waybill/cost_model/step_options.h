#pragma once

#include <cstdint>
#include <string_view>

#include "waybill/planner/attention_plan.h"
#include "waybill/planner/planner_options.h"

namespace waybill {

/// What a step costs beside bytes over NVLink and network (see HardwareFacts for "measured" and
/// "nominal").
struct StepCosts {
  /// A phase in which nothing moves: launch, one round of signals, event. Measured, 4 x H200: 11
  /// us.
  double phase_seconds = 11e-6;
  /// Speed of a pull over that of a push, NVLink: the gradients of K and V are pulled. Measured:
  /// 325 to 345.
  double pull_share = 325.0 / 345.0;
  /// NVLink speed of a rank that forwards rows over it, over that of a push: it reads again what
  /// has arrived, and waits for it. Measured, 4 x H200, two plans: 0.74 and 0.68.
  double forward_share = 0.72;
  /// As HardwareFacts::message_seconds, between nodes. Nominal.
  double network_message_seconds = 3e-6;
  /// What a rank takes to post one more message to another node while others are under way: in the
  /// signals of a call (call_overhead) and the puts of experts. Nominal.
  double network_post_seconds = 0.3e-6;
  /// Rows are forwarded in pieces of this size: each rank on the way adds the time of one piece and
  /// of one message. 0: as SequenceDispatcher cuts them, a sixteenth of what a home sends to be
  /// forwarded, 256 KiB to 2 MiB.
  std::int64_t forward_chunk_bytes = 0;
  /// Attention of one rank; a (query, key) pair has 4 * q_hidden operations forward and 10 *
  /// q_hidden backward. Nominal: long causal documents, head size 128, FlashAttention-3 on a
  /// Hopper GPU as published. Not used where HardwareFacts::pairs_per_second is known, but for the
  /// ratio of backward to forward.
  double forward_flops_per_second = 600e12;
  double backward_flops_per_second = 450e12;

  friend bool operator==(const StepCosts&, const StepCosts&) = default;
};

/// What predict_step is asked.
struct StepOptions {
  ModelShape model = {};
  AttentionMask mask = {};
  HardwareFacts hardware = {};
  StepCosts costs = {};
  TransferMode transfer = TransferMode::direct;

  /// Those of a plan; its relay schedule where it has one.
  [[nodiscard]] static StepOptions of(const AttentionPlan& plan);

  /// @throws InvalidArgument "who: field = got, expected ..."
  void check(const char* who) const;

  friend bool operator==(const StepOptions&, const StepOptions&) = default;
};

}  // namespace waybill
