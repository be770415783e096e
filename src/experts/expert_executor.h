#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "experts/expert_memory.h"
#include "runtime/executor.h"
#include "runtime/fingerprint.h"
#include "waybill/experts/copy_store.h"
#include "waybill/experts/ep_all2all_layer.h"
#include "waybill/moe/ep_config.h"

namespace waybill {

class World;

/// The result of routing: the row of every topk slot, and all tables that follow from it.
/// Dispatches by the same routing share it. Once the dispatch that made it is done, it never
/// changes, so a layout gives the same results whatever comes later. Tags of rows belong to it,
/// because they say where a row comes from, not its contents.
class ExpertRouting {
 public:
  ExpertRouting() = default;
  ExpertRouting(const ExpertRouting&) = delete;
  ExpertRouting& operator=(const ExpertRouting&) = delete;
  virtual ~ExpertRouting() = default;

  /// All tables but the weights. Their contents are complete when the dispatch is done on its
  /// stream.
  [[nodiscard]] virtual ExpertTableViews views() const = 0;

  /// Rows that each rank receives [W], in host memory (on a GPU: pinned, written by the device).
  /// Waits until they are known, not for the rows. @throws Timeout
  [[nodiscard]] virtual std::span<const std::int32_t> wait_counts() const = 0;
  /// The same if the host has them already; else empty. Waits for nothing.
  [[nodiscard]] virtual std::span<const std::int32_t> known_counts() const = 0;

  /// Tells the routing that the caller has queued work with the views on a stream. Its memory is
  /// then reused only after that work. Calls of the layer need not do so. Any thread may call it.
  virtual void note_use(const Stream& /*stream*/) const {}
};

/// One dispatch: the routing that it made or was given, and the weights that it carried. It belongs
/// to the layer that made it; many may be alive.
class ExpertTables {
 public:
  ExpertTables() = default;
  ExpertTables(const ExpertTables&) = delete;
  ExpertTables& operator=(const ExpertTables&) = delete;
  virtual ~ExpertTables() = default;

  [[nodiscard]] virtual const ExpertRouting& routing() const = 0;

  /// Weights of this dispatch's tokens, as ExpertTableViews says; not given without weights.
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
  std::uint64_t epoch = 0;   ///< number of this call; replays of graphs may have come further
  std::uint32_t parity = 0;  ///< this dispatch among dispatches, this combine among combines
  int num_sms = 0;
  const Stream* stream = nullptr;
  CallFingerprint fingerprint = {};  ///< ranks compare theirs
  bool may_grow = false;  ///< windows may: the host has waited for the counts of its dispatches
  std::int64_t max_per_expert = 0;  ///< for dispatches, see EPLayerOptions
  bool sums_locally = false;  ///< for dispatches: weighted sums may be local, see EPCombineOptions
  const ExpertTables* present = nullptr;  ///< for dispatches, see ExpertDispatchInput
};

/// Does the work of one layer on a world's kind of memory.
///
/// Protocol, the same on all worlds, by call number n: a rank raises `entered` to n at all ranks
/// when it has begun call n, and writes to or reads from a rank after that rank has entered n. So
/// what the last call left in a window, the workspace or an output may be overwritten. A dispatch
/// raises `arrived` after its last row and ends when all ranks of the node have. A combine
/// enters with its rows in its combine window, reads the windows of the ranks of the node, and
/// ends when it has summed. With spare experts a dispatch that counts raises `planned` when its
/// counts of slots can be read. All waits have the transport's deadline.
class ExpertExecutor {
 public:
  ExpertExecutor() = default;
  ExpertExecutor(const ExpertExecutor&) = delete;
  ExpertExecutor& operator=(const ExpertExecutor&) = delete;
  virtual ~ExpertExecutor() = default;

  /// Runs an empty call if the calls that have run are not at these parities, as a graph holds an
  /// odd number of dispatches or combines. On several nodes it does nothing, and the call reports
  /// the fault.
  virtual void realign(const ExpertCall& /*call*/, std::uint32_t /*next_dispatch*/,
                       std::uint32_t /*next_combine*/) {}

  /// First half of a dispatch: enters the call with this rank's counts; when all have, places rows
  /// and fills the tables. With spare experts ranks plan copies in between, put slots in place of
  /// ids, and exchange what they count of slots. GPU worlds queue it and return.
  /// @throws Timeout; InvalidArgument for ids out of range, where the host reads them
  [[nodiscard]] virtual std::shared_ptr<ExpertTables> route(const ExpertCall& call,
                                                            const ExpertDispatchInput& input) = 0;

  /// The same by the routing of an earlier dispatch, which stays as it is: enters the call, counts
  /// nothing, and takes the weights if there are any.
  [[nodiscard]] virtual std::shared_ptr<ExpertTables> enter(const ExpertCall& call,
                                                            const ExpertDispatchInput& input,
                                                            const ExpertTables& earlier) = 0;

  /// Second half, once per result of route or enter: rows, tags, scales and weights into the
  /// windows of parity `call.parity`. Rows past the capacity are not written; those that fit are
  /// right, all ranks note the overflow, and combine makes the sums of tokens with rows that did
  /// not fit NaN.
  virtual void dispatch(const ExpertCall& call, const ExpertDispatchInput& input,
                        ExpertTables& begun) = 0;

  /// Enters the call with expert outputs in the combine window, and sums.
  virtual void combine(const ExpertCall& call, const ExpertCombineInput& input,
                       const ExpertTables& tables) = 0;

  /// On this rank alone, for rows that have arrived.
  virtual void weigh_gradients(const ExpertGradientInput& input, const ExpertTables& tables,
                               const Stream& stream) = 0;
  virtual void copy_rows(const ConstTensorView& from, const TensorView& to,
                         const ExpertTables& tables, const Stream& stream) = 0;

  /// Lets the ranks of the node, or of the world, wait for each other. Rank r raises slot r of the
  /// signals for the node, slot W + r for the world, to `epoch`, the number of such barriers;
  /// replays of graphs may have come further. GPU worlds queue it on the stream and return; where
  /// ranks do not have each other's signals mapped (several nodes over NVSHMEM or NCCL) the host
  /// waits.
  /// @throws Timeout; Unsupported in a graph where the host would wait
  virtual void barrier(const SignalPad& signals, bool of_world, std::uint64_t epoch,
                       const Stream& stream) = 0;

  /// The dispatch since the last call of this that needed the most rows, where the capacity was
  /// less. Waits for nothing.
  [[nodiscard]] virtual ExpertOverflow take_overflow() = 0;

  /// Collective, after the last call: gives back symmetric memory that the executor has made.
  virtual void release() {}
};

/// Lets ranks first..first + count - 1, of which this is one, wait for each other by signals: rank
/// r raises slot first_slot + r - first to `epoch`. @throws Timeout
void wait_for_ranks(Transport& transport, const SignalPad& signals, std::int64_t first_slot,
                    std::int32_t first, std::int32_t count, std::uint64_t epoch,
                    std::string_view operation);

inline constexpr std::int64_t max_copy_store_parts = 16;
inline constexpr std::int64_t max_copy_store_tensors = 256;  ///< those of a rank's home experts

/// The memory and the kernels of a CopyStore, whose calls are checked. A call enters as one of
/// ExpertExecutor does: what a rank's store held may be overwritten once that rank has entered.
/// Gradients end when all ranks have read the stores.
class CopyStoreExecutor {
 public:
  CopyStoreExecutor() = default;
  CopyStoreExecutor(const CopyStoreExecutor&) = delete;
  CopyStoreExecutor& operator=(const CopyStoreExecutor&) = delete;
  virtual ~CopyStoreExecutor() = default;

  /// The store, whose `local` is null after release().
  [[nodiscard]] virtual const SymmetricBuffer& store() const = 0;
  /// As CopyStore's calls.
  virtual void fetch_weights(const CopyStoreCall& call, const CallFingerprint& fingerprint,
                             const Stream& stream) = 0;
  virtual void add_gradients(const CopyStoreCall& call, const CallFingerprint& fingerprint,
                             const Stream& stream) = 0;
  /// Collective.
  virtual void release() = 0;
};

/// A world's executor that is this too has an ExpertExecutor of its own kind.
class ExpertExecutorFactory {
 public:
  ExpertExecutorFactory() = default;
  ExpertExecutorFactory(const ExpertExecutorFactory&) = delete;
  ExpertExecutorFactory& operator=(const ExpertExecutorFactory&) = delete;
  virtual ~ExpertExecutorFactory() = default;

  /// @param memory stays where it is while the result lives; its contents change when the windows
  ///   grow
  [[nodiscard]] virtual std::unique_ptr<ExpertExecutor> make_expert_executor(
      const EPConfig& config, const EPDispatchOptions& options, const ExpertMemory& memory) = 0;

  /// Collective. @param name of the memory, in errors
  /// @throws Unsupported; Timeout
  [[nodiscard]] virtual std::unique_ptr<CopyStoreExecutor> make_copy_store(
      std::int64_t size_bytes, std::int32_t spare_experts, std::string_view name) = 0;
};

/// Makes the executor of one layer on this world: its own kind, if the world's executor is a
/// factory, else that of host memory. World and memory outlive the result.
[[nodiscard]] std::unique_ptr<ExpertExecutor> make_expert_executor(const World& world,
                                                                   const EPConfig& config,
                                                                   const EPDispatchOptions& options,
                                                                   const ExpertMemory& memory);

}  // namespace waybill
