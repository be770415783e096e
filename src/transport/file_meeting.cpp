#include "file_meeting.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <iomanip>
#include <sstream>
#include <utility>

#include "core/printable.h"
#include "hmac.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr mode_t for_owner = S_IRWXU;
constexpr mode_t for_others = S_IRWXG | S_IRWXO;

/// A descriptor that is closed.
struct OpenFile {
  int descriptor;
  explicit OpenFile(int opened) : descriptor(opened) {}
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() {
    if (descriptor >= 0) (void)::close(descriptor);
  }
};

/// 0, or what went wrong.
int write_all(int descriptor, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  return 0;
}

std::string octal(mode_t mode) {
  std::ostringstream text;
  text << std::oct << std::setfill('0') << std::setw(4) << (mode & 07777);
  return text.str();
}

}  // namespace

FileMeeting::FileMeeting(std::string folder) : folder_(std::move(folder)) {
  while (folder_.size() > 1 && folder_.back() == '/') folder_.pop_back();  // it would follow links
  made_folder_ = mkdir(folder_.c_str(), for_owner) == 0;
  if (!made_folder_ && errno != EEXIST) {
    throw TransportError(
        concat("file bootstrap: cannot make the folder ", folder_, ": ", errno_text(errno)));
  }
  open_folder();
  std::uint64_t number = 0;
  fill_random(std::as_writable_bytes(std::span(&number, 1)));
  unfinished_ = concat(".", number, ".part");
}

FileMeeting::~FileMeeting() {
  if (descriptor_ >= 0) (void)::close(descriptor_);
}

void FileMeeting::open_folder() {
  descriptor_ = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  struct stat status {};
  if (descriptor_ < 0 || fstat(descriptor_, &status) != 0) {
    const int error = errno;
    throw TransportError(
        concat("file bootstrap: cannot open the folder ", folder_, ": ", errno_text(error)));
  }
  // Folders may inherit the bit that says that files inherit the group: it lets nobody in.
  const bool is_private =
      status.st_uid == geteuid() && (status.st_mode & (for_owner | for_others)) == for_owner;
  if (is_private) return;
  (void)::close(std::exchange(descriptor_, -1));
  throw TransportError(concat("file bootstrap: the folder ", folder_, " has mode ",
                              octal(status.st_mode), " and owner ", status.st_uid,
                              ", expected mode 0700 and owner ", geteuid()));
}

void FileMeeting::fail(std::string_view doing, const std::string& name, int error) const {
  throw TransportError(
      concat("file bootstrap: cannot ", doing, " ", folder_, "/", name, ": ", errno_text(error)));
}

bool FileMeeting::publish(const std::string& name, std::span<const std::byte> bytes) const {
  const std::string unfinished = name + unfinished_;
  {
    const OpenFile file(openat(descriptor_, unfinished.c_str(),
                               O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                               S_IRUSR | S_IWUSR));
    if (file.descriptor < 0) fail("make", unfinished, errno);
    const int error = write_all(file.descriptor, bytes);
    if (error != 0) {
      remove(unfinished);
      fail("write", unfinished, error);
    }
  }
  // A link to an existing name fails, where renaming would replace.
  const int linked = linkat(descriptor_, unfinished.c_str(), descriptor_, name.c_str(), 0);
  const int error = linked == 0 ? 0 : errno;
  remove(unfinished);
  if (error != 0 && error != EEXIST) fail("name", name, error);
  return error == 0;
}

std::optional<Bootstrap::Bytes> FileMeeting::read(const std::string& name,
                                                  std::size_t max_bytes) const {
  const OpenFile file(
      openat(descriptor_, name.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC));
  if (file.descriptor < 0 && errno == ENOENT) return std::nullopt;
  struct stat status {};
  if (file.descriptor < 0 || fstat(file.descriptor, &status) != 0) fail("open", name, errno);
  if (!S_ISREG(status.st_mode) || status.st_uid != geteuid()) {
    throw TransportError(
        concat("file bootstrap: ", folder_, "/", name, " is no regular file of user ", geteuid()));
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size > max_bytes) {
    throw TransportError(concat("file bootstrap: ", folder_, "/", name, " has ", size,
                                " bytes, expected at most ", max_bytes));
  }
  Bootstrap::Bytes bytes(size);
  for (std::size_t done = 0; done < size;) {
    const ssize_t got = ::read(file.descriptor, bytes.data() + done, size - done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) fail("read all of", name, got < 0 ? errno : EIO);
    done += static_cast<std::size_t>(got);
  }
  return bytes;
}

std::optional<std::string> FileMeeting::read_text(const std::string& name) const {
  constexpr std::size_t longest_text = 4096;
  const auto bytes = read(name, longest_text);
  if (!bytes) return std::nullopt;
  return std::string(reinterpret_cast<const char*>(bytes->data()), bytes->size());
}

bool FileMeeting::exists(const std::string& name) const noexcept {
  return faccessat(descriptor_, name.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

void FileMeeting::remove(const std::string& name) const noexcept {
  (void)unlinkat(descriptor_, name.c_str(), 0);
}

bool FileMeeting::rename(const std::string& from, const std::string& to) const noexcept {
  return renameat(descriptor_, from.c_str(), descriptor_, to.c_str()) == 0;
}

void FileMeeting::remove_folder() const noexcept { (void)rmdir(folder_.c_str()); }

}  // namespace waybill::detail
