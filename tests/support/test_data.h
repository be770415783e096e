#pragma once

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "waybill/core/error.h"

// Where the data of the tests are. No path of the machine that compiled is in the programs: they
// may be carried to another one, together with a copy of the project.

namespace waybill::test {

/// The folder `tests` of the project: the one that is given, else the first that has the data, in
/// the folders above each start. @throws IoError naming where it looked
inline std::filesystem::path find_tests_folder(const std::optional<std::string>& given,
                                               const std::vector<std::filesystem::path>& starts) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const auto has_data = [&](const fs::path& folder) {
    return fs::is_regular_file(folder / "golden" / "index.json", ignored);
  };
  if (given) {
    if (has_data(*given)) return *given;
    throw IoError(
        concat("WAYBILL_TEST_DATA = ", *given,
               ", expected the folder tests of the project: it has no golden/index.json"));
  }
  std::string looked;
  for (const fs::path& start : starts) {
    for (fs::path folder = start;; folder = folder.parent_path()) {
      if (has_data(folder / "tests")) return folder / "tests";
      if (folder == folder.parent_path()) break;
    }
    looked += concat(looked.empty() ? "" : " and ", start.string());
  }
  throw IoError(concat("the data of the tests are not there: no tests/golden/index.json in ",
                       looked,
                       " or above; set WAYBILL_TEST_DATA to the folder tests of the project"));
}

/// A file or folder below `tests`, such as "golden/index.json". Looked for from the program, then
/// from the current folder.
inline std::filesystem::path test_data(const std::string& name) {
  namespace fs = std::filesystem;
  static const fs::path folder = [] {
    std::error_code ignored;
    const char* const given = std::getenv("WAYBILL_TEST_DATA");
    return find_tests_folder(
        given != nullptr ? std::optional<std::string>(given) : std::nullopt,
        {fs::read_symlink("/proc/self/exe", ignored).parent_path(), fs::current_path(ignored)});
  }();
  return folder / name;
}

/// A file of the project, such as "docs/formats.md".
inline std::filesystem::path project_file(const std::string& name) {
  return test_data("..").lexically_normal() / name;
}

}  // namespace waybill::test
