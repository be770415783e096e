// A folder in which ranks meet: whose it must be, what is refused in it, what stays.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <latch>

#include "support/rendezvous.h"
#include "support/run_processes.h"
#include "support/run_ranks.h"

namespace waybill {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using test::expect_no_errors;
using test::holds;
using test::MeetingFolder;
using test::Stopwatch;

std::string error_in(const std::string& folder, std::int32_t rank = 0, std::int32_t world = 1,
                     const JobIdentity& job = {}) {
  return error_of([&] { make_file_bootstrap(rank, world, folder, 20, job)->barrier("test"); });
}

std::int64_t num_files(const fs::path& folder) {
  return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
}

TEST(FileRendezvous, TheFolderIsThisUsersAlone) {
  const MeetingFolder parent;
  const std::string open_to_all = parent.path() + "/open";
  ASSERT_EQ(mkdir(open_to_all.c_str(), 0700), 0);
  for (const mode_t mode : {0755U, 0770U, 0701U, 02750U, 0500U}) {
    ASSERT_EQ(chmod(open_to_all.c_str(), mode), 0);
    EXPECT_TRUE(holds(error_in(open_to_all), "expected mode 0700 and owner ")) << mode;
  }
  ASSERT_EQ(chmod(open_to_all.c_str(), 02700), 0);  // below a folder that hands its group on
  EXPECT_EQ(error_in(open_to_all), "");
  if (geteuid() == 0) {  // else there is no way to make a folder of somebody else
    ASSERT_EQ(chmod(open_to_all.c_str(), 0700), 0);
    ASSERT_EQ(chown(open_to_all.c_str(), 65534, 65534), 0);
    EXPECT_TRUE(holds(error_in(open_to_all), "has mode 0700 and owner 65534, expected mode 0700"));
  }
  const std::string made = parent.path() + "/made";
  const auto bootstrap = make_file_bootstrap(0, 1, made);
  EXPECT_EQ(fs::status(made).permissions(), fs::perms::owner_all);
  for (const auto& entry : fs::directory_iterator(made)) {
    EXPECT_EQ(entry.status().permissions(), fs::perms::owner_read | fs::perms::owner_write)
        << entry.path();
  }
}

TEST(FileRendezvous, LinksAndOtherFilesAreNotFollowed) {
  const MeetingFolder parent;
  const std::string real = parent.path() + "/real";
  const std::string link = parent.path() + "/link";
  ASSERT_EQ(mkdir(real.c_str(), 0700), 0);
  ASSERT_EQ(symlink(real.c_str(), link.c_str()), 0);
  for (const std::string& name : {link, link + "/", link + "//"}) {
    EXPECT_TRUE(holds(error_in(name), "cannot open the folder " + link + ": ")) << name;
  }
  const std::string file = parent.path() + "/file";
  std::ofstream(file) << "x";
  EXPECT_TRUE(holds(error_in(file), "Not a directory"));
  EXPECT_TRUE(holds(error_in(parent.path() + "/a/b"), "/a/b: No such file or directory"));
}

/// What rank 0 of 2 says when there is something else in the place of a file of rank 1.
std::string error_beside(const std::string& name, const std::function<int(const char*)>& plant) {
  const MeetingFolder folder;
  EXPECT_EQ(plant((folder.path() + "/" + name).c_str()), 0);
  const Stopwatch watch;
  const std::string error = error_in(folder.path(), 0, 2);
  EXPECT_LT(watch.seconds(), 2);
  return error;
}

TEST(FileRendezvous, OnlyRegularFilesOfThisUserAreRead) {
  const auto fifo = [](const char* name) { return mkfifo(name, 0600); };
  const auto link = [](const char* name) { return symlink("/etc/passwd", name); };
  const auto directory = [](const char* name) { return mkdir(name, 0700); };
  const auto huge = [](const char* name) {
    std::ofstream(name).close();
    return truncate(name, off_t{1} << 40);
  };
  EXPECT_TRUE(holds(error_beside("1.1", fifo), "/1.1 is no regular file of user "));
  EXPECT_TRUE(holds(error_beside("1.1", directory), "/1.1 is no regular file of user "));
  EXPECT_TRUE(holds(error_beside("1.1", link), "cannot open "));
  EXPECT_TRUE(holds(error_beside("1.1", link), "/1.1: Too many levels of symbolic links"));
  EXPECT_TRUE(holds(error_beside("1.1", huge), "has 1099511627776 bytes, expected at most "));
  EXPECT_TRUE(holds(error_beside("job", fifo), "/job is no regular file of user "));
  EXPECT_TRUE(holds(error_beside("job", link), "/job: Too many levels of symbolic links"));
  EXPECT_TRUE(holds(error_beside("end.1", huge), "/end.1 has 1099511627776 bytes"));
  EXPECT_TRUE(holds(error_beside("1.0", link), "1.0 is in "));  // its own: not written through
  if (geteuid() == 0) {
    const auto foreign = [](const char* name) {
      std::ofstream(name).close();
      return chown(name, 65534, 65534);
    };
    EXPECT_TRUE(holds(error_beside("1.1", foreign), "/1.1 is no regular file of user 0"));
  }
}

TEST(FileRendezvous, NothingStaysOfARunThatEnds) {
  const MeetingFolder parent;
  const std::string folder = parent.path() + "/run";
  for (int run = 0; run < 5; ++run) {  // in the same folder: each run cleans up
    std::latch deep(4);
    expect_no_errors(test::run_ranks(4, [&](std::int32_t rank) {
      const auto bootstrap = make_file_bootstrap(rank, 4, folder, 20);
      for (int round = 0; round < 30; ++round) bootstrap->barrier("test");
      EXPECT_LE(num_files(folder), 2 + 4 + 2 * 4 + 4);  // not those of all rounds
      deep.arrive_and_wait();
    }));
    EXPECT_FALSE(fs::exists(folder));
  }
  const MeetingFolder given;  // it was there before: it stays
  expect_no_errors(test::run_ranks(
      2, [&](std::int32_t rank) { make_file_bootstrap(rank, 2, given.path())->barrier("test"); }));
  EXPECT_EQ(num_files(given.path()), 0);
}

TEST(FileRendezvous, NothingStaysOfARunThatFails) {
  const MeetingFolder folder;
  const auto results = test::run_ranks(3, [&](std::int32_t rank) {
    const auto bootstrap = make_file_bootstrap(rank, 3, folder.path(), 20);
    bootstrap->barrier("first");
    if (rank == 1) return bootstrap->fail("no GPU");
    bootstrap->barrier("second");
  });
  EXPECT_TRUE(holds(results[0].text, "second: rank 1 failed: no GPU"));
  EXPECT_TRUE(holds(results[2].text, "second: rank 1 failed: no GPU"));
  EXPECT_EQ(num_files(folder.path()), 0);
}

TEST(FileRendezvous, TheFolderOfARunThatWasKilledIsRefused) {
  const MeetingFolder folder;
  const auto ends = test::run_processes(2, [&](std::int32_t rank) {
    const auto bootstrap = make_file_bootstrap(rank, 2, folder.path(), 20);
    bootstrap->barrier("first");
    (void)std::raise(SIGKILL);
  });
  EXPECT_EQ(ends[0].signal, SIGKILL);
  for (const std::int32_t rank : {0, 1}) {
    EXPECT_TRUE(holds(error_in(folder.path(), rank, 2), concat("rank ", rank, " has been in ")));
  }
}

TEST(FileRendezvous, OtherJobsAndSecondRanksAreRefused) {
  const MeetingFolder folder;
  const JobIdentity job{.id = "a", .secret = {}};
  std::latch refused(1);
  expect_no_errors(test::run_ranks(2, [&](std::int32_t rank) {
    if (rank == 1) refused.wait();
    const auto bootstrap = make_file_bootstrap(rank, 2, folder.path(), 20, job);
    if (rank == 0) {
      EXPECT_TRUE(
          holds(error_in(folder.path(), 1, 2, {.id = "\x1b", .secret = {}}),
                "is of a run with job id = \"a\", world_size = 2, expected job id = \" \""));
      EXPECT_TRUE(holds(error_in(folder.path(), 1, 2), "expected job id = none, world_size = 2"));
      EXPECT_TRUE(
          holds(error_in(folder.path(), 1, 3, job), "expected job id = \"a\", world_size = 3"));
      EXPECT_TRUE(holds(error_in(folder.path(), 0, 2, job), "rank 0 has been in "));
      refused.count_down();
    }
    bootstrap->barrier("test");  // nothing of that has hurt it
  }));
}

}  // namespace
}  // namespace waybill
