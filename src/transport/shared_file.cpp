#include "shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "core/printable.h"
#include "waybill/core/error.h"

namespace waybill::detail {

SharedFile::SharedFile(SharedFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)) {}

SharedFile& SharedFile::operator=(SharedFile&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

SharedFile::~SharedFile() {
  if (descriptor_ >= 0) (void)::close(descriptor_);
}

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
  if (file.descriptor_ < 0 || fstat(file.descriptor_, &status) != 0) {
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
    error = posix_fallocate(descriptor_, 0, size_bytes);
  } while (error == EINTR);
  if (error == 0) return;
  throw TransportError(concat("cannot reserve ", size_bytes,
                              " bytes of shared memory: ", errno_text(error),
                              "; /dev/shm needs room for the memory of all ranks "
                              "(containers: --shm-size or --ipc=host)"));
}

// A lock of POSIX: children that a rank forks do not have it, so that it goes with the rank. Unlike
// a process number it means the same in all containers.
bool SharedFile::mark() const noexcept {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  return fcntl(descriptor_, F_SETLK, &lock) == 0;
}

bool SharedFile::is_marked() const noexcept {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  return fcntl(descriptor_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

std::shared_ptr<void> SharedFile::map(std::int64_t size_bytes) const {
  const std::size_t size = size_bytes;
  struct stat status {};
  if (fstat(descriptor_, &status) != 0 || status.st_size < size_bytes) {
    throw TransportError(concat("the shared memory of a rank has ", status.st_size,
                                " bytes, expected ", size_bytes));
  }
  void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (memory == MAP_FAILED) {
    throw TransportError(
        concat("cannot map ", size_bytes, " bytes of shared memory: ", errno_text(errno)));
  }
  return {memory, [size](void* begin) { (void)munmap(begin, size); }};
}

}  // namespace waybill::detail
