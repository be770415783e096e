#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "waybill/core/host_tensor.h"
#include "waybill/experts/dispatch_combine_context.h"
#include "waybill/moe/simulate.h"
#include "waybill/runtime/world.h"

namespace waybill {

/// Partial sums of a weight's gradient, see ExpertGradientInput.
inline constexpr std::int64_t gradient_partial_sums = 256;

/// Whether a tensor was given at all; one without a shape was not. One of no tokens may be null.
[[nodiscard]] inline bool is_given(const ConstTensorView& view) { return !view.shape.empty(); }

class EPLayout;

/// The tensors that a rank dispatches: contiguous views of the world's memory. All ranks give
/// weights, or none. Ranks compare whether weights and full_scatter_indices are given, and the last
/// five fields.
struct ExpertDispatchInput {
  ConstTensorView tokens{};   ///< [T, input_columns]
  ConstTensorView ids{};      ///< [T, K], int32 or int64, unchecked where the host cannot read them
  ConstTensorView weights{};  ///< [T, K], or not given
  ConstTensorView scales{};   ///< [T, num_scales], or not given
  ConstTensorView full_scatter_indices{};  ///< [sum of T, K], int32 or int64, or not given
  /// The caller will run the call's backward, a combine, if it runs that of the others of the step.
  bool needs_gradients = false;
  bool weights_need_gradients = false;  ///< the same for the calls that return their gradients
  bool of_backward = false;             ///< the call is part of a backward pass
  /// EPLayout::number() of the dispatch that this one belongs to, perhaps in another layer; 0:
  /// none. Not looked at when the routing is known.
  std::uint32_t origin = 0;
  /// With spare experts: the layout of an earlier dispatch of this layer, whose copies are there
  /// already: EvenExpertsOptions::present. Null: none is. Not looked at when the routing is known.
  const EPLayout* present = nullptr;
};

struct ExpertCombineInput {
  ConstTensorView rows{};  ///< [R, hidden]; may be its place in the combine window already
  EPCombineOptions options{};
  std::span<const ConstTensorView> biases{};  ///< up to two, [T, hidden]
  TensorView output{};                        ///< [T, hidden]
  bool needs_gradients = false;  ///< the caller will run its backward, a dispatch; ranks compare it
  bool of_backward = false;      ///< the call is part of a backward pass; ranks compare it
  /// The layout may be of another layer of this world, which differs in hidden, dtypes and payload
  /// alone: rows go to the same tokens. Windows grow here, too.
  bool of_companion = false;
};

/// Backward of a weighted combine on the rank of the experts, when a dispatch by the layout has
/// brought the gradient of each row's sum there: nothing travels. Contiguous views of the world's
/// memory, of R rows; those after the rows that have arrived are neither read nor written.
///
/// Each weight's gradient is the dot product of row and gradient in float32 (of float64 rows in
/// float64), nothing fused: for each j below 256 the products of elements j, j + 256, ... are
/// added up from +0 on one by one, then partial sums that are 1, 2, 4, ... 128 apart.
struct ExpertGradientInput {
  ConstTensorView gradients{};    ///< [R, hidden]
  ConstTensorView weights{};      ///< [R], as the dispatch gave; given with row_gradients
  ConstTensorView rows{};         ///< [R, hidden] that were combined; given with weight_gradients
  TensorView row_gradients{};     ///< [R, hidden]: gradients times weights; may be not given
  TensorView weight_gradients{};  ///< [R] float32, float64 if weights are that; may be not given
};

/// The tables of one dispatch on a rank, as views of the memory of its world (on a GPU: of the
/// device). All int32 unless said. T tokens of this rank, M = max_tokens, N nodes, K topk slots, W
/// ranks, P experts per rank. Sizes that depend on counts are those of `capacity_rows`.
struct ExpertTableViews {
  ConstTensorView ids{};  ///< one node [T, K], else [N, M, K]; a dropped topk slot: num_experts
  ConstTensorView dst_rows{};            ///< [N, M, K]: row on the expert's rank; -1
  ConstTensorView weights{};             ///< as ids, weight_dtype; not given without weights
  ConstTensorView num_input_tokens{};    ///< [W]
  ConstTensorView splits{};              ///< [W, E + 1]
  ConstTensorView segment_offsets{};     ///< [W, P, W], see ExpertRows
  ConstTensorView expert_counts{};       ///< [P], of this rank
  ConstTensorView expert_offsets{};      ///< [P + 1], of this rank
  ConstTensorView num_recv_rows{};       ///< [W]
  ConstTensorView required_rows{};       ///< [1]: the most of them, also where fewer fit
  ConstTensorView primary_rows{};        ///< [capacity_rows]: see skipped_token_mapping_indices
  ConstTensorView topk_slot_rows{};      ///< [capacity_rows, K]: skipped_token_topk_mapping_indices
  ConstTensorView send_reqs{};           ///< several nodes: [N, 2, M], see send_reqs_recv_tensor
  ConstTensorView compact_to_grouped{};  ///< compact rows: [capacity_rows, K]
  ConstTensorView grouped_to_compact{};  ///< compact rows: [most grouped rows]
  ConstTensorView recv_topk{};           ///< compact rows: [capacity_rows, K]
  ConstTensorView recv_tags{};           ///< [capacity_rows, 4]: RowTag, kept beyond the window
  // With spare experts alone. Experts above are then slots, as slot_config says: P slots per rank.
  ConstTensorView slot_experts{};  ///< [W, P]: the expert of each slot, -1: it is empty
  ConstTensorView slot_quotas{};   ///< [W, P]: rows that each slot takes, without padding
};

/// Rows that windows of fixed size had no room for, the same on all ranks.
struct ExpertOverflow {
  std::int64_t rows = 0;   ///< the most that a rank should have received; 0: all did fit
  std::uint64_t call = 0;  ///< number of the dispatch
};

class ExpertTables;

[[deprecated("false; goes in 0.3")]] [[nodiscard]] inline bool pushes_combines_by_default() {
  return false;
}

struct EPLayerOptions {
  EPDispatchOptions dispatch = {};
  int num_sms = 20;  ///< multiprocessors that a call may use. Host worlds ignore it
  /// One node: combine sums a rank's rows of a token there before they travel.
  bool enable_local_combine = false;
  /// The first windows have max_tokens * topk * capacity_factor rows.
  std::int64_t capacity_factor = 2;
  /// Rows of the windows, for ever; 0: they grow. Then no call waits for counts on the host, and
  /// views have this many rows. Rows that do not fit are left out: overflow() reports them, and the
  /// sums of their tokens are NaN.
  std::int64_t fixed_rows = 0;
  /// Topk slots of one expert that a rank may have in a dispatch, 0: any number. More are an error:
  /// in host memory before anything moves, on GPUs by the device.
  std::int64_t max_per_expert = 0;
  /// Deprecated, goes in 0.3. Combines pull since 0.2, and true is refused.
  bool push_combine = false;
};

/// The tables of one dispatch on a rank, for combines and for dispatches by the same routing. It
/// never changes: it may outlive later dispatches, also by its routing and with other weights, and
/// a combine with it gives the same results as before.
class EPLayout {
 public:
  /// Tokens of this rank.
  [[nodiscard]] std::int64_t num_tokens() const noexcept { return num_tokens_; }
  [[nodiscard]] bool has_weights() const;
  /// The number of this dispatch in the layer, from 1 on. Ranks compare by it which dispatch a call
  /// belongs to.
  [[nodiscard]] std::uint32_t number() const noexcept { return number_; }
  /// Rows that this rank received. Waits until they are known. @throws Timeout
  [[nodiscard]] std::int64_t num_recv_rows() const;
  /// All tables, in the memory of the world. They may be read as long as the layout is kept.
  [[nodiscard]] ExpertTableViews tables() const;
  /// On GPUs: tells the layout that the caller has queued work with the tables on a stream. If the
  /// layout goes before that work is done, the memory is reused only after it. Any thread may call.
  void note_use(Stream stream) const;
  /// A copy of Triton-distributed's descriptor; for worlds in host memory.
  [[nodiscard]] EPAll2AllLayoutDesc describe() const;

 private:
  friend class EPAll2AllLayer;
  EPConfig config_;
  EPDispatchOptions options_;
  std::int64_t fixed_rows_ = 0;
  const void* world_ = nullptr;  ///< compared alone
  std::shared_ptr<const ExpertTables> tables_;
  std::int64_t num_tokens_ = 0;
  std::uint64_t layer_ = 0;  ///< that made it
  std::uint32_t number_ = 0;
  std::uint32_t routing_ = 0;  ///< number of the dispatch that counted
};

/// The result of a dispatch: views of this rank's window. They may be read until this rank begins
/// the second dispatch after it.
struct EPDispatched {
  TensorView rows;     ///< [R, hidden]; with fixed_rows [fixed_rows, hidden]
  TensorView weights;  ///< [R], of compact rows [R, topk]; not given without weights
  TensorView scales;   ///< [R, num_scales]; not given without scales
  std::shared_ptr<EPLayout> layout;
};

/// Takes tokens to their experts on all ranks of a world, and the experts' outputs back.
///
/// Rows, their order and every rounding are those of simulate_expert_dispatch and
/// simulate_expert_combine, bit for bit, on one node and in two stages on several (from world_size
/// and local_world_size: tokens go once to each node, to the rank of the same local index, which
/// forwards them).
///
/// All calls are collective: every rank makes the same calls in the same order, each with its own
/// tokens; a rank without tokens calls too. Several dispatches may come before their combines. A
/// call that throws InvalidArgument because of an argument has not involved other ranks, and may be
/// made again; after any other error the layer is unusable: later calls throw TransportError and
/// say why.
class EPAll2AllLayer {
 public:
  /// Collective, with the same arguments but for config.rank. The layer holds the world.
  /// @throws InvalidArgument naming the field; Unsupported for a world without layers; Timeout
  EPAll2AllLayer(const World& world, const EPConfig& config, const EPLayerOptions& options = {});
  EPAll2AllLayer(EPAll2AllLayer&& other) noexcept;
  EPAll2AllLayer& operator=(EPAll2AllLayer&& other) noexcept;
  ~EPAll2AllLayer();

  /// Collective. Windows grow when a rank gets more rows than they have, by the rule of the
  /// original (grown_output_rows): that dispatch waits for all ranks.
  /// @param input contiguous views of the world's memory
  /// @throws InvalidArgument before any communication; after it, when full_scatter_indices fit no
  ///   rank's rows; Timeout
  EPDispatched dispatch(const ExpertDispatchInput& input, Stream stream = {});

  /// The same routing again, with other tokens and weights, or without: nothing is counted.
  /// `input.ids` and full_scatter_indices are not looked at. All ranks give the layout of the same
  /// dispatch; it stays as it is, and the result has one of its own.
  EPDispatched dispatch(const ExpertDispatchInput& input, const EPLayout& layout,
                        Stream stream = {});

  /// Collective: the sums of the tokens' rows, [T, hidden], into `input.output`. input.options is
  /// looked at for `weighted` alone: whether sums are local is the layer's.
  /// @throws InvalidArgument before any communication; Timeout
  void combine(const ExpertCombineInput& input, const EPLayout& layout, Stream stream = {});

  /// Backward of a weighted combine where its rows are; not collective. @throws InvalidArgument
  void weigh_gradients(const ExpertGradientInput& input, const EPLayout& layout,
                       Stream stream = {});

  /// Rows that have arrived, from a dispatch's view to memory of the caller's: no others are
  /// touched, whatever fixed_rows are. Not collective. @throws InvalidArgument
  void copy_rows(const ConstTensorView& from, const TensorView& to, const EPLayout& layout,
                 Stream stream = {});

  /// The place to which the next combine would copy its rows: write them there, on `stream`, and
  /// pass this view to the combine to save the copy. A combine that pulls with local_combine
  /// changes them. A second call before that combine gives the place of the one after it. A third
  /// is refused, and so is one right after a combine whose rows other ranks still read. Not
  /// collective.
  /// @throws InvalidArgument
  [[nodiscard]] TensorView combine_input(std::int64_t rows, Stream stream);

  /// Whether the next combine, by this layout, needs gradients although the dispatch did not: a
  /// rank with rows knows it (`mine`); one without rows gets the answer of the first rank with
  /// rows, and waits for it if it `asks`. With fixed_rows, and where all ranks have rows, it is
  /// `mine`. All ranks call it before that combine, or none.
  /// @throws Timeout
  [[nodiscard]] bool combine_needs_gradients(const EPLayout& layout, bool mine, bool asks);

  /// Collective for the node or the world: work queued on the stream after this begins when all
  /// ranks have come here on theirs. On GPUs it is queued, and may be captured; the host waits
  /// where ranks of other nodes are reached over NVSHMEM or NCCL, and in host memory. @throws
  /// Timeout
  void ep_barrier_all(Stream stream = {}, bool intra_node_only = false);

  /// Returns when the work on the stream is done. Throws the errors of calls on it, with their
  ///   numbers: Timeout, Disagreement, InvalidArgument for ids, full_scatter_indices and rows that
  ///   only the device could check (it is lost then); and as check_overflow
  void synchronize(Stream stream = {});

  /// The dispatch since the last call of this that needed the most rows, if windows of fixed_rows
  /// were too small; the same on all ranks. Waits for nothing; on GPUs call it when
  /// the stream is done.
  [[nodiscard]] ExpertOverflow overflow();
  /// The same as an error. @throws InvalidArgument naming the dispatch, rows and fixed_rows
  void check_overflow();

  /// Collective: gives all symmetric memory back. Twice does nothing. Later calls throw
  /// TransportError.
  void finalize();

  [[nodiscard]] const EPConfig& config() const noexcept;
  [[nodiscard]] const EPLayerOptions& options() const noexcept;
  [[nodiscard]] const DispatchCombineContext& context() const noexcept;
  /// Rows that the windows have.
  [[nodiscard]] std::int64_t output_rows() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;  ///< null: moved from
};

}  // namespace waybill
