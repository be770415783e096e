#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <numeric>

#include "moe/golden_cases.h"
#include "support/expect_error.h"

// The cases of tests/golden/expert_parallel: every field of every step.

namespace waybill::test {
namespace {

template <class Number>
std::vector<double> widened(const std::vector<Number>& values) {
  return {values.begin(), values.end()};
}
std::vector<double> widened(const IndexArray& array) { return widened(array.to_vector()); }
std::vector<double> widened(const HostTensor& tensor) {
  std::vector<double> values;
  const auto count = tensor.size_bytes() / dtype_bytes(tensor.dtype());
  for (std::int64_t i = 0; i < count; ++i) values.push_back(float_at(tensor, i));
  return values;
}

/// Compares a table [nodes, max_tokens, columns] with one that holds each node's tokens only.
void expect_cut_table(const IndexArray& table, const Json& expected, bool by_node) {
  const std::int64_t columns = table.dim(-1);
  for (std::size_t node = 0; node < (by_node ? expected.size() : 1); ++node) {
    const std::vector<double> wanted = numbers_of(by_node ? expected.at(node) : expected);
    const std::int64_t first =
        by_node ? static_cast<std::int64_t>(node) * table.dim(1) * columns : 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      ASSERT_EQ(table.flat_at(first + static_cast<std::int64_t>(i)), wanted[i])
          << "node " << node << ", entry " << i;
    }
  }
}

void expect_send_requests(const IndexArray& table, const Json& expected) {
  IndexArray wanted = IndexArray::full(table.shape(), -1);
  for (std::size_t node = 0; node < expected.size(); ++node) {
    for (const Json& run : expected.at(node)) {
      const auto plane = static_cast<std::int64_t>(node) * 2 * table.dim(2);
      const auto slot = plane + run.at(0).get<std::int64_t>();
      wanted.i64()[slot] = run.at(1);
      wanted.i64()[slot + table.dim(2)] = run.at(2);
    }
  }
  EXPECT_EQ(table.to_vector(), wanted.to_vector());
}

void expect_layout(const EPAll2AllLayoutDesc& layout, const Json& expected) {
  EXPECT_EQ(layout.num_dispatch_token_cur_rank, expected.at("num_dispatch_token_cur_rank"));
  expect_cut_table(layout.token_dst_scatter_idx, expected.at("token_dst_scatter_idx"), true);
  const Json& ids = expected.at("topk_indices_tensor");
  if (!ids.is_null()) {
    expect_cut_table(layout.topk_indices_tensor, ids, layout.topk_indices_tensor.ndim() == 3);
  }
  const Json& requests = expected.at("send_reqs_recv");
  ASSERT_EQ(layout.send_reqs_recv_tensor.has_value(), !requests.is_null());
  if (!requests.is_null()) expect_send_requests(*layout.send_reqs_recv_tensor, requests);
  const Json& primary_rows = expected.at("skipped_token_mapping_indices");
  ASSERT_EQ(layout.skipped_token_mapping_indices.has_value(), !primary_rows.is_null());
  if (primary_rows.is_null()) return;
  EXPECT_EQ(widened(*layout.skipped_token_mapping_indices), numbers_of(primary_rows));
  EXPECT_EQ(widened(*layout.skipped_token_topk_mapping_indices),
            numbers_of(expected.at("skipped_token_topk_mapping_indices")));
}

void expect_rows(const ExpertDispatch& dispatch, const Json& expected) {
  EXPECT_EQ(widened(dispatch.rows.num_input_tokens),
            numbers_of(expected.at("num_input_tokens_per_rank")));
  EXPECT_EQ(widened(dispatch.rows.num_recv_rows),
            numbers_of(expected.at("num_recv_tokens_per_rank")));
  EXPECT_EQ(widened(dispatch.rows.splits), numbers_of(expected.at("splits")));
  EXPECT_EQ(widened(dispatch.rows.segment_offsets),
            numbers_of(expected.at("recv_buf_offset_per_expert")));
  for (std::size_t r = 0; r < dispatch.recv_tokens.size(); ++r) {
    SCOPED_TRACE(concat("rank ", r));
    EXPECT_EQ(widened(dispatch.recv_tokens[r]), numbers_of(expected.at("recv_tokens").at(r)));
    EXPECT_EQ(widened(dispatch.recv_origin[r]), numbers_of(expected.at("recv_origin").at(r)));
    const Json& weights = expected.at("recv_weights");
    ASSERT_EQ(dispatch.recv_weights.empty(), weights.is_null());
    if (!weights.is_null()) {
      EXPECT_EQ(widened(dispatch.recv_weights[r]), numbers_of(weights.at(r)));
    }
    expect_layout(dispatch.layout[r], expected.at("layout").at(r));
  }
}

void expect_traffic(const ExpertTraffic& traffic, const Json& expected) {
  EXPECT_EQ(widened(traffic.inter_node_tokens), numbers_of(expected.at("inter_node_tokens")));
  EXPECT_EQ(widened(traffic.inter_node_ranges), numbers_of(expected.at("inter_node_ranges")));
  EXPECT_EQ(widened(traffic.rows_per_rank_pair), numbers_of(expected.at("rows_per_rank_pair")));
  EXPECT_EQ(widened(traffic.unique_tokens_per_rank_pair),
            numbers_of(expected.at("unique_tokens_per_rank_pair")));
}

/// Toy experts on what arrived: y = scale x + bias, then perhaps y = weight y; rounded each time.
std::vector<HostTensor> run_experts(const ExpertDispatch& dispatch, const Json& experts) {
  std::vector<HostTensor> outputs;
  const std::int64_t hidden = dispatch.config.hidden;
  for (std::size_t r = 0; r < dispatch.recv_tokens.size(); ++r) {
    HostTensor output(dispatch.recv_tokens[r]);
    for (std::int64_t row = 0; row < output.shape()[0]; ++row) {
      const auto origin = [&](std::int64_t field) {
        return dispatch.recv_origin[r].at({row, field});
      };
      const std::int32_t expert =
          dispatch.ids[origin(0)][origin(1) * dispatch.config.topk + origin(2)];
      const float scale = experts.at("scale").at(expert);
      const float bias = experts.at("bias").at(expert);
      for (std::int64_t i = row * hidden; i < (row + 1) * hidden; ++i) {
        set_float(output, i, scale * float_at(output, i) + bias);
        if (!experts.at("apply_weight").get<bool>()) continue;
        set_float(output, i, float_at(dispatch.recv_weights[r], row) * float_at(output, i));
      }
    }
    outputs.push_back(std::move(output));
  }
  return outputs;
}

void expect_combined(const ExpertDispatch& dispatch, const std::vector<HostTensor>& outputs,
                     const Json& expected, bool local_combine) {
  if (expected.is_null()) return;
  const auto combined =
      simulate_expert_combine(dispatch, views_of(outputs), {.local_combine = local_combine});
  for (std::size_t r = 0; r < combined.size(); ++r) {
    EXPECT_EQ(widened(combined[r]), numbers_of(expected.at(r)))
        << "rank " << r << ", local_combine " << local_combine;
  }
}

class GoldenCase : public testing::TestWithParam<std::filesystem::path> {
 protected:
  void SetUp() override {
    std::ifstream file(GetParam());
    json_ = Json::parse(file);
  }
  Json json_;
};

TEST_P(GoldenCase, SimulationGivesEveryField) {
  const EPConfig config = read_config(json_.at("config"));
  if (json_.value("expect_error", false)) {
    EXPECT_TRUE(rejects(
        [&] {
          config.check("EPConfig");
          for (const Json& step : json_.at("steps")) {
            (void)read_inputs(config, step.at("inputs"), DType::int32).dispatch();
          }
        },
        {}));
    return;
  }
  std::int64_t output_rows = config.max_tokens * config.topk * 2;
  for (const Json& step : json_.at("steps")) {
    const Json& expected = step.at("expected");
    for (const DType id_dtype : {DType::int32, DType::int64}) {
      const auto dispatch = read_inputs(config, step.at("inputs"), id_dtype).dispatch();
      expect_rows(dispatch, expected);
      expect_traffic(dispatch.traffic, expected.at("traffic"));
      const auto outputs = run_experts(dispatch, step.at("expert_fn"));
      expect_combined(dispatch, outputs, expected.at("combine"), false);
      expect_combined(dispatch, outputs, expected.at("combine_local"), true);
      if (id_dtype == DType::int64) continue;
      EXPECT_EQ(output_rows, expected.at("output_rows_before"));
      output_rows = grown_output_rows(output_rows, dispatch.rows.largest_recv_rows);
      EXPECT_EQ(output_rows, expected.at("output_rows_after"));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Files, GoldenCase, testing::ValuesIn(case_files()),
                         [](const auto& file) { return file.param.stem().string(); });

TEST(GoldenCases, AreAllThere) { EXPECT_EQ(case_files().size(), 38U); }

}  // namespace
}  // namespace waybill::test
