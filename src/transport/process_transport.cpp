#include <unistd.h>

#include <algorithm>
#include <array>
#include <iomanip>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/to_size.h"
#include "hmac.h"
#include "host_transport.h"
#include "shared_file.h"
#include "transport/peer_status.h"
#include "waybill/transport/agree.h"

namespace waybill {
namespace {

using detail::SharedFile;
using detail::to_size;

/// What a rank says of itself when the transport is made.
struct ProcessId {
  std::array<std::byte, 16> random;
  std::int64_t process;
};

/// What a rank says about the block that it is going to make.
struct BlockInfo {
  std::int64_t size_bytes;
  std::int64_t number;
};

/// The names of the ranks' blocks. They are made here from numbers, and no rank takes a name from
/// another: so nothing that a rank sends can be mapped or unlinked unless these ranks have made it.
class BlockNames {
 public:
  explicit BlockNames(Bootstrap& bootstrap) {
    ProcessId mine{{}, getpid()};
    detail::fill_random(mine.random);
    all_ = all_gather_value(bootstrap, mine, "make_process_transport");
  }

  /// "/waybill-PROCESS-NUMBER-RANK-RANDOM", by rank. The random part is rank 0's; nobody else than
  /// these ranks knows it.
  [[nodiscard]] std::vector<std::string> of_block(std::int64_t number) const {
    std::vector<std::string> names;
    for (std::size_t r = 0; r < all_.size(); ++r) {
      std::ostringstream name;
      name << "/waybill-" << all_[r].process << '-' << number << '-' << r << '-' << std::hex
           << std::setfill('0');
      for (const std::byte byte : all_.front().random) {
        name << std::setw(2) << std::to_integer<int>(byte);
      }
      names.push_back(name.str());
    }
    return names;
  }

 private:
  std::vector<ProcessId> all_;
};

void check_same_block(Bootstrap& bootstrap, const BlockInfo& mine, const std::string& operation) {
  const auto all = all_gather_value(bootstrap, mine, operation);
  for (std::size_t r = 0; r < all.size(); ++r) {
    require(all[r].size_bytes == mine.size_bytes, operation, ": size_bytes = ", mine.size_bytes,
            ", but ", all[r].size_bytes, " on rank ", r);
    require(all[r].number == mine.number, operation, ": allocation ", mine.number, ", but ",
            all[r].number, " on rank ", r);
  }
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
std::vector<SharedFile> open_all(Bootstrap& bootstrap, const std::vector<std::string>& names,
                                 const std::string& operation) {
  const auto me = to_size(to_int(bootstrap.rank()));
  const NameGuard guard(names);
  std::vector<SharedFile> files(names.size());
  run_collectively(bootstrap, operation, [&] { files[me] = SharedFile::create(names[me]); });
  run_collectively(bootstrap, operation, [&] {
    for (std::size_t r = 0; r < names.size(); ++r) {
      if (r != me) files[r] = SharedFile::open(names[r]);
    }
  });
  return files;
}

class ProcessTransport final : public detail::HostTransport {
 public:
  ProcessTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node)
      : HostTransport(std::move(bootstrap), ranks_per_node), names_(this->bootstrap()) {
    require_one_host(this->bootstrap(), "make_process_transport");
    watch_peers(make_peer_status(this->bootstrap()));
  }

 private:
  Parts make_parts(std::int64_t size_bytes, std::string_view name) override {
    const std::string operation = concat("allocate(", name, ")");
    const std::int64_t number = num_blocks_++;
    check_same_block(bootstrap(), {size_bytes, number}, operation);
    const auto files = open_all(bootstrap(), names_.of_block(number), operation);
    const std::int64_t room = std::max<std::int64_t>(size_bytes, 1);
    Parts parts;
    run_collectively(bootstrap(), operation, [&] { files[to_size(to_int(rank()))].reserve(room); });
    run_collectively(bootstrap(), operation, [&] {
      for (const SharedFile& file : files) parts.push_back(file.map(room));
    });
    return parts;
  }

  BlockNames names_;
  std::int64_t num_blocks_ = 0;
};

}  // namespace

std::shared_ptr<PeerStatus> make_peer_status(Bootstrap& bootstrap) {
  const std::string operation = "peer status";
  constexpr auto size = std::int64_t{sizeof(PeerStatusBlock)};
  const auto me = to_size(to_int(bootstrap.rank()));
  const BlockNames names(bootstrap);
  const auto files =
      std::make_shared<std::vector<SharedFile>>(open_all(bootstrap, names.of_block(0), operation));
  std::vector<std::shared_ptr<void>> blocks;
  run_collectively(bootstrap, operation, [&] { (*files)[me].reserve(size); });
  run_collectively(bootstrap, operation, [&] {
    for (const SharedFile& file : *files) blocks.push_back(file.map(size));
    if ((*files)[me].mark()) static_cast<PeerStatusBlock*>(blocks[me].get())->process = getpid();
  });
  return std::make_shared<PeerStatus>(
      bootstrap.rank(), std::move(blocks),
      [files](std::int32_t rank) { return (*files)[to_size(rank)].is_marked(); });
}

std::unique_ptr<Transport> make_process_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                  std::int32_t ranks_per_node) {
  require(bootstrap != nullptr, "make_process_transport: bootstrap is null");
  return std::make_unique<ProcessTransport>(std::move(bootstrap), ranks_per_node);
}

}  // namespace waybill
