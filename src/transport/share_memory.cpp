#include "transport/share_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iomanip>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include "core/printable.h"

namespace waybill {
namespace {

/// A rank's block, as it describes it to the others.
struct BlockInfo {
  std::int64_t process;
  std::int64_t size_bytes;
  std::int64_t number;
};

/// Keeps the block of a rank of this process where the others find it by number while it is shared.
/// A rank that gives up removes its own, and may do so while a slower one has yet to get it.
class InTransit {
 public:
  explicit InTransit(std::shared_ptr<void> block) {
    const std::lock_guard lock(mutex);
    number_ = ++last_number;
    blocks.emplace(number_, std::move(block));
  }
  InTransit(const InTransit&) = delete;
  InTransit& operator=(const InTransit&) = delete;
  ~InTransit() {
    std::shared_ptr<void> last;  // destroyed after the lock is released
    const std::lock_guard lock(mutex);
    last = std::move(blocks.extract(number_).mapped());
  }
  [[nodiscard]] std::int64_t number() const { return number_; }

  /// Returns the blocks of all ranks; null for one that is not there any more.
  [[nodiscard]] static std::vector<std::shared_ptr<void>> get(const std::vector<BlockInfo>& infos) {
    std::vector<std::shared_ptr<void>> result(infos.size());
    const std::lock_guard lock(mutex);
    for (std::size_t i = 0; i < infos.size(); ++i) {
      const auto found = blocks.find(infos[i].number);
      if (found != blocks.end()) result[i] = found->second;
    }
    return result;
  }

 private:
  inline static std::mutex mutex;
  inline static std::int64_t last_number = 0;
  inline static std::map<std::int64_t, std::shared_ptr<void>> blocks;

  std::int64_t number_ = 0;
};

/// Removes all names, also those of ranks that died before they could.
void unlink_all(const std::vector<std::string>& names) noexcept {
  std::ranges::for_each(names, detail::SharedFile::unlink);
}

/// A lock of the first byte of a file.
struct flock lock_of_first_byte() {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  return lock;
}

}  // namespace

std::vector<std::shared_ptr<void>> share_memory(Bootstrap& bootstrap, std::shared_ptr<void> mine,
                                                std::int64_t size, std::string_view name) {
  const std::string operation = concat("share_memory(", name, ")");
  const InTransit own(std::move(mine));
  const auto blocks =
      all_gather_value(bootstrap, BlockInfo{getpid(), size, own.number()}, operation);
  for (std::size_t r = 0; r < blocks.size(); ++r) {
    if (blocks[r].process != getpid()) {
      throw Unsupported(
          concat(operation, ": rank ", r, " is another process, expected threads of one process"));
    }
  }
  require_same_size(blocks, &BlockInfo::size_bytes, size, operation);
  auto all = InTransit::get(blocks);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r] == nullptr) throw PeerFailed(concat(operation, ": rank ", r, " has given up"));
  }
  bootstrap.barrier(operation);
  return all;
}

}  // namespace waybill

namespace waybill::detail {

SharedFile SharedFile::create(const std::string& name) {
  const int descriptor = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, S_IRUSR | S_IWUSR);
  if (descriptor < 0) {
    throw TransportError(concat("cannot make the shared memory ", name, ": ", errno_text(errno)));
  }
  return SharedFile(descriptor);
}

SharedFile SharedFile::open(const std::string& name) {
  SharedFile file(shm_open(name.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK, 0));
  struct stat status {};
  if (!file.descriptor_.is_open() || fstat(file.descriptor_.number(), &status) != 0) {
    throw TransportError(concat("cannot open the shared memory ", name, ": ", errno_text(errno),
                                "; expected processes of one user that see the same /dev/shm"));
  }
  if (!S_ISREG(status.st_mode) || status.st_uid != geteuid() || status.st_size != 0) {
    throw TransportError(concat("the shared memory ", name, " is of user ", status.st_uid,
                                " and has ", status.st_size, " bytes, expected a new file of user ",
                                geteuid()));
  }
  return file;
}

void SharedFile::unlink(const std::string& name) noexcept { (void)shm_unlink(name.c_str()); }

void SharedFile::reserve(std::int64_t size_bytes) const {
  int error = 0;
  do {
    error = posix_fallocate(descriptor_.number(), 0, size_bytes);
  } while (error == EINTR);
  if (error == 0) return;
  throw TransportError(concat("cannot reserve ", size_bytes,
                              " bytes of shared memory: ", errno_text(error),
                              "; /dev/shm needs room for the memory of all ranks "
                              "(containers: --shm-size or --ipc=host)"));
}

/// The mark is a lock of POSIX: children that a rank forks do not have it, so it ends with the
/// rank. Unlike a process number it means the same in all containers.
bool SharedFile::mark() const noexcept {
  struct flock lock = lock_of_first_byte();
  return fcntl(descriptor_.number(), F_SETLK, &lock) == 0;
}

bool SharedFile::is_marked() const noexcept {
  struct flock lock = lock_of_first_byte();
  return fcntl(descriptor_.number(), F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

std::shared_ptr<void> SharedFile::map(std::int64_t size_bytes) const {
  const std::size_t size = size_bytes;
  struct stat status {};
  if (fstat(descriptor_.number(), &status) != 0 || status.st_size < size_bytes) {
    throw TransportError(concat("the shared memory of a rank has ", status.st_size,
                                " bytes, expected ", size_bytes));
  }
  void* const memory =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.number(), 0);
  if (memory == MAP_FAILED) {
    throw TransportError(
        concat("cannot map ", size_bytes, " bytes of shared memory: ", errno_text(errno)));
  }
  return {memory, [size](void* begin) { (void)munmap(begin, size); }};
}

ProcessMemory::ProcessMemory(Bootstrap& bootstrap) {
  ProcessId mine{{}, getpid()};
  fill_random(mine.random);
  all_ = all_gather_value(bootstrap, mine, "make_process_transport");
}

/// Returns "/waybill-PROCESS-NUMBER-RANK-RANDOM", by rank. Each rank makes the names from numbers
/// and accepts none from another rank, so it can map or unlink only memory that these ranks have
/// made. Only these ranks know the random part, which is rank 0's.
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

/// The blocks have names only in here, and no bytes yet: a rank that is killed leaves at worst an
/// empty name.
std::vector<SharedFile> ProcessMemory::open(Bootstrap& bootstrap, const std::string& operation) {
  const std::vector<std::string> names = names_of(num_blocks_++);
  const std::size_t me = to_int(bootstrap.rank());
  std::vector<SharedFile> files(names.size());
  try {
    run_collectively(bootstrap, operation, [&] { files[me] = SharedFile::create(names[me]); });
    run_collectively(bootstrap, operation, [&] {
      for (std::size_t r = 0; r < names.size(); ++r) {
        if (r != me) files[r] = SharedFile::open(names[r]);
      }
    });
  } catch (...) {
    unlink_all(names);
    throw;
  }
  unlink_all(names);
  return files;
}

std::vector<std::shared_ptr<void>> ProcessMemory::make(Bootstrap& bootstrap,
                                                       std::int64_t size_bytes,
                                                       std::string_view name) {
  const std::string operation = concat("allocate(", name, ")");
  const BlockInfo mine{getpid(), size_bytes, num_blocks_};
  const auto blocks = all_gather_value(bootstrap, mine, operation);
  require_same_size(blocks, &BlockInfo::size_bytes, size_bytes, operation);
  for (std::size_t r = 0; r < blocks.size(); ++r) {
    require(blocks[r].number == mine.number, operation, ": allocation ", mine.number, ", but ",
            blocks[r].number, " on rank ", r);
  }
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
