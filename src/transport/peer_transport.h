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

/// The place of the symmetric memory of GPU ranks of one host.
enum class PeerMemory : std::uint8_t {
  device,  ///< memory of their GPUs, which reach each other
  host,    ///< pinned memory of the host, which all GPUs reach
};

/// The value of WAYBILL_PEER_ACCESS: with "none" GPUs count as having no access to each other, with
/// "required" that is an error. Unset: the GPUs decide.
enum class PeerAccessWish : std::uint8_t { any, none, required };

/// @param text null: the variable is not set. @throws InvalidArgument for another text
[[nodiscard]] PeerAccessWish peer_access_wish(const char* text);

/// Collective: the same for all ranks, the host if any of them needs it. Rank 0 then prints a line
/// that says why, and what it costs.
/// @param trouble names what this rank's GPU cannot reach; empty: it reaches all
/// @param refused says why this kind of world cannot use the host's memory; empty: it can
/// @throws Unsupported on all ranks if one would need it and a wish or `refused` forbids it;
///   Timeout
[[nodiscard]] PeerMemory agree_on_peer_memory(Bootstrap& bootstrap, std::string_view who,
                                              PeerAccessWish wish, const std::string& trouble,
                                              const std::string& refused = {});

/// The common part of engines whose ranks have a Bootstrap and whose symmetric memory consists of
/// one block per rank. An engine makes and frees the blocks, and carries pieces and signals there.
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

  /// Collective.
  /// @param bootstrap not null
  /// @param ranks_per_node 0: all ranks on one node
  /// @throws as Transport; InvalidArgument on all ranks when versions of the library or
  ///   ranks_per_node differ, naming the rank that does
  PeerTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node);

  [[nodiscard]] Bootstrap& bootstrap() noexcept { return *bootstrap_; }

  /// From now on waits check the status of the ranks there. Null: there is none.
  void watch_peers(std::shared_ptr<PeerStatus> status) { status_ = std::move(status); }

  /// Gives up as fail() does, with another text for this rank. @param after "an interrupt: "
  virtual void give_up(const char* after, std::string_view reason) noexcept;

  /// @throws TransportError when this rank has given up
  void require_usable(std::string_view operation) const;

  /// Returns the address of a rank's slot, also on another node. @throws InvalidArgument as
  /// check_slot
  [[nodiscard]] std::uint64_t* slot_of(Rank peer, SignalSlot slot) const;

  /// Returns the address for a piece, also on another node. @throws InvalidArgument as check_piece
  [[nodiscard]] std::byte* address_of(const SymmetricBuffer& to, const PutRequest& piece) const;

 private:
  /// Collective: [W] blocks of size_bytes >= 0 zeros, aligned to 256 bytes; null for a rank whose
  /// memory cannot be reached through a pointer. Ranks check that they ask for the same size.
  [[nodiscard]] virtual Parts make_parts(std::int64_t size_bytes, std::string_view name) = 0;

  /// Collective: a table of the parts in memory that kernels read; null: nobody needs one.
  [[nodiscard]] virtual std::shared_ptr<void> make_table(const Parts& /*parts*/,
                                                         std::string_view /*name*/) {
    return nullptr;
  }

  /// Collective, when no rank uses the parts any more. The table is the last one.
  virtual void free_parts(Parts parts) { parts.clear(); }

  /// Part of a collective call: its waits end when a rank is gone.
  template <class Work>
  void run_collective(std::string_view operation, Work&& work);
  template <class Symmetric>
  void share(Symmetric& result, std::int64_t size_bytes);
  template <class Symmetric>
  void give_back(Symmetric& memory);

  std::shared_ptr<Bootstrap> bootstrap_;
  std::shared_ptr<PeerStatus> status_;
  detail::OwnProcess process_;
  std::string failure_;        ///< the reason why this rank has given up
  std::mutex deferred_mutex_;  ///< destructors may run on any thread
  Parts deferred_;
};

}  // namespace waybill
