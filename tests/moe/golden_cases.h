#pragma once

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "moe/expert_case.h"
#include "support/test_data.h"

// Reading the cases of tests/golden/expert_parallel.

namespace waybill::test {

using Json = nlohmann::json;

inline std::vector<std::filesystem::path> case_files() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry :
       std::filesystem::directory_iterator(test_data("golden/expert_parallel"))) {
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

inline EPConfig read_config(const Json& json) {
  EPConfig config;
  config.max_tokens = json.at("max_tokens");
  config.hidden = json.at("hidden");
  config.topk = json.at("topk");
  config.num_experts = json.at("num_experts");
  config.world_size = json.at("world_size");
  config.local_world_size = json.at("local_world_size");
  config.token_dtype = dtype_from_name(json.at("dtype").get<std::string>());
  config.weight_dtype = dtype_from_name(json.value("weight_dtype", "float32"));
  return config;
}

inline void append_numbers(const Json& json, std::vector<double>& numbers) {
  if (json.is_array()) {
    for (const Json& part : json) append_numbers(part, numbers);
  } else {
    numbers.push_back(json.get<double>());
  }
}

inline std::vector<double> numbers_of(const Json& json) {
  std::vector<double> numbers;
  append_numbers(json, numbers);
  return numbers;
}

/// [rows][columns] numbers; rows of another length make a tensor of that width.
inline HostTensor read_matrix(const Json& json, DType dtype, std::int64_t columns) {
  const auto rows = static_cast<std::int64_t>(json.size());
  if (rows > 0) columns = static_cast<std::int64_t>(json.at(0).size());
  HostTensor result(dtype, {rows, columns});
  const std::vector<double> numbers = numbers_of(json);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (dtype == DType::int32) {
      result.as<std::int32_t>()[i] = static_cast<std::int32_t>(numbers[i]);
    } else if (dtype == DType::int64) {
      result.as<std::int64_t>()[i] = static_cast<std::int64_t>(numbers[i]);
    } else {
      set_float(result, static_cast<std::int64_t>(i), static_cast<float>(numbers[i]));
    }
  }
  return result;
}

inline ExpertCase read_inputs(const EPConfig& config, const Json& inputs, DType id_dtype) {
  ExpertCase result;
  result.config = config;
  for (const Json& rows : inputs.at("tokens")) {
    result.tokens.push_back(read_matrix(rows, config.token_dtype, config.hidden));
  }
  for (const Json& rows : inputs.at("exp_indices")) {
    result.ids.push_back(read_matrix(rows, id_dtype, config.topk));
  }
  if (!inputs.at("weights").is_null()) {
    for (const Json& rows : inputs.at("weights")) {
      result.weights.push_back(read_matrix(rows, config.weight_dtype, config.topk));
    }
  }
  const Json positions = inputs.value("full_scatter_indices", Json());
  if (!positions.is_null()) result.positions = read_matrix(positions, id_dtype, config.topk);
  return result;
}

}  // namespace waybill::test
