#include <filesystem>

#include "golden/record.h"

namespace waybill::golden {
namespace {

TEST(golden_records, every_function_of_the_index_has_a_suite) {
  std::set<std::string> in_index;
  const Json all = index();
  for (const auto& [function, entry] : all.items()) in_index.insert(function);
  EXPECT_EQ(functions_with_suite(), in_index);
}

TEST(golden_records, files_have_as_many_cases_and_bytes_as_the_index_says) {
  const Json all = index();
  for (const auto& [function, entry] : all.items()) {
    const std::string path = folder() + entry.at("file").get<std::string>();
    EXPECT_EQ(cases(function).size(), entry.at("cases").get<std::size_t>()) << function;
    EXPECT_EQ(std::filesystem::file_size(path), entry.at("bytes").get<std::uintmax_t>()) << path;
  }
}

TEST(golden_records, no_file_is_outside_the_index) {
  std::size_t num_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder())) {
    if (entry.path().extension() == ".jsonl") ++num_files;
  }
  EXPECT_EQ(num_files, index().size());
}

TEST(golden_records, belong_to_the_function_of_their_file) {
  const Json all = index();
  for (const auto& [function, entry] : all.items()) {
    for (const Case& one : cases(function)) {
      ASSERT_EQ(Json::parse(one.line).at("fn"), function) << one.name;
    }
  }
}

}  // namespace
}  // namespace waybill::golden
