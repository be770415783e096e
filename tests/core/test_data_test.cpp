#include "support/test_data.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <initializer_list>

namespace waybill {
namespace {

namespace fs = std::filesystem;
using test::find_tests_folder;

/// A copy of the project as it may lie anywhere, gone with the object.
class Project {
 public:
  Project() {
    fs::create_directories(root / "tests" / "golden");
    fs::create_directories(root / "build" / "cuda" / "tests");
    std::ofstream(root / "tests" / "golden" / "index.json") << "{}";
  }
  ~Project() { fs::remove_all(root); }
  Project(const Project&) = delete;
  Project& operator=(const Project&) = delete;

  const fs::path root = fs::temp_directory_path() / concat("waybill_test_data_", getpid());
};

void expect_error(const std::optional<std::string>& given, const std::vector<fs::path>& starts,
                  std::initializer_list<std::string> parts) {
  try {
    (void)find_tests_folder(given, starts);
    FAIL() << "found";
  } catch (const IoError& error) {
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << error.what();
    }
  }
}

TEST(TestData, lies_above_the_program_or_the_current_folder) {
  const Project project;
  const fs::path tests = project.root / "tests";
  EXPECT_EQ(find_tests_folder(std::nullopt, {project.root / "build" / "cuda" / "tests"}), tests);
  EXPECT_EQ(find_tests_folder(std::nullopt, {"/usr/bin", project.root}), tests);
}

TEST(TestData, the_environment_comes_first) {
  const Project project;
  EXPECT_EQ(find_tests_folder((project.root / "tests").string(), {"/usr/bin"}),
            project.root / "tests");
  expect_error("/nowhere", {project.root}, {"WAYBILL_TEST_DATA", "/nowhere", "golden/index.json"});
}

TEST(TestData, says_where_it_looked_and_what_to_set) {
  expect_error(std::nullopt, {"/usr/bin", "/usr/lib"},
               {"/usr/bin", "/usr/lib", "WAYBILL_TEST_DATA"});
}

TEST(TestData, is_found_by_this_program) {
  EXPECT_TRUE(fs::is_regular_file(test::project_file("CMakeLists.txt")));
}

}  // namespace
}  // namespace waybill
