#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>
#include <thread>

#include "waybill/core/at.h"
#include "waybill/core/wait.h"
#include "waybill/transport/bootstraps.h"

namespace waybill {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

/// Rank r puts its bytes of round k into the file "k.r": written under another name first, so that
/// whoever sees it sees all of it.
class FileBootstrap final : public Bootstrap {
 public:
  FileBootstrap(std::int32_t rank, std::int32_t world_size, fs::path folder, double timeout_s)
      : Bootstrap(rank, world_size, timeout_s), folder_(std::move(folder)) {
    std::error_code error;
    fs::create_directories(folder_, error);
    if (error) fail("cannot make the folder " + folder_.string() + ": " + error.message());
    if (fs::exists(name_of(1, rank))) {
      fail(name_of(1, rank).string() + " is there already, expected a folder of this run alone");
    }
  }

 private:
  [[noreturn]] static void fail(const std::string& what) {
    throw TransportError("file bootstrap: " + what);
  }

  [[nodiscard]] fs::path name_of(std::uint64_t round, std::int32_t rank) const {
    return folder_ / concat(round, ".", rank);
  }

  void write(std::span<const std::byte> mine) const {
    const fs::path name = name_of(round_, to_int(rank()));
    const fs::path unfinished = name.string() + ".part";
    std::ofstream file(unfinished, std::ios::binary);
    file.write(reinterpret_cast<const char*>(mine.data()),
               static_cast<std::streamsize>(mine.size()));
    file.close();
    if (!file) fail("cannot write " + unfinished.string());
    std::error_code error;
    fs::rename(unfinished, name, error);
    if (error) fail("cannot name " + name.string() + ": " + error.message());
  }

  [[nodiscard]] static std::optional<Bytes> read(const fs::path& name) {
    std::ifstream file(name, std::ios::binary);
    if (!file) return std::nullopt;
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const auto bytes = std::as_bytes(std::span(text));
    return Bytes(bytes.begin(), bytes.end());
  }

  std::vector<Bytes> exchange(std::span<const std::byte> mine,
                              std::string_view operation) override {
    ++round_;
    write(mine);
    const auto start = Clock::now();
    std::vector<Bytes> all;
    for (std::int32_t r = 0; r < world_size(); ++r) {
      std::optional<Bytes> theirs;
      while (!(theirs = read(name_of(round_, r)))) {
        const double waited = std::chrono::duration<double>(Clock::now() - start).count();
        if (waited > timeout_s()) {
          throw Timeout({.operation = std::string(operation),
                         .what = "exchange",
                         .rank = to_int(rank()),
                         .peer = r,
                         .wanted = round_,
                         .seen = last_round_of(r),
                         .seconds = waited});
        }
        check_interrupt();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      all.push_back(std::move(*theirs));
    }
    return all;
  }

  [[nodiscard]] std::uint64_t last_round_of(std::int32_t rank) const {
    std::uint64_t round = round_;
    while (round > 0 && !fs::exists(name_of(round, rank))) --round;
    return round;
  }

  fs::path folder_;
  std::uint64_t round_ = 0;
};

}  // namespace

std::unique_ptr<Bootstrap> make_file_bootstrap(std::int32_t rank, std::int32_t world_size,
                                               const std::string& folder, double timeout_s) {
  require(!folder.empty(), "make_file_bootstrap: folder is empty");
  return std::make_unique<FileBootstrap>(rank, world_size, folder, timeout_s);
}

}  // namespace waybill
