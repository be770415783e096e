#pragma once

#include <cstdint>
#include <string_view>

#include "transport/peer_transport.h"

namespace waybill::detail {

/// The common part of engines whose symmetric memory is host memory that every rank has mapped.
class HostTransport : public PeerTransport {
 public:
  void put(const SymmetricBuffer& to, const PutRequest& piece) final;
  void signal(Rank peer, SignalSlot slot, std::uint64_t epoch) final;
  std::uint64_t wait(SignalSlot slot, std::uint64_t wanted, Rank peer,
                     std::string_view operation) final;
  void quiet() final {}  // a put has arrived when it returns

 protected:
  using PeerTransport::PeerTransport;
};

}  // namespace waybill::detail
