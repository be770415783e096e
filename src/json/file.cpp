#include "waybill/json/file.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <system_error>

#include "waybill/core/error.h"

namespace waybill {
namespace {

namespace fs = std::filesystem;

struct CloseFile {
  void operator()(std::FILE* file) const { (void)std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

constexpr std::int64_t max_file_bytes = std::int64_t{1} << 32;

[[noreturn]] void fail(const fs::path& path, const char* doing, int error) {
  throw IoError(concat(path.string(), ": ", doing, ": ",
                       std::error_code(error, std::generic_category()).message()));
}

/// Writes and closes. False, with errno set, when any of it failed.
/// @param lasting is on the disk when this returns: for a file that takes another's place
bool write_all(File file, std::string_view text, bool lasting) {
  if (std::fwrite(text.data(), 1, text.size(), file.get()) != text.size()) return false;
  if (lasting && (std::fflush(file.get()) != 0 || fsync(fileno(file.get())) != 0)) return false;
  return std::fclose(file.release()) == 0;
}

/// Opens a new file in the folder of `target`, under a name that nothing has yet.
File create_beside(const fs::path& target, fs::path& created) {
  std::random_device random;
  for (int attempt = 0; attempt < 100; ++attempt) {
    created = target;
    created += concat(".", random(), ".tmp");
    if (File file{std::fopen(created.c_str(), "wbx")}) return file;
    if (errno != EEXIST) break;
  }
  fail(target, "cannot create a file beside it", errno);
}

}  // namespace

std::string read_file(const fs::path& path) {
  const File file{std::fopen(path.c_str(), "rb")};
  if (!file) fail(path, "cannot open", errno);
  std::string text;
  std::array<char, 1 << 16> block{};
  while (const std::size_t got = std::fread(block.data(), 1, block.size(), file.get())) {
    text.append(block.data(), got);
    if (std::ssize(text) > max_file_bytes) fail(path, "cannot read", EFBIG);
  }
  if (std::ferror(file.get()) != 0) fail(path, "cannot read", errno);
  return text;
}

void write_file(const fs::path& path, std::string_view text) {
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);  // follows links
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    File file{std::fopen(path.c_str(), "wb")};
    if (!file) fail(path, "cannot open for writing", errno);
    if (!write_all(std::move(file), text, false)) fail(path, "cannot write", errno);
    return;
  }
  const fs::path target = fs::exists(status) ? fs::canonical(path) : path;
  fs::path created;
  if (!write_all(create_beside(target, created), text, true)) {
    const int error = errno;
    fs::remove(created, ignored);
    fail(path, "cannot write", error);
  }
  if (fs::exists(status)) fs::permissions(created, status.permissions(), ignored);
  std::error_code error;
  fs::rename(created, target, error);
  if (error) {
    fs::remove(created, ignored);
    fail(path, "cannot replace", error.value());
  }
}

}  // namespace waybill
