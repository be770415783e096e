#include "transport/share_memory.h"

#include <unistd.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace waybill {
namespace {

/// The blocks of all ranks of this process that are being shared, by number. A rank that gives up
/// takes its own away, and may do so while a slower one is on its way to it.
class BlocksInTransit {
 public:
  std::int64_t put(std::shared_ptr<void> block) {
    const std::lock_guard lock(mutex_);
    blocks_.emplace(++last_, std::move(block));
    return last_;
  }

  /// The blocks with these numbers, in one turn; null for one that is not there any more.
  template <class Infos>
  std::vector<std::shared_ptr<void>> get(const Infos& infos) {
    std::vector<std::shared_ptr<void>> result(infos.size());
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < infos.size(); ++i) {
      const auto found = blocks_.find(infos[i].number);
      if (found != blocks_.end()) result[i] = found->second;
    }
    return result;
  }

  void take_away(std::int64_t number) {
    std::shared_ptr<void> last;  // goes behind the lock
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(number);
    last = std::move(found->second);
    blocks_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::int64_t last_ = 0;
  std::map<std::int64_t, std::shared_ptr<void>> blocks_;
};

BlocksInTransit& blocks_in_transit() {
  static BlocksInTransit blocks;
  return blocks;
}

class InTransit {
 public:
  explicit InTransit(std::shared_ptr<void> block)
      : number_(blocks_in_transit().put(std::move(block))) {}
  InTransit(const InTransit&) = delete;
  InTransit& operator=(const InTransit&) = delete;
  ~InTransit() { blocks_in_transit().take_away(number_); }
  [[nodiscard]] std::int64_t number() const { return number_; }

 private:
  std::int64_t number_;
};

/// What a rank says of its block.
struct SharedBlock {
  std::int64_t process;
  std::int64_t size;
  std::int64_t number;
};

}  // namespace

std::vector<std::shared_ptr<void>> share_memory(Bootstrap& bootstrap, std::shared_ptr<void> mine,
                                                std::int64_t size, std::string_view name) {
  const std::string operation = concat("share_memory(", name, ")");
  const InTransit own(std::move(mine));
  const auto blocks =
      all_gather_value(bootstrap, SharedBlock{getpid(), size, own.number()}, operation);
  for (std::size_t r = 0; r < blocks.size(); ++r) {
    if (blocks[r].process != getpid()) {
      throw Unsupported(
          concat(operation, ": rank ", r, " is another process, expected threads of one process"));
    }
    require(blocks[r].size == size, operation, ": size = ", size, ", but ", blocks[r].size,
            " on rank ", r);
  }
  auto all = blocks_in_transit().get(blocks);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r] == nullptr) throw PeerFailed(concat(operation, ": rank ", r, " has given up"));
  }
  bootstrap.barrier(operation);
  return all;
}

}  // namespace waybill
