#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "waybill/core/host_tensor.h"
#include "waybill/experts/dispatch_combine_context.h"
#include "waybill/experts/expert_tensors.h"
#include "waybill/moe/simulate.h"
#include "waybill/runtime/world.h"

namespace waybill {

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
  /// Provisional, until both ways have been timed over links. One node: ranks push expert outputs
  /// to the ranks of their tokens, which otherwise pull them. That takes memory for max_tokens *
  /// topk rows twice (min(topk, world_size) with sums or compact rows). All ranks alike; results
  /// are the same, and several nodes always pull.
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
