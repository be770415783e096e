#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/test_data.h"
#include "waybill/core/error.h"
#include "waybill/core/host_tensor.h"
#include "waybill/core/index_array.h"
#include "waybill/json/plan_json.h"
#include "waybill/routing/compute_metadata.h"

// Reading the golden records: one line of a .jsonl file is a Case; its Record is parsed by the
// test that uses it.
namespace waybill::golden {

using Json = nlohmann::json;

struct Case {
  std::string name;  ///< as gtest wants it: letters, digits, underscores; unique in its function
  std::string line;
};

inline std::string folder() { return test::test_data("golden/").string(); }

inline Json index() {
  std::ifstream file(folder() + "index.json");
  if (!file) throw IoError("cannot open " + folder() + "index.json");
  return Json::parse(file);
}

/// The functions that have a suite.
inline std::set<std::string>& functions_with_suite() {
  static std::set<std::string> functions;
  return functions;
}

/// The value of "case" without parsing the record, which may be long.
inline std::string case_name(const std::string& line) {
  const std::string key = "\"case\":\"";
  const std::size_t begin = line.find(key) + key.size();
  std::string name = line.substr(begin, line.find('"', begin) - begin);
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

/// All cases of a function, in the order of the file.
inline std::vector<Case> cases(const std::string& function) {
  const std::string file_name = index().at(function).at("file");
  std::ifstream file(folder() + file_name);
  if (!file) throw IoError("cannot open " + folder() + file_name);
  std::vector<Case> result;
  std::map<std::string, int> seen;
  for (std::string line; std::getline(file, line);) {
    std::string name = case_name(line);
    const int count = ++seen[name];
    if (count > 1) name += "_again_" + std::to_string(count);
    result.push_back({std::move(name), std::move(line)});
  }
  return result;
}

/// For WAYBILL_GOLDEN: remembers that the function is tested.
inline std::vector<Case> suite_cases(const std::string& function) {
  functions_with_suite().insert(function);
  return cases(function);
}

/// Appends the numbers of nested lists, in order.
template <class Number>
void add_leaves(const Json& data, std::vector<Number>& leaves) {
  if (data.is_array()) {
    for (const Json& item : data) add_leaves(item, leaves);
  } else {
    leaves.push_back(data.get<Number>());
  }
}

inline Shape shape(const Json& json) {
  const auto extents = json.at("shape").get<std::vector<std::int64_t>>();
  return Shape(std::span(extents));
}

inline IndexArray array(const Json& json) {
  std::vector<std::int64_t> values;
  add_leaves(json.at("data"), values);
  const IndexArray wide(shape(json), std::move(values));
  return wide.to(dtype_from_name(json.at("dtype").get<std::string>()));
}

/// One array, or {"ragged": [...]}.
inline std::vector<IndexArray> arrays(const Json& json) {
  if (!json.contains("ragged")) return {array(json)};
  std::vector<IndexArray> result;
  for (const Json& item : json.at("ragged")) result.push_back(array(item));
  return result;
}

inline HostTensor tensor(const Json& json) {
  HostTensor result(DType::float32, shape(json));
  std::vector<float> leaves;
  add_leaves(json.at("data"), leaves);
  const auto elements = result.as<float>();
  if (json.at("dtype") != "float32" || leaves.size() != elements.size()) {
    throw IoError("a tensor of the record does not have its shape and dtype");
  }
  std::copy(leaves.begin(), leaves.end(), elements.begin());
  return result;
}

/// Through the library's own reader.
inline Metadata metadata(const Json& json) { return metadata_from_json(json.dump(), "record"); }

/// The mapping of the record; `tokens_key` since its name differs between functions.
inline KvMapping kv_mapping(const Json& inputs, const char* tokens_key) {
  return {array(inputs.at("kv_to_q_mapping")), array(inputs.at("kv_to_q_rank")),
          array(inputs.at("kv_context_size")), array(inputs.at("q_to_num_kv_seq")),
          array(inputs.at(tokens_key))};
}

inline std::string text_of(const std::vector<IndexArray>& arrays) {
  std::string text;
  for (const IndexArray& item : arrays) text += to_string(item) + "; ";
  return text;
}

/// Same shape, dtype and elements.
inline void expect_equal(const char* what, const IndexArray& got, const IndexArray& expected) {
  EXPECT_EQ(got.shape(), expected.shape()) << what;
  EXPECT_EQ(got.dtype(), expected.dtype()) << what;
  EXPECT_TRUE(got == expected) << what << "\n got      " << to_string(got) << "\n expected "
                               << to_string(expected);
}

inline void expect_equal(const std::string& what, const std::optional<IndexArray>& got,
                         const std::optional<IndexArray>& expected) {
  ASSERT_EQ(got.has_value(), expected.has_value()) << what;
  if (got) expect_equal(what.c_str(), *got, *expected);
}

/// Field by field, so that a failure names the field; and as a whole, so that none is forgotten.
inline void expect_equal(const std::string& what, const Metadata& got, const Metadata& expected) {
  expect_equal((what + ".dst_rank").c_str(), got.dst_rank, expected.dst_rank);
  expect_equal((what + ".dst_offset").c_str(), got.dst_offset, expected.dst_offset);
  expect_equal((what + ".seq_len").c_str(), got.seq_len, expected.seq_len);
  expect_equal((what + ".num_recv_tokens").c_str(), got.num_recv_tokens, expected.num_recv_tokens);
  expect_equal(what + ".seq_recv_mask", got.seq_recv_mask, expected.seq_recv_mask);
  expect_equal(what + ".recv_seq_lens", got.recv_seq_lens, expected.recv_seq_lens);
  expect_equal(what + ".num_seqs", got.num_seqs, expected.num_seqs);
  EXPECT_EQ(got.world_size, expected.world_size) << what;
  EXPECT_EQ(got.normalized, expected.normalized) << what;
  EXPECT_EQ(got.num_total_recv_tokens, expected.num_total_recv_tokens) << what;
  EXPECT_TRUE(got == expected) << what;
}

/// Against cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv and, where recorded,
/// num_local_seqs_recv.
inline void expect_equal(const AttnLayout& got, const Json& expected) {
  EXPECT_EQ(got.cu_seqlens_q, arrays(expected.at("cu_seqlens_q"))) << text_of(got.cu_seqlens_q);
  EXPECT_EQ(got.cu_seqlens_kv, arrays(expected.at("cu_seqlens_kv"))) << text_of(got.cu_seqlens_kv);
  expect_equal("max_seqlen_q", got.max_seqlen_q, array(expected.at("max_seqlen_q")));
  expect_equal("max_seqlen_kv", got.max_seqlen_kv, array(expected.at("max_seqlen_kv")));
  EXPECT_TRUE(got.kv_row.empty());
  EXPECT_TRUE(got.kv_len.empty());
  if (expected.contains("num_local_seqs_recv")) {
    expect_equal("num_local_seqs_recv", got.num_local_seqs_recv,
                 array(expected.at("num_local_seqs_recv")));
  }
}

inline std::string name_of(const testing::TestParamInfo<Case>& test) { return test.param.name; }

/// A test's view of its record.
class GoldenTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override { record_ = Json::parse(GetParam().line); }
  [[nodiscard]] const Json& in(const char* key) const { return record_.at("inputs").at(key); }
  [[nodiscard]] const Json& out(const char* key) const { return record_.at("outputs").at(key); }
  [[nodiscard]] const Json& inputs() const { return record_.at("inputs"); }
  [[nodiscard]] const Json& outputs() const { return record_.at("outputs"); }

 private:
  Json record_;
};

}  // namespace waybill::golden

/// A suite for the records of `file_key`; the test of a case is original/SUITE.record/CASE.
#define WAYBILL_GOLDEN(suite, file_key)                                               \
  class suite : public waybill::golden::GoldenTest {};                                \
  INSTANTIATE_TEST_SUITE_P(original, suite,                                           \
                           testing::ValuesIn(waybill::golden::suite_cases(file_key)), \
                           waybill::golden::name_of);                                 \
  TEST_P(suite, record)
