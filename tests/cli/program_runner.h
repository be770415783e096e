#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <sstream>
#include <string>

namespace waybill::test {

inline std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

/// What one run of the program left behind.
struct ProgramResult {
  int exit_code = -1;
  std::string out;
  std::string err;
};

/// Whether all parts are there; else the test fails, with what is missing.
inline bool holds(const std::string& text, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts) {
    if (text.find(part) != std::string::npos) continue;
    ADD_FAILURE() << "no \"" << part << "\" in:\n" << text;
    return false;
  }
  return true;
}

/// Sentences in one line again.
inline std::string unwrapped(std::string text) {
  const std::string cut = "\n    ";
  for (std::size_t i = text.find(cut); i != std::string::npos; i = text.find(cut, i))
    text.replace(i, cut.size(), " ");
  return text;
}

/// A folder of its own for each test, in which the built program runs.
class ProgramTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::temp_directory_path() /
              (std::string("waybill_") + info->test_suite_name() + "_" + info->name() + "_" +
               std::to_string(::getpid()));
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::filesystem::path path(const std::string& name) const { return folder_ / name; }

  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(path(name).parent_path());
    std::ofstream(path(name), std::ios::binary) << text;
  }

  /// Runs `waybill ARGUMENTS`, which a shell reads; `input` is its standard input.
  [[nodiscard]] ProgramResult run(const std::string& arguments, const std::string& input = "",
                                  const std::string& after = "") const {
    write("stdin", input);
    const std::string command = "cd '" + folder_.string() +
                                "' && LC_ALL=C.UTF-8 '" WAYBILL_CLI "' " + arguments +
                                " <stdin 2>stderr" + (after.empty() ? " >stdout" : after);
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text_of(path("stdout")),
            text_of(path("stderr"))};
  }

  std::filesystem::path folder_;
};

/// Success for the exit code and a line `error: ...` that holds every part.
inline ::testing::AssertionResult fails(const ProgramResult& result, int exit_code,
                                        std::initializer_list<std::string> parts) {
  if (result.exit_code != exit_code)
    return ::testing::AssertionFailure()
           << "exit " << result.exit_code << ", expected " << exit_code << "\n"
           << result.err;
  if (result.err.rfind("error: ", 0) != 0 && result.err.find("\nerror: ") == std::string::npos)
    return ::testing::AssertionFailure() << "no error line in: " << result.err;
  for (const std::string& part : parts) {
    if (result.err.find(part) == std::string::npos)
      return ::testing::AssertionFailure() << "no \"" << part << "\" in: " << result.err;
  }
  return ::testing::AssertionSuccess();
}

}  // namespace waybill::test
