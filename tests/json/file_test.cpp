#include "waybill/json/file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>

#include "json/support.h"

namespace waybill::json_tests {
namespace {

namespace fs = std::filesystem;

TEST(files, read_what_was_written) {
  const TemporaryFolder folder;
  const std::string text("with \0 inside\r\n", 16);
  write_file(folder / "f", text);
  EXPECT_EQ(read_file(folder / "f"), text);
  write_file(folder / "f", "");
  EXPECT_EQ(read_file(folder / "f"), "");
  const std::string long_text(300000, 'x');
  write_file(folder / "f", long_text);
  EXPECT_EQ(read_file(folder / "f"), long_text);
  EXPECT_EQ(folder.num_files(), 1U) << "a temporary file was left";
}

TEST(files, errors_name_the_file_and_the_reason) {
  const TemporaryFolder folder;
  expect_parts(error_of([&] { return read_file(folder / "none"); }),
               {(folder / "none").string(), "No such file"});
  expect_parts(error_of([&] { return read_file(folder / ""); }), {"directory"});
  const auto write_below_nothing = [&] {
    write_file(folder / "none/f", "x");
    return 0;
  };
  expect_parts(error_of(write_below_nothing), {"none/f", "No such file"});
}

TEST(files, what_has_no_end_is_read_to_a_limit) {
  if (!fs::exists("/dev/zero")) GTEST_SKIP() << "no /dev/zero here";
  expect_parts(error_of([] { return read_file("/dev/zero"); }),
               {"/dev/zero", "more than 1 GiB", "anything but a regular file"});
}

TEST(files, a_file_over_the_limit_is_refused_before_it_is_read) {
  const TemporaryFolder folder;
  write_file(folder / "f", "x");
  fs::resize_file(folder / "f", static_cast<std::uintmax_t>(max_file_bytes) + 1);  // takes no room
  expect_parts(error_of([&] { return read_file(folder / "f"); }), {"f: cannot read", "4 GiB"});
}

TEST(files, a_folder_is_not_replaced) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "d");
  EXPECT_THROW(write_file(folder / "d", "x"), IoError);
  EXPECT_TRUE(fs::is_directory(folder / "d"));
  EXPECT_EQ(folder.num_files(), 1U);
}

/// While it lives, files cannot grow beyond `bytes`.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    (void)std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int) = nullptr;
};

TEST(files, a_failed_write_leaves_the_old_file_and_no_other) {
  const TemporaryFolder folder;
  write_file(folder / "f", "old");
  {
    const FileSizeLimit limit(1000);
    const auto write_much = [&] {
      write_file(folder / "f", std::string(100000, 'x'));
      return 0;
    };
    expect_parts(error_of(write_much), {(folder / "f").string(), "cannot write", "too large"});
  }
  EXPECT_EQ(read_file(folder / "f"), "old");
  EXPECT_EQ(folder.num_files(), 1U);
}

TEST(files, what_can_be_written_is_known_before) {
  const TemporaryFolder folder;
  write_file(folder / "f", "old");
  require_writable(folder / "f");
  require_writable(folder / "new");
  require_writable("/dev/null");
  fs::create_symlink(folder / "f", folder / "link");
  require_writable(folder / "link");
  EXPECT_EQ(read_file(folder / "f"), "old");
  EXPECT_EQ(folder.num_files(), 2U);
  fs::create_directory(folder / "d");
  for (const char* name : {"none/f", "d"}) {
    const auto ask = [&] {
      require_writable(folder / name);
      return 0;
    };
    expect_parts(error_of(ask), {(folder / name).string()});
  }
}

TEST(files, a_failing_device_is_an_error) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  EXPECT_THROW(write_file("/dev/full", "x"), IoError);
  EXPECT_TRUE(fs::is_character_file("/dev/full")) << "the device was replaced";
}

TEST(files, links_and_permissions_are_kept) {
  const TemporaryFolder folder;
  write_file(folder / "f", "old");
  fs::permissions(folder / "f", fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink(folder / "f", folder / "link");
  write_file(folder / "link", "new");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(read_file(folder / "f"), "new");
  EXPECT_EQ(fs::status(folder / "f").permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

}  // namespace
}  // namespace waybill::json_tests
