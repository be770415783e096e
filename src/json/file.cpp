#include "waybill/json/file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>

#include "core/printable.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

namespace fs = std::filesystem;

using File = std::unique_ptr<std::FILE, decltype([](std::FILE* file) { (void)std::fclose(file); })>;

[[noreturn]] void fail(const std::string& name, const char* doing, int error) {
  throw IoError(concat(name, ": ", doing, ": ", detail::errno_text(error)));
}

/// All that can be read. @throws IoError
std::string read_all(std::FILE* file, const std::string& name) {
  struct stat status {};
  if (fstat(fileno(file), &status) != 0) fail(name, "cannot read", errno);
  const bool regular = S_ISREG(status.st_mode);
  const std::int64_t most = regular ? max_file_bytes : max_stream_bytes;
  std::string text;
  const auto check = [&](std::int64_t size_bytes) {
    if (size_bytes <= most) return;
    throw IoError(concat(name, ": cannot read: more than ", most >> 30,
                         " GiB, the most that is read ",
                         regular ? "of a file" : "of anything but a regular file"));
  };
  if (regular) {
    check(status.st_size);
    text.reserve(static_cast<std::size_t>(status.st_size));
  }
  std::array<char, 1 << 16> block{};
  while (const std::size_t got = std::fread(block.data(), 1, block.size(), file)) {
    text.append(block.data(), got);
    check(std::ssize(text));
  }
  if (std::ferror(file) != 0) fail(name, "cannot read", errno);
  return text;
}

/// Writes and closes. False, with errno set, when any of it failed.
/// @param lasting is on the disk when this returns: for a file that takes another's place
bool write_all(File file, std::string_view text, bool lasting) {
  if (std::fwrite(text.data(), 1, text.size(), file.get()) != text.size()) return false;
  if (lasting && (std::fflush(file.get()) != 0 || fsync(fileno(file.get())) != 0)) return false;
  return std::fclose(file.release()) == 0;
}

/// Opens a new file in the folder of `target`, under a name that nothing has yet.
File create_temporary(const fs::path& target, fs::path& created) {
  std::random_device random;
  for (int attempt = 0; attempt < 100; ++attempt) {
    created = target;
    created += concat(".", random(), ".tmp");
    if (File file{std::fopen(created.c_str(), "wbx")}) return file;
    if (errno != EEXIST) break;
  }
  fail(target.string(), "cannot create a file beside it", errno);
}

/// A device or a pipe, which write_file does not replace but write to.
bool is_written_in_place(const fs::file_status& status) {
  return fs::exists(status) && !fs::is_regular_file(status);
}

/// The file that a link stands for, or will.
fs::path replaced_file(const fs::path& path, const fs::file_status& status) {
  if (!fs::exists(status)) return path;
  std::error_code error;
  fs::path target = fs::canonical(path, error);
  if (error) fail(path.string(), "cannot find what it links to", error.value());
  return target;
}

}  // namespace

std::string read_file(const fs::path& path) {
  const File file{std::fopen(path.c_str(), "rb")};
  if (!file) fail(path.string(), "cannot open", errno);
  return read_all(file.get(), path.string());
}

std::string read_standard_input() { return read_all(stdin, "standard input"); }

void require_writable(const fs::path& path) {
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);
  if (is_written_in_place(status)) {
    const int reason = fs::is_directory(status)            ? EISDIR
                       : ::access(path.c_str(), W_OK) == 0 ? 0
                                                           : errno;
    if (reason != 0) fail(path.string(), "cannot open for writing", reason);
    return;
  }
  fs::path created;
  (void)create_temporary(replaced_file(path, status), created);
  fs::remove(created, ignored);
}

void write_file(const fs::path& path, std::string_view text) {
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);  // follows links
  if (is_written_in_place(status)) {
    File file{std::fopen(path.c_str(), "wb")};
    if (!file) fail(path.string(), "cannot open for writing", errno);
    if (!write_all(std::move(file), text, false)) fail(path.string(), "cannot write", errno);
    return;
  }
  const fs::path target = replaced_file(path, status);
  fs::path created;
  if (!write_all(create_temporary(target, created), text, true)) {
    const int reason = errno;
    fs::remove(created, ignored);
    fail(path.string(), "cannot write", reason);
  }
  if (fs::exists(status)) fs::permissions(created, status.permissions(), ignored);
  std::error_code error;
  fs::rename(created, target, error);
  if (error) {
    fs::remove(created, ignored);
    fail(path.string(), "cannot replace", error.value());
  }
}

}  // namespace waybill
