#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "transport/settings.h"
#include "transport/symmetric_memory.h"
#include "waybill/core/link_speeds.h"
#include "waybill/core/topology.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {

/// How this rank gets at another rank's memory.
enum class Reach : std::uint8_t {
  self,
  load_store,  ///< through pointers
  network,     ///< through put and signal alone
};

/// One contiguous piece on its way to one rank.
struct PutRequest {
  Rank peer{};
  std::int64_t dst_offset_bytes = 0;  ///< in the peer's part of the buffer
  const std::byte* source = nullptr;  ///< memory of this rank
  std::int64_t size_bytes = 0;
};

/// A place of a SignalPad.
struct SignalSlot {
  const SignalPad* pad = nullptr;
  std::int64_t idx = 0;
};

/// The seam between ranks: everything that an engine (threads, peer access, NVSHMEM, NCCL) must
/// give. Whoever reaches a peer by load and store may use the pointers of the buffers directly.
///
/// Signals are epochs: the writer sets ever larger values, readers wait for "at least". They are
/// never reset. One slot has one writer. An object serves one thread at a time.
class Transport {
 public:
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  [[nodiscard]] Rank rank() const noexcept { return rank_; }
  [[nodiscard]] const Topology& topology() const noexcept { return topology_; }
  [[nodiscard]] double timeout_s() const noexcept { return timeout_s_; }

  /// Of all ranks, as World::use_links() has agreed on.
  [[nodiscard]] const LinkSpeeds& links() const noexcept { return links_; }
  void set_links(const LinkSpeeds& links) noexcept { links_ = links; }

  /// network to every rank of another node, even where its memory could be reached.
  [[nodiscard]] Reach reach(Rank peer) const;

  /// Collective. Aligned to 256 bytes; the contents are zeros. `name` stands in errors.
  /// @throws InvalidArgument for a negative size or one that differs between ranks (on all ranks),
  ///   Timeout, std::bad_alloc or the engine's error.
  [[nodiscard]] virtual SymmetricBuffer allocate(std::int64_t size_bytes,
                                                 std::string_view name) = 0;
  [[nodiscard]] virtual SignalPad allocate_signals(std::int64_t count, std::string_view name) = 0;

  /// Collective: nobody uses the memory any more once all have called, and nobody returns before it
  /// is free. Empties the argument.
  virtual void release(SymmetricBuffer& buffer) = 0;
  virtual void release(SignalPad& pad) = 0;

  /// Keeps symmetric memory that nobody has released until this object goes. Not collective; for
  /// destructors, on any thread.
  virtual void defer_release(std::vector<std::shared_ptr<void>> memory) = 0;

  /// Writes a piece into a peer's part. It has arrived when a later signal to that peer has, or
  /// after quiet() and a barrier.
  virtual void put(const SymmetricBuffer& to, const PutRequest& piece) = 0;

  /// Many puts, in any order.
  virtual void put_batch(const SymmetricBuffer& to, std::span<const PutRequest> pieces);

  /// A put, then a signal to the same peer.
  virtual void put_signal(const SymmetricBuffer& to, const PutRequest& piece, SignalSlot slot,
                          std::uint64_t epoch);

  /// Raises a peer's slot to `epoch`, after all earlier puts of this rank to that peer.
  virtual void signal(Rank peer, SignalSlot slot, std::uint64_t epoch) = 0;

  /// Waits until this rank's slot is at least `wanted`; what `peer` put before is then visible.
  /// @throws Timeout after timeout_s; PeerFailed; Interrupted
  virtual std::uint64_t wait(SignalSlot slot, std::uint64_t wanted, Rank peer,
                             std::string_view operation) = 0;

  /// Returns when all puts of this rank have left their sources and arrived.
  virtual void quiet() = 0;

  /// Tells the other ranks that this one gives up, and why: their waits end with PeerFailed at
  /// once, where the engine can tell them, and this rank's world is unusable. Not collective.
  virtual void fail(std::string_view reason) noexcept;

  /// An exception is ending what makes calls of this rank, and what it says is known later only.
  /// Tells the other ranks where they would else be waited for meanwhile.
  virtual void note_unwinding() noexcept;

  /// For waits beside wait(): looks after the other ranks, a few times per second.
  /// @throws PeerFailed when one has given up, or when `awaited` is gone
  virtual void check_peers(std::string_view operation, Rank awaited);

  /// Before a Timeout of a wait beside wait(): who then ends is not one of those that are gone, as
  /// the others are about to say for whom they wait.
  virtual void note_timeout() noexcept;

  /// Collective. @throws Timeout, PeerFailed, Interrupted
  virtual void barrier(std::string_view operation) = 0;

  /// Collective: the same settings on all ranks? @throws InvalidArgument on all ranks, naming the
  ///   one that differs, as require_same(Bootstrap&, ...); Timeout
  virtual void require_same(std::string_view who, std::span<const Setting> mine) = 0;

 protected:
  /// @throws InvalidArgument when topology.check() does or rank is not in it.
  Transport(Rank rank, Topology topology, double timeout_s);

  void check_piece(const SymmetricBuffer& to, const PutRequest& piece) const;
  void check_slot(SignalSlot slot) const;

 private:
  Rank rank_;
  Topology topology_;
  double timeout_s_;
  LinkSpeeds links_;
};

/// The world whose ranks are threads of this process, in host memory. Collective.
/// @param ranks_per_node 0: all ranks on one node. Else logical nodes: reach across is network.
[[nodiscard]] std::unique_ptr<Transport> make_thread_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                               std::int32_t ranks_per_node = 0);

/// The world whose ranks are processes of one host, in POSIX shared memory (/dev/shm must hold the
/// memory of all). Collective. Memory has no name once it has bytes: it goes with the last process
/// that has it, also when that is killed.
/// @param ranks_per_node as above
/// @throws Unsupported when a rank is on another host
[[nodiscard]] std::unique_ptr<Transport> make_process_transport(
    std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node = 0);

}  // namespace waybill
