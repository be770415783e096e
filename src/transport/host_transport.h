#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "transport/peer_transport.h"
#include "transport/share_memory.h"

namespace waybill::detail {

/// The engine of ranks whose symmetric memory is host memory that every rank has mapped.
class HostTransport : public PeerTransport {
 public:
  /// Collective. @param are_processes ranks are processes of one host, not threads of this process
  HostTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node,
                bool are_processes);

  void put(const SymmetricBuffer& to, const PutRequest& piece) final;
  void signal(Rank peer, SignalSlot slot, std::uint64_t epoch) final;
  std::uint64_t wait(SignalSlot slot, std::uint64_t wanted, Rank peer,
                     std::string_view operation) final;
  void quiet() final {}  // a put has arrived when it returns

 private:
  [[nodiscard]] Parts make_parts(std::int64_t size_bytes, std::string_view name) override;

  std::optional<ProcessMemory> memory_;
};

}  // namespace waybill::detail
