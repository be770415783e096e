#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "host_transport.h"
#include "process_memory.h"
#include "transport/peer_status.h"
#include "waybill/transport/agree.h"

namespace waybill {
namespace {

class ProcessTransport final : public detail::HostTransport {
 public:
  ProcessTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node)
      : HostTransport(std::move(bootstrap), ranks_per_node), memory_(this->bootstrap()) {
    require_one_host(this->bootstrap(), "make_process_transport");
    watch_peers(make_peer_status(this->bootstrap()));
  }

 private:
  Parts make_parts(std::int64_t size_bytes, std::string_view name) override {
    return memory_.make(bootstrap(), size_bytes, name);
  }

  detail::ProcessMemory memory_;
};

}  // namespace

std::shared_ptr<PeerStatus> make_peer_status(Bootstrap& bootstrap) {
  const std::string operation = "peer status";
  constexpr auto size = std::int64_t{sizeof(PeerStatusBlock)};
  const std::size_t me = to_int(bootstrap.rank());
  detail::ProcessMemory memory(bootstrap);
  const auto files =
      std::make_shared<std::vector<detail::SharedFile>>(memory.open(bootstrap, operation));
  std::vector<std::shared_ptr<void>> blocks;
  run_collectively(bootstrap, operation, [&] { (*files)[me].reserve(size); });
  run_collectively(bootstrap, operation, [&] {
    for (const detail::SharedFile& file : *files) blocks.push_back(file.map(size));
    if ((*files)[me].mark()) static_cast<PeerStatusBlock*>(blocks[me].get())->process = getpid();
  });
  return std::make_shared<PeerStatus>(
      bootstrap.rank(), std::move(blocks),
      [files](std::int32_t rank) { return (*files)[rank].is_marked(); });
}

std::unique_ptr<Transport> make_process_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                  std::int32_t ranks_per_node) {
  require(bootstrap != nullptr, "make_process_transport: bootstrap is null");
  return std::make_unique<ProcessTransport>(std::move(bootstrap), ranks_per_node);
}

}  // namespace waybill
