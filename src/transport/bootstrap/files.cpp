#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <string>
#include <utility>

#include "core/printable.h"
#include "transport/bootstrap/wire.h"
#include "waybill/core/wait.h"

namespace waybill::detail {
namespace {

constexpr mode_t for_owner = S_IRWXU;
constexpr mode_t for_others = S_IRWXG | S_IRWXO;

/// @return 0, or the error of the system
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
  std::array<char, 8> text{};
  (void)std::snprintf(text.data(), text.size(), "%04o", mode & 07777U);
  return text.data();
}

/// A folder of this user alone in which the ranks of one run leave files for each other. It makes
/// every file anew, and opens them without following links and without blocking, so that it never
/// opens files of others. All errors are TransportError with the reason of the system.
class RunFolder {
 public:
  /// Makes the folder where it is missing. @throws TransportError unless it is a folder of this
  /// user, mode 0700
  explicit RunFolder(std::string path) : path_(std::move(path)) {
    while (path_.size() > 1 && path_.back() == '/') path_.pop_back();  // a slash would follow links
    is_new_ = mkdir(path_.c_str(), for_owner) == 0;
    if (!is_new_ && errno != EEXIST) {
      throw TransportError(
          concat("file bootstrap: cannot make the folder ", path_, ": ", errno_text(errno)));
    }
    open();
    std::uint64_t number = 0;
    fill_random(std::as_writable_bytes(std::span(&number, 1)));
    unfinished_ = concat(".", number, ".part");
  }

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] bool is_new() const { return is_new_; }

  /// Makes a file, which others see whole or not at all; false: there is one of this name.
  [[nodiscard]] bool publish(const std::string& name, std::string_view bytes = {}) const {
    const std::string unfinished = name + unfinished_;
    {
      const Descriptor file(openat(descriptor_.number(), unfinished.c_str(),
                                   O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                                   S_IRUSR | S_IWUSR));
      if (!file.is_open()) fail("make", unfinished, errno);
      const int error = write_all(file.number(), bytes_of(bytes));
      if (error != 0) {
        remove(unfinished);
        fail("write", unfinished, error);
      }
    }
    // A link to an existing name fails; a rename would replace the file.
    const int linked =
        linkat(descriptor_.number(), unfinished.c_str(), descriptor_.number(), name.c_str(), 0);
    const int error = linked == 0 ? 0 : errno;
    remove(unfinished);
    if (error != 0 && error != EEXIST) fail("name", name, error);
    return error == 0;
  }

  /// Nullopt: there is no such file (yet).
  [[nodiscard]] std::optional<Bootstrap::Bytes> read(const std::string& name,
                                                     std::size_t max_bytes) const {
    const Descriptor file(openat(descriptor_.number(), name.c_str(),
                                 O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC));
    if (!file.is_open() && errno == ENOENT) return std::nullopt;
    struct stat status {};
    if (!file.is_open() || fstat(file.number(), &status) != 0) fail("open", name, errno);
    if (!S_ISREG(status.st_mode) || status.st_uid != geteuid()) {
      throw TransportError(
          concat("file bootstrap: ", path_, "/", name, " is no regular file of user ", geteuid()));
    }
    const auto size = static_cast<std::size_t>(status.st_size);
    if (size > max_bytes) {
      throw TransportError(concat("file bootstrap: ", path_, "/", name, " has ", size,
                                  " bytes, expected at most ", max_bytes));
    }
    Bootstrap::Bytes bytes(size);
    for (std::size_t done = 0; done < size;) {
      const ssize_t got = ::read(file.number(), bytes.data() + done, size - done);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) fail("read all of", name, got < 0 ? errno : EIO);
      done += static_cast<std::size_t>(got);
    }
    return bytes;
  }

  [[nodiscard]] std::optional<std::string> read_text(const std::string& name) const {
    constexpr std::size_t max_text_bytes = 4096;
    const auto bytes = read(name, max_text_bytes);
    if (!bytes) return std::nullopt;
    return std::string(text_of(*bytes));
  }

  [[nodiscard]] bool exists(const std::string& name) const noexcept {
    return faccessat(descriptor_.number(), name.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0;
  }

  void remove(const std::string& name) const noexcept {
    (void)unlinkat(descriptor_.number(), name.c_str(), 0);
  }

  /// True for the rank that renames it first.
  [[nodiscard]] bool rename(const std::string& from, const std::string& to) const noexcept {
    return renameat(descriptor_.number(), from.c_str(), descriptor_.number(), to.c_str()) == 0;
  }

  /// Removes the folder unless something is in it.
  void remove_folder() const noexcept { (void)rmdir(path_.c_str()); }

 private:
  [[noreturn]] void fail(std::string_view doing, const std::string& name, int error) const {
    throw TransportError(
        concat("file bootstrap: cannot ", doing, " ", path_, "/", name, ": ", errno_text(error)));
  }

  void open() {
    descriptor_ =
        Descriptor(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    struct stat status {};
    if (!descriptor_.is_open() || fstat(descriptor_.number(), &status) != 0) {
      const int error = errno;
      throw TransportError(
          concat("file bootstrap: cannot open the folder ", path_, ": ", errno_text(error)));
    }
    // A folder may inherit the bit by which files inherit the group; it grants no access.
    const bool is_private =
        status.st_uid == geteuid() && (status.st_mode & (for_owner | for_others)) == for_owner;
    if (is_private) return;
    throw TransportError(concat("file bootstrap: the folder ", path_, " has mode ",
                                octal(status.st_mode), " and owner ", status.st_uid,
                                ", expected mode 0700 and owner ", geteuid()));
  }

  std::string path_;
  std::string unfinished_;  ///< ends names that nobody reads; every object has another one
  Descriptor descriptor_;
  bool is_new_ = false;
};

constexpr double check_ends_every_s = 0.02;

/// A run has these files:
///   job     names the job; ranks of another job go away
///   made    says that the ranks made the folder
///   rank.R  says that rank R is here; only one process can make it
///   K.R     holds the bytes of rank R for exchange K until all have begun exchange K + 1
///   end.R   says that rank R has left, and why, if it failed
/// The rank that leaves last removes all of them.
class FileBootstrap final : public Bootstrap {
 public:
  FileBootstrap(std::int32_t rank, std::int32_t world_size, const std::string& folder,
                double timeout_s, const JobIdentity& job)
      : Bootstrap(rank, world_size, timeout_s), folder_(folder) {
    check_job(concat("job id = ", quoted_or_none(job.id), ", world_size = ", world_size));
    if (!folder_.publish(concat("rank.", rank))) {
      throw TransportError(
          concat("file bootstrap: rank ", rank, " has been in ", folder_.path(),
                 " before, expected a folder for this run only, and another rank (RANK, "
                 "or what its launcher sets) in each process"));
    }
    if (folder_.is_new()) (void)folder_.publish("made");
  }
  ~FileBootstrap() override {
    if (!process_.is_here()) return;
    leave({});
    clean_up();
  }

  void fail(std::string_view reason) noexcept override {
    leave(reason.empty() ? "no reason given" : reason);
  }

 private:
  [[nodiscard]] static std::string entry_name(std::uint64_t round, std::int32_t rank) {
    return concat(round, ".", rank);
  }

  void check_job(const std::string& mine) const {
    std::optional<std::string> theirs;
    while (!theirs) {  // again if the last rank of a run removes it just now
      if (folder_.publish("job", mine)) return;
      theirs = folder_.read_text("job");
    }
    if (*theirs == mine) return;
    throw TransportError(concat("file bootstrap: ", folder_.path(), " is of a run with ",
                                peer_text(*theirs), ", expected ", mine));
  }

  std::vector<Bytes> exchange(std::span<const std::byte> mine,
                              std::string_view operation) override {
    if (has_left_) {
      throw TransportError(concat(operation, ": the bootstrap is unusable: this rank gave up"));
    }
    try {
      return give_and_gather(mine, operation);
    } catch (const std::exception& error) {
      fail(error.what());
      throw;
    }
  }

  std::vector<Bytes> give_and_gather(std::span<const std::byte> mine, std::string_view operation) {
    require(mine.size() <= max_entry_bytes, operation, ": rank ", rank(), " gives ", mine.size(),
            " bytes, expected at most ", max_entry_bytes);
    ++round_;
    if (!folder_.publish(entry_name(round_, to_int(rank())), text_of(mine))) {
      throw TransportError(concat("file bootstrap: ", entry_name(round_, to_int(rank())), " is in ",
                                  folder_.path(), " already"));
    }
    std::vector<std::optional<Bytes>> found(world_size());
    PollingWait wait(timeout_s());
    double next_check_s = 0;
    while (const auto missing = first_missing(found)) {
      if (wait.waited_s() >= next_check_s) {
        check_ends(found, operation);
        next_check_s = wait.waited_s() + check_ends_every_s;
      }
      if (wait.pause()) continue;
      throw_timeout(operation, to_int(rank()), *missing, round_, round_ - 1, wait.waited_s());
    }
    folder_.remove(entry_name(round_ - 1, to_int(rank())));  // all have begun this one
    std::vector<Bytes> all;
    for (auto& entry : found) all.push_back(std::move(*entry));
    return all;
  }

  /// Reads the entries that have come.
  std::optional<std::int32_t> first_missing(std::vector<std::optional<Bytes>>& found) const {
    std::optional<std::int32_t> missing;
    for (std::int32_t r = 0; r < world_size(); ++r) {
      auto& entry = found[r];
      if (!entry) entry = folder_.read(entry_name(round_, r), max_entry_bytes);
      if (!entry && !missing) missing = r;
    }
    return missing;
  }

  /// A rank that has left may have given its bytes before.
  void check_ends(const std::vector<std::optional<Bytes>>& found,
                  std::string_view operation) const {
    for (std::int32_t r = 0; r < world_size(); ++r) {
      if (found[r]) continue;
      const auto reason = folder_.read_text(concat("end.", r));
      if (!reason || folder_.exists(entry_name(round_, r))) continue;
      if (!reason->empty()) {
        throw PeerFailed(concat(operation, ": rank ", r, " failed: ", peer_text(*reason)));
      }
      throw PeerFailed(concat(operation, ": rank ", r, " left (seen by rank ", rank(),
                              " in exchange ", round_, ", it took part in ", round_ - 1, ")"));
    }
  }

  /// @param reason empty: nothing went wrong
  void leave(std::string_view reason) noexcept {
    if (has_left_) return;
    has_left_ = true;
    if (!process_.is_here()) return;
    try {
      (void)folder_.publish(concat("end.", rank()), reason.substr(0, max_reason_bytes));
    } catch (const std::exception&) {
      // A folder that is gone or full: the others find out by their deadlines.
    }
  }

  /// The rank that leaves last does it. A rank of a later run cannot use the folder before rank.R
  /// is gone, so those go last.
  void clean_up() const noexcept {
    try {
      for (std::int32_t r = 0; r < world_size(); ++r) {
        if (!folder_.exists(concat("end.", r))) return;
      }
      if (!folder_.rename("job", "closing")) return;  // another rank does it
      for (std::int32_t r = 0; r < world_size(); ++r) {
        for (std::uint64_t k = round_ == 0 ? 0 : round_ - 1; k <= round_ + 1; ++k) {
          folder_.remove(entry_name(k, r));  // ranks may end one exchange before or after
        }
        folder_.remove(concat("end.", r));
      }
      const bool made = folder_.exists("made");
      folder_.remove("made");
      for (std::int32_t r = 0; r < world_size(); ++r) folder_.remove(concat("rank.", r));
      folder_.remove("closing");
      if (made) folder_.remove_folder();
    } catch (const std::exception&) {
      // No memory for a name: files stay.
    }
  }

  RunFolder folder_;
  OwnProcess process_;
  std::uint64_t round_ = 0;
  bool has_left_ = false;
};

}  // namespace
}  // namespace waybill::detail

namespace waybill {

std::unique_ptr<Bootstrap> make_file_bootstrap(std::int32_t rank, std::int32_t world_size,
                                               const std::string& folder, double timeout_s,
                                               const JobIdentity& job) {
  require(!folder.empty(), "make_file_bootstrap: folder is empty");
  return std::make_unique<detail::FileBootstrap>(rank, world_size, folder, timeout_s, job);
}

}  // namespace waybill
