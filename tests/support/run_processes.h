#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "waybill/core/error.h"

namespace waybill::test {

/// How a rank's process ended.
struct ProcessEnd {
  pid_t process = 0;
  int signal = 0;     ///< that killed it; 0: none
  int exit_code = 0;  ///< 0: the body returned, 1: it threw, or a check of the test failed
  std::string text;   ///< what it threw
};

/// A folder for a file bootstrap, gone with the object.
class MeetingFolder {
 public:
  MeetingFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "waybill_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make " + pattern);
    path_ = pattern;
  }
  MeetingFolder(const MeetingFolder&) = delete;
  MeetingFolder& operator=(const MeetingFolder&) = delete;
  ~MeetingFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// The body of a child process: it never comes back into the test program.
[[noreturn]] inline void run_child(const std::function<void()>& body, int result_pipe) {
  std::string text;
  try {
    body();
  } catch (const std::exception& error) {
    text = error.what();
    if (text.empty()) text = "an error without a text";
  }
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t n = write(result_pipe, text.data() + done, text.size() - done);
    if (n < 0) break;
    done += static_cast<std::size_t>(n);
  }
  const bool failed = !text.empty() || testing::Test::HasFailure();
  std::fflush(nullptr);  // _exit writes nothing
  _exit(failed ? 1 : 0);
}

using Clock = std::chrono::steady_clock;
inline constexpr std::chrono::seconds longest_test{90};

/// What the child writes until it ends; says so, and kills it, when that takes too long.
inline std::string read_all(int descriptor, pid_t child, Clock::time_point deadline) {
  std::string text;
  char part[4096];
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd wanted{descriptor, POLLIN, 0};
    const int ready = poll(&wanted, 1, static_cast<int>(std::max<std::int64_t>(0, left.count())));
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) {
      (void)kill(child, SIGKILL);
      return text + " (still running after " + std::to_string(longest_test.count()) + " s: killed)";
    }
    const ssize_t n = read(descriptor, part, sizeof(part));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return text;
    text.append(part, static_cast<std::size_t>(n));
  }
}

/// Runs body(rank) in one child process per rank and waits for all. The calling process must have
/// no other threads.
inline std::vector<ProcessEnd> run_processes(std::int32_t world_size,
                                             const std::function<void(std::int32_t)>& body) {
  std::vector<ProcessEnd> ends(static_cast<std::size_t>(world_size));
  std::vector<int> results;
  const auto deadline = Clock::now() + longest_test;
  std::fflush(nullptr);
  for (std::int32_t r = 0; r < world_size; ++r) {
    int ends_of_pipe[2];
    if (pipe(ends_of_pipe) != 0) throw std::runtime_error("pipe failed");
    const pid_t child = fork();
    if (child < 0) throw std::runtime_error("fork failed");
    if (child == 0) run_child([&] { body(r); }, ends_of_pipe[1]);
    close(ends_of_pipe[1]);
    results.push_back(ends_of_pipe[0]);
    ends[static_cast<std::size_t>(r)].process = child;
  }
  for (std::size_t r = 0; r < ends.size(); ++r) {
    ends[r].text = read_all(results[r], ends[r].process, deadline);
    close(results[r]);
    int status = 0;
    while (waitpid(ends[r].process, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFSIGNALED(status)) ends[r].signal = WTERMSIG(status);
    if (WIFEXITED(status)) ends[r].exit_code = WEXITSTATUS(status);
  }
  return ends;
}

inline void expect_no_errors(const std::vector<ProcessEnd>& ends) {
  for (std::size_t r = 0; r < ends.size(); ++r) {
    EXPECT_EQ(ends[r].text, "") << "rank " << r;
    EXPECT_EQ(ends[r].exit_code, 0) << "rank " << r;
    EXPECT_EQ(ends[r].signal, 0) << "rank " << r;
  }
}

}  // namespace waybill::test
