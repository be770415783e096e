#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "transport/peer_status.h"
#include "transport/transport.h"

namespace waybill {

/// The part of a Transport that engines share whose ranks meet over a Bootstrap and whose symmetric
/// memory consists of one block per rank. An engine says how the blocks are made and freed, and how
/// pieces and signals get there.
class PeerTransport : public Transport {
 public:
  [[nodiscard]] SymmetricBuffer allocate(std::int64_t size_bytes, std::string_view name) final;
  [[nodiscard]] SignalPad allocate_signals(std::int64_t count, std::string_view name) final;
  void release(SymmetricBuffer& buffer) final;
  void release(SignalPad& pad) final;
  void defer_release(std::vector<std::shared_ptr<void>> memory) final;
  void barrier(std::string_view operation) final;
  void require_same(std::string_view who, std::span<const Setting> mine) final;
  void fail(std::string_view reason) noexcept final;
  void check_peers(std::string_view operation, Rank awaited) final;
  void note_timeout() noexcept final;

 protected:
  /// The parts of all ranks, as this one sees them.
  using Parts = std::vector<std::shared_ptr<void>>;

  /// @param bootstrap not null
  /// Collective.
  /// @param ranks_per_node 0: all ranks on one node
  /// @throws as Transport; InvalidArgument on all ranks when versions of the library or
  ///   ranks_per_node differ, naming the rank that does
  PeerTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node);

  [[nodiscard]] Bootstrap& bootstrap() noexcept { return *bootstrap_; }

  /// From now on waits look at what the ranks say of themselves there. Null: there is no such
  /// place.
  void watch_peers(std::shared_ptr<PeerStatus> status) { status_ = std::move(status); }

  /// The same as fail(), with another text for this rank. @param after "an interrupt: "
  virtual void give_up(const char* after, std::string_view reason) noexcept;

  /// @throws TransportError when this rank has given up
  void require_usable(std::string_view operation) const;

  /// Where a rank's slot lies, also on another node. @throws InvalidArgument as check_slot
  [[nodiscard]] std::uint64_t* slot_of(Rank peer, SignalSlot slot) const;

  /// Where a piece goes, also on another node. @throws InvalidArgument as check_piece
  [[nodiscard]] std::byte* place_of(const SymmetricBuffer& to, const PutRequest& piece) const;

 private:
  /// Collective: [W] blocks of size_bytes >= 0 zeros, aligned to 256 bytes; null for a rank whose
  /// memory cannot be reached through a pointer. Ranks check that they ask for the same size.
  [[nodiscard]] virtual Parts make_parts(std::int64_t size_bytes, std::string_view name) = 0;

  /// Collective: a table of the parts in memory that kernels read; null: nobody needs one.
  [[nodiscard]] virtual std::shared_ptr<void> make_table(const Parts& parts, std::string_view name);

  /// Collective, when nobody uses the parts any more. The table is the last one.
  virtual void free_parts(Parts parts);

  /// Part of a collective call: its waits end when a rank is gone.
  template <class Work>
  void run_collective(std::string_view operation, Work&& work);
  template <class Symmetric>
  void share(Symmetric& result, std::int64_t size_bytes, std::string_view name);
  template <class Symmetric>
  void give_back(Symmetric& memory);

  std::shared_ptr<Bootstrap> bootstrap_;
  std::shared_ptr<PeerStatus> status_;
  std::string failure_;        ///< why this rank has given up
  std::mutex deferred_mutex_;  ///< destructors may run on any thread
  Parts deferred_;
};

}  // namespace waybill
