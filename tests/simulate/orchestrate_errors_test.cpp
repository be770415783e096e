#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "simulate_support.h"
#include "support/expect_error.h"
#include "waybill/simulate/orchestrate.h"

// Every refusal names what went wrong and leaves the output as it was, byte for byte.

namespace waybill {
namespace {

using test::bytes_of;
using test::filled_tensor;
using test::random_tensor;
using test::rejects;

constexpr std::int64_t huge = std::numeric_limits<std::int64_t>::max();

/// Three ranks, source [3, 10, 2], output [3, 12, 2]: a job that is right until a test spoils it.
/// The first shard of every rank is fine, so that a copy made too early would show.
struct Job {
  explicit Job(bool copies) : with_copies(copies) {
    metadata.seq_len = IndexArray::matrix({{2, 3, 1}, {4, 1, 2}, {1, 1, 5}});
    if (copies) {
      metadata.dst_rank = IndexArray::cube(
          {{{1, -1}, {2, 0}, {-1, -1}}, {{0, -1}, {2, 1}, {2, -1}}, {{0, -1}, {1, -1}, {2, 1}}});
      metadata.dst_offset = IndexArray::cube(
          {{{0, 0}, {0, 0}, {0, 0}}, {{3, 0}, {3, 2}, {4, 0}}, {{7, 0}, {3, 0}, {6, 4}}});
    } else {
      metadata.dst_rank = IndexArray::matrix({{1, 2, -1}, {0, 2, 1}, {0, 1, 2}});
      metadata.dst_offset = IndexArray::matrix({{0, 0, 0}, {0, 3, 2}, {4, 4, 4}});
    }
  }

  std::int64_t& len(std::int64_t w, std::int64_t s) {
    return metadata.seq_len.i64()[static_cast<std::size_t>(w * 3 + s)];
  }
  /// Of the last copy.
  std::int64_t& rank(std::int64_t w, std::int64_t s) { return last_copy(metadata.dst_rank, w, s); }
  std::int64_t& offset(std::int64_t w, std::int64_t s) {
    return last_copy(metadata.dst_offset, w, s);
  }

  void run() { orchestrate_simulate(source.view(), output.view(), metadata, options); }

  void expect_rejected(std::initializer_list<std::string_view> parts) {
    const auto before = bytes_of(output);
    EXPECT_TRUE(rejects([&] { run(); }, parts));
    EXPECT_EQ(bytes_of(output), before);
  }

  bool with_copies;
  Metadata metadata;
  HostTensor source = random_tensor(DType::float32, {3, 10, 2}, 1);
  HostTensor output = filled_tensor(DType::float32, {3, 12, 2}, 0xAB);
  SimulateOptions options;

 private:
  std::int64_t& last_copy(IndexArray& array, std::int64_t w, std::int64_t s) const {
    const std::int64_t entry = w * 3 + s;
    return array.i64()[static_cast<std::size_t>(with_copies ? entry * 2 + 1 : entry)];
  }
};

/// The same for one and for several destinations.
class orchestrate_errors : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(destinations, orchestrate_errors, testing::Values(false, true),
                         [](const auto& param) { return param.param ? "several" : "one"; });

TEST_P(orchestrate_errors, the_job_is_right_at_first) {
  Job job(GetParam());
  const auto before = bytes_of(job.output);
  job.run();
  EXPECT_NE(bytes_of(job.output), before);
}

TEST_P(orchestrate_errors, rows_past_the_end_of_the_output) {
  Job job(GetParam());
  job.rank(2, 2) = 1;
  job.offset(2, 2) = 8;
  job.expect_rejected({"orchestrate_simulate", "source rank 2", "destination rank 1", "shard 2",
                       GetParam() ? "copy 1" : "copy 0", "offset 8", "length 5",
                       "source shape [3, 10, 2]", "output shape [3, 12, 2]", "rows consumed 2",
                       "exceeds the 12 rows"});
}

TEST_P(orchestrate_errors, one_row_past_the_end_is_not_dropped) {
  Job job(GetParam());
  job.rank(1, 1) = 2;
  job.offset(1, 1) = 12;
  job.expect_rejected({"source rank 1", "destination rank 2", "shard 1", "offset 12", "length 1",
                       "rows consumed 4"});
}

TEST_P(orchestrate_errors, negative_offset) {
  Job job(GetParam());
  job.rank(2, 1) = 0;
  job.offset(2, 1) = -1;
  job.expect_rejected({"offset = -1, expected >= 0", "source rank 2", "destination rank 0",
                       "shard 1", "length 1", "rows consumed 1", "[3, 10, 2]", "[3, 12, 2]"});
}

TEST_P(orchestrate_errors, negative_length) {
  Job job(GetParam());
  job.len(1, 2) = -2;
  job.expect_rejected(
      {"length = -2, expected >= 0", "source rank 1", "shard 2", "length -2", "rows consumed 5"});
}

TEST_P(orchestrate_errors, destination_outside_of_the_world) {
  for (const std::int64_t rank : {std::int64_t{3}, std::int64_t{-2}, huge}) {
    Job job(GetParam());
    job.rank(2, 2) = rank;
    job.expect_rejected({concat("destination rank = ", rank, ", expected -1 (none) or 0..2"),
                         concat("(source rank 2, destination rank ", rank, ", shard 2"), "offset",
                         "length 5", "rows consumed 2"});
  }
}

TEST_P(orchestrate_errors, source_too_short) {
  Job job(GetParam());
  job.len(2, 2) = 9;
  job.expect_rejected({"the source has 8 rows left, expected at least 9", "source rank 2",
                       "shard 2", "length 9", "rows consumed 2"});
}

TEST_P(orchestrate_errors, one_row_left_is_not_repeated) {
  Job job(GetParam());
  job.len(2, 1) = 8;
  job.offset(2, 1) = 4;
  job.len(2, 2) = 2;
  job.expect_rejected({"the source has 1 rows left, expected at least 2", "rows consumed 9"});
}

TEST_P(orchestrate_errors, sums_that_overflow) {
  Job job(GetParam());
  job.len(0, 1) = huge;
  job.expect_rejected({"source rank 0", "length 9223372036854775807", "rows consumed 2"});
  Job far(GetParam());
  far.rank(0, 1) = 0;
  far.offset(0, 1) = huge;
  far.expect_rejected({"offset 9223372036854775807", "destination rank 0"});
}

TEST_P(orchestrate_errors, overlap) {
  Job job(GetParam());
  job.rank(2, 2) = 2;
  job.offset(2, 2) = 1;
  job.expect_rejected({"source rank 2", "destination rank 2", "shard 2", "offset 1", "length 5",
                       "rows consumed 2", "also written by source rank 0, shard 1"});
  job.options.overlap = Overlap::last_wins;
  job.run();
}

TEST_P(orchestrate_errors, hidden_mismatch) {
  Job job(GetParam());
  job.output = filled_tensor(DType::float32, {3, 12, 3}, 1);
  job.expect_rejected({"output has shape [3, 12, 3]", "tensor of shape [3, 10, 2]"});
  job.source = random_tensor(DType::float32, {3, 10, 1}, 1);  // DistCA repeats it
  job.expect_rejected({"[3, 12, 3]", "[3, 10, 1]"});
}

TEST_P(orchestrate_errors, dtype_mismatch) {
  Job job(GetParam());
  job.output = filled_tensor(DType::int32, {3, 12, 2}, 1);
  job.expect_rejected({"dtype int32", "expected float32"});
}

TEST_P(orchestrate_errors, wrong_dimensions) {
  Job job(GetParam());
  job.source = random_tensor(DType::float32, {3, 10}, 1);
  job.expect_rejected({"tensor has shape [3, 10]", "3 dimensions"});
  job.source = random_tensor(DType::float32, {2, 10, 2}, 1);
  job.expect_rejected({"[2, 10, 2]", "[3, 12, 2]"});
  job.output = filled_tensor(DType::float32, {2, 12, 2}, 1);
  job.expect_rejected({"seq_len has shape [3, 3]", "expected 2 ranks"});
  job.source = HostTensor(DType::float32, {0, 10, 2});
  job.output = HostTensor(DType::float32, {0, 12, 2});
  job.expect_rejected({"world_size = 0"});
}

TEST_P(orchestrate_errors, tables_that_do_not_fit) {
  Job job(GetParam());
  job.metadata.dst_offset = IndexArray({3, 2});
  job.expect_rejected({"dst_offset has shape [3, 2]"});
  job.metadata.dst_rank = IndexArray({3, 2});
  job.expect_rejected({"dst_rank has shape [3, 2]", "[3, 3]"});
  job.metadata.seq_len = IndexArray({3});
  job.expect_rejected({"seq_len has shape [3]", "slice"});
}

TEST_P(orchestrate_errors, shared_memory) {
  Job job(GetParam());
  const auto before = bytes_of(job.output);
  TensorView source = job.output.view();
  source.shape[1] = 10;
  EXPECT_TRUE(rejects([&] { orchestrate_simulate(source, job.output.view(), job.metadata); },
                      {"shares memory with source", "[3, 12, 2]", "[3, 10, 2]"}));
  TensorView output = job.output.view();
  output.strides[1] = 1;  // rows one element apart
  EXPECT_TRUE(rejects([&] { orchestrate_simulate(job.source.view(), output, job.metadata); },
                      {"strides [24, 1, 1]", "no two elements at one address"}));
  output.strides = {0, 2, 1};
  EXPECT_TRUE(rejects([&] { orchestrate_simulate(job.source.view(), output, job.metadata); },
                      {"no two elements at one address"}));
  EXPECT_EQ(bytes_of(job.output), before);
}

TEST_P(orchestrate_errors, views_that_cannot_be) {
  Job job(GetParam());
  ConstTensorView source = job.source.view();
  source.strides = {huge / 2, 2, 1};
  EXPECT_TRUE(rejects([&] { orchestrate_simulate(source, job.output.view(), job.metadata); },
                      {"strides", "2^62 bytes"}));
  source.strides = {2, 1};
  EXPECT_TRUE(rejects([&] { orchestrate_simulate(source, job.output.view(), job.metadata); },
                      {"strides [2, 1]"}));
  source = job.source.view();
  source.data = nullptr;
  EXPECT_TRUE(rejects([&] { orchestrate_simulate(source, job.output.view(), job.metadata); },
                      {"no memory"}));
  source = job.source.view();
  source.shape[1] = -1;
  EXPECT_TRUE(rejects([&] { orchestrate_simulate(source, job.output.view(), job.metadata); },
                      {"negative extent"}));
  job.options.num_threads = -1;
  job.expect_rejected({"num_threads = -1"});
}

}  // namespace
}  // namespace waybill
