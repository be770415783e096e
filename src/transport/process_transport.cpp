#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "host_transport.h"
#include "shared_file.h"
#include "waybill/core/at.h"
#include "waybill/transport/agree.h"
#include "waybill/transport/peer_status.h"

namespace waybill {
namespace {

using detail::at;
using detail::SharedFile;

/// What a rank says about the block that it is going to make.
struct Offer {
  std::int64_t size_bytes;
  char name[64];
};

std::vector<std::string> exchange_names(Bootstrap& bootstrap, std::int64_t size_bytes,
                                        const std::string& operation) {
  Offer mine{size_bytes, {}};
  SharedFile::unique_name().copy(mine.name, sizeof(mine.name) - 1);
  std::vector<std::string> names;
  for (const Offer& offer : all_gather_value(bootstrap, mine, operation)) {
    require(offer.size_bytes == size_bytes, operation, ": size_bytes = ", size_bytes, ", but ",
            offer.size_bytes, " on rank ", names.size());
    names.emplace_back(offer.name);
  }
  return names;
}

/// Takes all names away, also those of ranks that died before they could.
class NameGuard {
 public:
  explicit NameGuard(const std::vector<std::string>& names) : names_(names) {}
  NameGuard(const NameGuard&) = delete;
  NameGuard& operator=(const NameGuard&) = delete;
  ~NameGuard() { std::ranges::for_each(names_, SharedFile::unlink); }

 private:
  const std::vector<std::string>& names_;
};

/// Opens the block of every rank. They have names only in here, and no bytes yet: whenever a rank
/// is killed, nothing stays but, at worst, an empty name.
std::vector<SharedFile> open_all(Bootstrap& bootstrap, std::int64_t size_bytes,
                                 const std::string& operation) {
  const auto names = exchange_names(bootstrap, size_bytes, operation);
  const auto me = at(to_int(bootstrap.rank()));
  const NameGuard guard(names);
  std::vector<SharedFile> files(names.size());
  do_together(bootstrap, operation, [&] { files[me] = SharedFile::create(names[me]); });
  do_together(bootstrap, operation, [&] {
    for (std::size_t r = 0; r < names.size(); ++r) {
      if (r != me) files[r] = SharedFile::open(names[r]);
    }
  });
  return files;
}

class ProcessTransport final : public detail::HostTransport {
 public:
  ProcessTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node)
      : HostTransport(std::move(bootstrap), ranks_per_node) {
    require_one_host(this->bootstrap(), "make_process_transport");
    watch_peers(make_peer_status(this->bootstrap()));
  }

 private:
  Parts make_parts(std::int64_t size_bytes, std::string_view name) override {
    const std::string operation = concat("allocate(", name, ")");
    const auto files = open_all(bootstrap(), size_bytes, operation);
    const std::int64_t room = std::max<std::int64_t>(size_bytes, 1);
    Parts parts;
    do_together(bootstrap(), operation, [&] {
      files[at(to_int(rank()))].reserve(room);
      for (const SharedFile& file : files) parts.push_back(file.map(room));
    });
    return parts;
  }
};

}  // namespace

std::shared_ptr<PeerStatus> make_peer_status(Bootstrap& bootstrap) {
  const std::string operation = "peer status";
  constexpr auto size = std::int64_t{sizeof(PeerStatusBlock)};
  const auto me = at(to_int(bootstrap.rank()));
  const auto files =
      std::make_shared<std::vector<SharedFile>>(open_all(bootstrap, size, operation));
  std::vector<std::shared_ptr<void>> blocks;
  do_together(bootstrap, operation, [&] {
    (*files)[me].reserve(size);
    for (const SharedFile& file : *files) blocks.push_back(file.map(size));
    if ((*files)[me].mark()) static_cast<PeerStatusBlock*>(blocks[me].get())->process = getpid();
  });
  return std::make_shared<PeerStatus>(
      bootstrap.rank(), std::move(blocks),
      [files](std::int32_t rank) { return (*files)[at(rank)].is_marked(); });
}

std::unique_ptr<Transport> make_process_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                  std::int32_t ranks_per_node) {
  require(bootstrap != nullptr, "make_process_transport: bootstrap is null");
  return std::make_unique<ProcessTransport>(std::move(bootstrap), ranks_per_node);
}

}  // namespace waybill
