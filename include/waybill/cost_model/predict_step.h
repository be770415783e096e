#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/core/topology.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {

namespace detail {
struct TimedPlan;
}
/// The costs of a step besides bytes over NVLink and network (see HardwareFacts for "measured" and
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
  /// The time of a rank to post one more message to another node while others are under way: in the
  /// signals of a call (call_overhead) and the puts of experts. Nominal.
  double network_post_seconds = 0.3e-6;
  /// Rows are forwarded in pieces of this size: each rank on the way adds the time of one piece and
  /// of one message. 0: as SequenceDispatcher cuts them, a sixteenth of what a home sends to be
  /// forwarded, 256 KiB to 2 MiB.
  std::int64_t forward_chunk_bytes = 0;
  /// Attention of one rank; a (query, key) pair has 4 * q_hidden operations forward and 10 *
  /// q_hidden backward. Measured, 2 x H200: torch 2.11's varlen_attn, one causal document of 32K
  /// tokens, head size 128; short documents take longer. Not used where
  /// HardwareFacts::pairs_per_second is known, but for the ratio of backward to forward.
  double forward_flops_per_second = 350e12;
  double backward_flops_per_second = 320e12;

  friend bool operator==(const StepCosts&, const StepCosts&) = default;
};

/// The question to predict_step.
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

/// The phases of one attention layer, forward and backward, in order.
enum class StepPhase : std::uint8_t {
  dispatch,            ///< Q, K and V to the attention ranks
  attention,           ///<
  output,              ///< O to the queries' homes
  output_gradient,     ///< dO to the attention ranks
  attention_gradient,  ///< the backward kernel
  q_gradient,          ///< dQ to the queries' homes
  kv_gradient,         ///< dK and dV to the homes, summed there and where rows were forwarded
};
inline constexpr int num_step_phases = 7;

[[nodiscard]] std::string_view to_string(StepPhase phase);
/// False for the two kernels.
[[nodiscard]] bool moves_rows(StepPhase phase);

/// The busy link of a rank, or its kernel.
enum class StepResource : std::uint8_t {
  nothing,
  compute,
  nvlink_in,
  nvlink_out,
  network_in,
  network_out
};

[[nodiscard]] std::string_view to_string(StepResource resource);

/// The cause of the time of a phase: a rank, its busy link or kernel, and the document that causes
/// most of that.
struct StepCause {
  StepPhase phase = StepPhase::dispatch;
  std::int32_t rank = 0;
  StepResource resource = StepResource::nothing;
  double seconds = 0;  ///< that the rank alone takes, or that the step's path spends in the phase
  std::int64_t amount = 0;  ///< bytes, or (query, key) pairs
  std::int64_t document = -1;
  std::int64_t document_amount = 0;  ///< its part of `amount`

  friend bool operator==(const StepCause&, const StepCause&) = default;
};

/// One phase of all ranks. Seconds from the beginning of the step.
struct PhasePrediction {
  StepPhase phase = StepPhase::dispatch;
  std::vector<double> begin;            ///< [W] end of the rank's phase before
  std::vector<double> end;              ///< [W]
  std::vector<double> seconds;          ///< [W] what the rank takes if it waits for nobody
  std::vector<std::int32_t> waits_for;  ///< [W] rank that decides `end`; itself: nobody
  std::vector<LinkBytes> links;         ///< [W] wire bytes; empty for kernels
  StepCause slowest;                    ///< the rank with the most `seconds`

  friend bool operator==(const PhasePrediction&, const PhasePrediction&) = default;
};

/// One step as it would run. W = ranks.
struct StepPrediction {
  StepOptions options;
  std::int32_t world_size = 0;
  std::vector<std::int64_t> work;       ///< [W] (query, key) pairs
  std::vector<PhasePrediction> phases;  ///< [7] in the order of StepPhase
  /// Why the step takes as long: what the last rank waited for, phase by phase from the first on.
  /// The seconds add up to `seconds`.
  std::vector<StepCause> path;
  /// How dK and dV come back: as K and V went or, where that is sooner, straight. Sums of 16-bit
  /// gradients on their way are float32, so forwarding wins less than on the way out.
  TransferMode gradient_transfer = TransferMode::direct;
  double forward_seconds = 0;  ///< end of the last rank's output
  double seconds = 0;          ///< end of the last rank

  [[nodiscard]] const PhasePrediction& phase(StepPhase phase) const {
    return phases[static_cast<std::size_t>(phase)];
  }
  /// The longest piece of `path`.
  [[nodiscard]] const StepCause& bottleneck() const;

  friend bool operator==(const StepPrediction&, const StepPrediction&) = default;
};

/// Predicts how long the step of a plan takes and why. Pure arithmetic; nothing runs.
///
/// A link of a rank takes `bytes / speed + peers * message`; a rank takes as long as the slowest of
/// its four links, plus phase_seconds. Bytes to all peers leave side by side, so a rank has its
/// rows when its own links are done and those of each sender; where rows are forwarded, also the
/// sender's sender, and a piece and a message for each rank on the way. Ranks begin a phase when
/// their phase before has ended: there is no barrier. docs/functions/predictions.md has the
/// formulas. Linear in shards, copies, hops and ranks, but for a sort of what is forwarded.
///
/// The work of a query is its keys that the mask shows in the plan's range.
///
/// @throws InvalidArgument when options.check() or plan.check() does, for TransferMode::relay
///   without a schedule, and for bytes that exceed 2^62.
[[nodiscard]] StepPrediction predict_step(const QkvPlan& plan, const StepOptions& options = {});

/// The same with the plan's relay schedule at hand.
[[nodiscard]] StepPrediction predict_step(const AttentionPlan& plan, const StepOptions& options);
/// With StepOptions::of(plan).
[[nodiscard]] StepPrediction predict_step(const AttentionPlan& plan);

/// Predicts one plan under several options; computes its routing once.
class StepPredictor {
 public:
  /// The plan, and the schedule if not null, must outlive the object. @throws as plan.check()
  explicit StepPredictor(const QkvPlan& plan, const RelaySchedule* relay = nullptr);
  explicit StepPredictor(const AttentionPlan& plan);
  /// As ContextParallelAttention runs it: rows that stay do not move, and are attended to while the
  /// others travel. `relay` has hops of routing.fwd_kv. All must outlive the object.
  StepPredictor(const QkvPlan& plan, const VarlenRouting& routing,
                const RelaySchedule* relay = nullptr);
  ~StepPredictor();
  StepPredictor(StepPredictor&&) noexcept;
  StepPredictor& operator=(StepPredictor&&) noexcept;

  /// @throws InvalidArgument as predict_step.
  [[nodiscard]] StepPrediction predict(const StepOptions& options) const;
  /// As if every rank had the mean of the work: what better balance could give.
  [[nodiscard]] StepPrediction predict_even(const StepOptions& options) const;

  [[nodiscard]] bool has_relay() const;

 private:
  std::unique_ptr<const detail::TimedPlan> timed_;
};

/// The relay schedule of a batch's routing where its predicted step is at least a hundredth shorter
/// with it than straight, over the network once per node; else an empty one. See plan_varlen_relay.
/// @throws InvalidArgument as plan_varlen_relay and predict_step
[[nodiscard]] RelaySchedule relay_that_pays(const QkvPlan& plan, const VarlenRouting& routing,
                                            const PlannerOptions& options);

/// A possible change to a step.
enum class RemedyKind : std::uint8_t {
  relay,          ///< forward KV as the planner's schedule says
  once_per_node,  ///< send KV over the network once per node
  even_work,      ///< the same total work on each rank
  double_nvlink,
  double_network,
  double_compute,
  no_relay,  ///< send KV straight, over the network once per node: what a relay gains
};

[[nodiscard]] std::string_view to_string(RemedyKind kind);

struct Remedy {
  RemedyKind kind = RemedyKind::relay;
  double seconds = 0;  ///< the step takes with it

  friend bool operator==(const Remedy&, const Remedy&) = default;
};

/// The step with each change that applies, one at a time, shortest first: relay and once_per_node
/// where they are not used and possible, no_relay where it is used, the network where there are
/// several nodes.
[[nodiscard]] std::vector<Remedy> step_remedies(const StepPredictor& predictor,
                                                const StepPrediction& step);

/// The cost of a call for a rank besides its rows, as it grows with the ranks: the signals that it
/// has come, its fingerprint of the call, and for experts the counts by which all place rows.
struct CallOverhead {
  std::int64_t node_messages = 0;     ///< to the other ranks of its node
  std::int64_t network_messages = 0;  ///< to the ranks of other nodes
  std::int64_t bytes_out = 0;         ///< to all of them
  std::int64_t memory_bytes = 0;      ///< that it keeps for what the others tell
  double seconds = 0;                 ///< the longer of node and network

  friend bool operator==(const CallOverhead&, const CallOverhead&) = default;
};

/// The cost of a dispatch or a gradient of sequences, of a combine, or of a dispatch of experts by
/// a known routing. Messages of a node take HardwareFacts::message_seconds each; those to others
/// StepCosts::network_post_seconds each, and the last StepCosts::network_message_seconds to arrive.
/// @throws InvalidArgument as topology.check() and for speeds that are not above 0
[[nodiscard]] CallOverhead call_overhead(const Topology& topology,
                                         const HardwareFacts& hardware = {},
                                         const StepCosts& costs = {});

/// The cost of a dispatch of experts that counts: every rank sends every other one its numbers of
/// tokens for each expert and rank, in words of 8 bytes.
/// @throws InvalidArgument as above, and unless num_experts is a multiple of the ranks
[[nodiscard]] CallOverhead counting_overhead(const Topology& topology, std::int32_t num_experts,
                                             const HardwareFacts& hardware = {},
                                             const StepCosts& costs = {});

/// A prediction and what it is of.
struct NamedStep {
  std::string name;
  std::int64_t num_shards = 0;
  StepPrediction step;
  std::int32_t degree = 0;  ///< ranks of a static context-parallel group; 0: there are none
};

struct CompareOptions {
  PlannerOptions planner = {};  ///< also ranks, rows, mask and hardware of the others
  StepCosts costs = {};
  /// Ranks of a static context-parallel group; 0: the largest divisor of the world within a node,
  /// and for Ulysses the one that makes its step shortest.
  std::int32_t degree = 0;
  std::int64_t head_dim = 128;  ///< elements of a head, of planner.model's rows
};

/// The same documents by static zigzag ("zigzag"), by static sharding of each document ("per
/// document"), by heads ("Ulysses", predict_ulysses, where heads divide), and as
/// ContextParallelAttention plans and runs them ("planner"): rows that stay do not move and are
/// attended to while others travel, and, with options.planner.relay, ranks forward K and V where
/// relay_that_pays. Its plan has per_query copies and tails, whatever options.planner says.
///
/// The ways by hand move all rows before attention. The static plans have no window: with one,
/// their transfers still move all keys before a query, and their kernels count the window's alone.
/// Rings that overlap transfers with attention are not modelled.
/// @throws InvalidArgument as plan_attention, zigzag_plan and predict_step.
[[nodiscard]] std::vector<NamedStep> compare_plans(std::span<const std::int64_t> doc_lengths,
                                                   const CompareOptions& options);

/// One plan sent in each way that it can be: straight, once per node where there are several, and
/// by relay where it has a schedule. `options.transfer` is not looked at.
[[nodiscard]] std::vector<NamedStep> compare_transfers(const StepPredictor& predictor,
                                                       const StepOptions& options,
                                                       std::int64_t num_shards);

}  // namespace waybill
