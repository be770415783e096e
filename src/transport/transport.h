#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/core/link_speeds.h"
#include "waybill/core/topology.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {

/// Memory of one size on every rank, and the addresses of the ranks' parts here. It lives until the
/// last rank releases it, so a rank that leaves early takes nothing from the others.
struct SymmetricBuffer {
  std::string name;  ///< as it was allocated; the same on all ranks
  std::int64_t size_bytes = 0;
  std::byte* local = nullptr;
  std::vector<std::byte*> peers;  ///< [W]: `local` for this rank, null where reach is network
  /// Owners of the parts: [W], null for one that is not mapped here; then the table, if any.
  std::vector<std::shared_ptr<void>> memory;
  /// GPU worlds: [W] addresses of the parts for kernels, in memory of this rank's device. The table
  /// neither changes nor moves while the memory lives.
  std::byte* const* table = nullptr;
};

/// Counters that other ranks raise: on every rank `count` epochs, 0 at first, that only grow.
struct SignalPad {
  std::string name;
  std::int64_t count = 0;
  std::uint64_t* local = nullptr;
  std::vector<std::uint64_t*> peers;  ///< [W], as above
  std::vector<std::shared_ptr<void>> memory;
  std::uint64_t* const* table = nullptr;
};

/// A text that must be the same on all ranks.
struct Setting {
  std::string name;
  std::string value;
};

/// The way to another rank's memory.
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

/// A counter of a SignalPad.
struct SignalSlot {
  const SignalPad* pad = nullptr;
  std::int64_t idx = 0;
};

/// The seam between ranks: every engine (threads, peer access, NVSHMEM, NCCL) implements it. Code
/// that reaches a peer by load and store may use the pointers of the buffers directly.
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

  /// The speeds that all ranks have agreed on in World::use_links().
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

  /// Keeps symmetric memory that nobody has released until this object is destroyed. Not
  /// collective; destructors call it, on any thread.
  virtual void defer_release(std::vector<std::shared_ptr<void>> memory) = 0;

  /// Writes a piece into a peer's part. It has arrived when a later signal to that peer has, or
  /// after quiet() and a barrier.
  virtual void put(const SymmetricBuffer& to, const PutRequest& piece) = 0;

  /// A put, then a signal to the same peer.
  void put_signal(const SymmetricBuffer& to, const PutRequest& piece, SignalSlot slot,
                  std::uint64_t epoch) {
    put(to, piece);
    signal(piece.peer, slot, epoch);
  }

  /// Raises a peer's slot to `epoch`, after all earlier puts of this rank to that peer.
  virtual void signal(Rank peer, SignalSlot slot, std::uint64_t epoch) = 0;

  /// Waits until this rank's slot is at least `wanted`; what `peer` put before is then visible.
  /// @throws Timeout after timeout_s; PeerFailed; Interrupted
  virtual std::uint64_t wait(SignalSlot slot, std::uint64_t wanted, Rank peer,
                             std::string_view operation) = 0;

  /// Returns when all puts of this rank have left their sources and arrived.
  virtual void quiet() = 0;

  /// Tells the other ranks that this one gives up, and why: their waits end with PeerFailed at
  /// once, if the engine can reach them, and this rank's world is unusable. Not collective.
  virtual void fail(std::string_view /*reason*/) noexcept {}

  /// An exception is destroying an object that makes calls of this rank; its text is not known yet.
  /// Tells the other ranks at once if destroying it would wait for them.
  virtual void note_unwinding() noexcept {}

  /// Waits other than wait() call it a few times per second. @throws PeerFailed when a rank has
  /// given up, or when `awaited` is gone
  virtual void check_peers(std::string_view /*operation*/, Rank /*awaited*/) {}

  /// Waits other than wait() call it before they throw Timeout: when this rank then ends, the
  /// others do not report it as gone, but the rank for which they wait.
  virtual void note_timeout() noexcept {}

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

/// Collective: compares the settings of all ranks, which have the same names in the same order.
/// @throws InvalidArgument on all ranks when one differs: "who: rank 3 with ranks_per_node = 4,
///   the others 2, expected the same on all ranks"; Timeout, TransportError
void require_same(Bootstrap& bootstrap, std::string_view who, std::span<const Setting> mine);

/// Collective: `check` checks this rank's arguments and returns its settings, which must be the
/// same on all ranks. If it throws on one rank, all throw, so that nobody waits for that rank.
/// @throws the exception of `check`; else InvalidArgument as require_same
void agree_on_settings(Transport& transport, std::string_view who,
                       const std::function<std::vector<Setting>()>& check);

/// Makes the world whose ranks are threads of this process, in host memory. Collective.
/// @param ranks_per_node 0: all ranks on one node. Else logical nodes: reach across is network.
[[nodiscard]] std::unique_ptr<Transport> make_thread_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                               std::int32_t ranks_per_node = 0);

/// Makes the world whose ranks are processes of one host, in POSIX shared memory (/dev/shm must
/// hold the memory of all). Collective. Memory has no name once it has bytes: it ends with the last
/// process that has it, also when that is killed.
/// @param ranks_per_node as above
/// @throws Unsupported when a rank is on another host
[[nodiscard]] std::unique_ptr<Transport> make_process_transport(
    std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node = 0);

}  // namespace waybill
