#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <random>
#include <string>
#include <string_view>

#include "waybill/core/error.h"
#include "waybill/routing/qkv_plan.h"

namespace waybill::json_tests {

/// The text of the IoError that `call` throws.
template <class Call>
std::string error_of(Call&& call) {
  try {
    (void)call();
  } catch (const IoError& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return "";
  }
  ADD_FAILURE() << "did not throw";
  return "";
}

/// The text must hold every one of these parts.
inline void expect_parts(const std::string& text, std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "\"" << part << "\" is not in: " << text;
  }
}

/// `text` with the first `what` replaced; the test is wrong when there is none.
inline std::string replaced(std::string text, std::string_view what, std::string_view with) {
  const std::size_t at = text.find(what);
  EXPECT_NE(at, std::string::npos) << "no \"" << what << "\" in " << text;
  if (at != std::string::npos) text.replace(at, what.size(), with);
  return text;
}

/// A folder of its own, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder()
      : path_(std::filesystem::temp_directory_path() /
              concat("waybill_test_", std::random_device{}())) {
    std::filesystem::create_directory(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  [[nodiscard]] std::filesystem::path operator/(std::string_view name) const {
    return path_ / name;
  }
  [[nodiscard]] std::size_t num_files() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::filesystem::path path_;
};

/// Three ranks, five shards, two documents; the first document lies on two ranks.
inline QkvPlan small_plan() {
  QkvPlan plan;
  plan.world_size = 3;
  plan.kv_layout = KvLayout::per_rank;
  plan.rank_shard_offsets = {0, 2, 4, 5};
  plan.shard_len = {4, 6, 3, 5, 8};
  plan.q_dst = {0, 1, 2, 0, 1};
  plan.doc_shard_offsets = {0, 3, 5};
  plan.doc_shards = {0, 1, 2, 3, 4};
  return plan;
}

}  // namespace waybill::json_tests
