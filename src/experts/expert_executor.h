#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "experts/expert_memory.h"
#include "runtime/executor.h"
#include "runtime/fingerprint.h"
#include "waybill/experts/expert_tensors.h"
#include "waybill/moe/ep_config.h"

namespace waybill {

class World;

/// What a dispatch decided: the row of every topk slot, and all that follows from it. Dispatches by
/// the same routing share it, and nothing changes it any more once the one that made it is done; so
/// a layout gives the same whatever comes later. Tags of rows belong to it, as they say where a row
/// comes from and not what it holds.
class ExpertRouting {
 public:
  ExpertRouting() = default;
  ExpertRouting(const ExpertRouting&) = delete;
  ExpertRouting& operator=(const ExpertRouting&) = delete;
  virtual ~ExpertRouting() = default;

  /// All tables but the weights. What the views hold is there when the dispatch is done on its
  /// stream.
  [[nodiscard]] virtual ExpertTableViews views() const = 0;

  /// Rows that each rank receives [W], in host memory (on a GPU: pinned, written by the device).
  /// Waits until they are known, not for the rows. @throws Timeout
  [[nodiscard]] virtual std::span<const std::int32_t> wait_counts() const = 0;
  /// The same if the host has them already; else empty. Waits for nothing.
  [[nodiscard]] virtual std::span<const std::int32_t> known_counts() const = 0;

  /// Behind the caller's own work with the views on a stream: when the routing is gone, its memory
  /// is used again after that. Calls of the layer need no such word. From any thread.
  virtual void note_use(const Stream& /*stream*/) const {}
};

/// One dispatch: the routing that it made or was given, and what it carried itself. Belongs to the
/// layer that made it; many may be alive.
class ExpertTables {
 public:
  ExpertTables() = default;
  ExpertTables(const ExpertTables&) = delete;
  ExpertTables& operator=(const ExpertTables&) = delete;
  virtual ~ExpertTables() = default;

  [[nodiscard]] virtual const ExpertRouting& routing() const = 0;

  /// Of this dispatch's tokens, as ExpertTableViews says; not given without weights.
  [[nodiscard]] virtual ConstTensorView weights() const = 0;

  [[nodiscard]] ExpertTableViews views() const {
    ExpertTableViews all = routing().views();
    all.weights = weights();
    return all;
  }
  [[nodiscard]] std::span<const std::int32_t> wait_counts() const {
    return routing().wait_counts();
  }
};

/// One call of a layer, checked. All ranks have the same number.
struct ExpertCall {
  const char* operation = "";  ///< in errors
  const ExpertMemory* memory = nullptr;
  std::uint64_t epoch = 0;   ///< this call's; may be behind what a graph replays
  std::uint32_t parity = 0;  ///< of this dispatch among dispatches, of this combine among combines
  int num_sms = 0;
  const Stream* stream = nullptr;
  CallFingerprint fingerprint = {};  ///< what this rank means by it; ranks compare theirs
  bool may_grow = false;  ///< windows may: the host has waited for the counts of its dispatches
  std::int64_t max_per_expert = 0;  ///< of dispatches: see EPLayerOptions
  bool sums_locally = false;  ///< of dispatches: weighted sums may be local, see EPCombineOptions
};

/// Ranks [first, first + count) wait for each other, without anything that moves.
struct ExpertBarrier {
  const SignalPad* signals = nullptr;
  std::int64_t first_slot = 0;  ///< rank r of the world raises slot first_slot + r
  std::int32_t first = 0;
  std::int32_t count = 0;
  std::uint64_t epoch = 0;  ///< of those with this first_slot; may be behind what a graph replays
  Stream stream = {};
};

/// The parities of a layer's next dispatch and of its next combine.
struct ExpertParities {
  std::uint32_t dispatch = 0;
  std::uint32_t combine = 0;
};

/// Does the work of one layer on a world's kind of memory.
///
/// Protocol, the same on all worlds, by call number n: a rank raises `entered` to n at all ranks
/// when it has begun call n, and writes to or reads from a rank after that rank has entered n. So
/// what the last call left in a window, the workspace or an output may be overwritten. A dispatch
/// raises `arrived` after its last row and ends when all ranks of the node have. A combine on one
/// node writes to the receive slabs of its parity before others have entered, sums its own, and
/// ends when it has summed and all have entered; on several nodes it reads the combine windows of
/// the ranks of the node. All waits have the transport's deadline.
class ExpertExecutor {
 public:
  ExpertExecutor() = default;
  ExpertExecutor(const ExpertExecutor&) = delete;
  ExpertExecutor& operator=(const ExpertExecutor&) = delete;
  virtual ~ExpertExecutor() = default;

  /// Before a call when those that have run may not be at these turns, as a graph holds an odd
  /// number of dispatches or combines: runs an empty call if so. On several nodes it does nothing,
  /// and the call reports the fault.
  virtual void realign(const ExpertCall& /*call*/, ExpertParities /*next*/) {}

  /// First half of a dispatch: enters the call with this rank's counts; when all have, places rows
  /// and fills the tables. GPU worlds queue it and return.
  /// @throws Timeout; InvalidArgument for ids out of range, where the host reads them
  [[nodiscard]] virtual std::shared_ptr<ExpertTables> route(const ExpertCall& call,
                                                            const ExpertDispatchInput& input) = 0;

  /// Without counting, by the routing of an earlier dispatch, which stays as it is: enters the
  /// call, and takes the weights where there are any.
  [[nodiscard]] virtual std::shared_ptr<ExpertTables> enter(const ExpertCall& call,
                                                            const ExpertDispatchInput& input,
                                                            const ExpertTables& earlier) = 0;

  /// Second half, once for what route or enter gave: rows, tags, scales and weights into the
  /// windows of parity `call.parity`. Rows past the capacity are not written; those that fit are
  /// right, all ranks note the overflow, and combine makes the sums of tokens with rows that did
  /// not fit NaN.
  virtual void dispatch(const ExpertCall& call, const ExpertDispatchInput& input,
                        ExpertTables& begun) = 0;

  /// Enters the call with expert outputs in the slabs of their tokens' homes, or in the combine
  /// window, and sums.
  virtual void combine(const ExpertCall& call, const ExpertCombineInput& input,
                       const ExpertTables& tables) = 0;

  /// On this rank alone, of rows that have arrived.
  virtual void weigh_gradients(const ExpertGradientInput& input, const ExpertTables& tables,
                               const Stream& stream) = 0;
  virtual void copy_rows(const ConstTensorView& from, const TensorView& to,
                         const ExpertTables& tables, const Stream& stream) = 0;

  /// GPU worlds queue it, behind what is on the stream, and return; where ranks do not have each
  /// other's signals mapped (several nodes over NVSHMEM or NCCL) the host waits.
  /// @throws Timeout; Unsupported in a graph where the host would wait
  virtual void barrier(const ExpertBarrier& call) = 0;

  /// The dispatch since the last call of this that needed the most rows, where the capacity was
  /// less. Waits for nothing.
  [[nodiscard]] virtual ExpertOverflow take_overflow() = 0;
};

/// A world's executor that is this too has an ExpertExecutor of its own kind.
class ExpertExecutorFactory {
 public:
  ExpertExecutorFactory() = default;
  ExpertExecutorFactory(const ExpertExecutorFactory&) = delete;
  ExpertExecutorFactory& operator=(const ExpertExecutorFactory&) = delete;
  virtual ~ExpertExecutorFactory() = default;

  /// @param memory stays where it is while the result lives; what it holds changes when the windows
  ///   grow
  [[nodiscard]] virtual std::unique_ptr<ExpertExecutor> make_expert_executor(
      const EPConfig& config, const EPDispatchOptions& options, const ExpertMemory& memory) = 0;
};

/// What does the work of one layer on this world: what its executor makes, else that of worlds in
/// host memory. World and memory outlive the result.
[[nodiscard]] std::unique_ptr<ExpertExecutor> make_expert_executor(const World& world,
                                                                   const EPConfig& config,
                                                                   const EPDispatchOptions& options,
                                                                   const ExpertMemory& memory);

}  // namespace waybill
