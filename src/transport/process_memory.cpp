#include "process_memory.h"

#include <unistd.h>

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "hmac.h"
#include "waybill/transport/agree.h"

namespace waybill::detail {
namespace {

/// What a rank says about the block that it is going to make.
struct BlockInfo {
  std::int64_t size_bytes;
  std::int64_t number;
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

}  // namespace

ProcessMemory::ProcessMemory(Bootstrap& bootstrap) {
  ProcessId mine{{}, getpid()};
  fill_random(mine.random);
  all_ = all_gather_value(bootstrap, mine, "make_process_transport");
}

/// "/waybill-PROCESS-NUMBER-RANK-RANDOM", by rank. They are made here from numbers, and no rank
/// takes a name from another: so nothing that a rank sends can be mapped or unlinked unless these
/// ranks have made it. The random part is rank 0's; nobody else than these ranks knows it.
std::vector<std::string> ProcessMemory::names_of(std::int64_t number) const {
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

/// They have names only in here, and no bytes yet: whenever a rank is killed, nothing stays but, at
/// worst, an empty name.
std::vector<SharedFile> ProcessMemory::open(Bootstrap& bootstrap, const std::string& operation) {
  const std::vector<std::string> names = names_of(num_blocks_++);
  const std::size_t me = to_int(bootstrap.rank());
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

std::vector<std::shared_ptr<void>> ProcessMemory::make(Bootstrap& bootstrap,
                                                       std::int64_t size_bytes,
                                                       std::string_view name) {
  const std::string operation = concat("allocate(", name, ")");
  check_same_block(bootstrap, {size_bytes, num_blocks_}, operation);
  const auto files = open(bootstrap, operation);
  const std::int64_t room = std::max<std::int64_t>(size_bytes, 1);
  const std::size_t me = to_int(bootstrap.rank());
  std::vector<std::shared_ptr<void>> parts;
  run_collectively(bootstrap, operation, [&] { files[me].reserve(room); });
  run_collectively(bootstrap, operation, [&] {
    for (const SharedFile& file : files) parts.push_back(file.map(room));
  });
  return parts;
}

}  // namespace waybill::detail
