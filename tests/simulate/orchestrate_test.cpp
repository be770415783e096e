#include "waybill/simulate/orchestrate.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "simulate_support.h"

namespace waybill {
namespace {

using test::bytes_of;
using test::dense_copy;
using test::filled_tensor;
using test::random_job;
using test::random_tensor;
using test::RandomJob;
using test::same_bytes;
using test::simulate_plainly;

Metadata table(IndexArray seq_len, IndexArray dst_rank, IndexArray dst_offset) {
  Metadata metadata;
  metadata.seq_len = std::move(seq_len);
  metadata.dst_rank = std::move(dst_rank);
  metadata.dst_offset = std::move(dst_offset);
  return metadata;
}

/// Element [w, n, 0] of rows that count 1, 2, 3, ... over all ranks.
HostTensor counting_rows(std::int64_t world, std::int64_t rows) {
  HostTensor tensor(DType::int64, {world, rows, 1});
  std::int64_t next = 1;
  for (std::int64_t& value : tensor.as<std::int64_t>()) value = next++;
  return tensor;
}

std::vector<std::int64_t> values(const HostTensor& tensor) {
  const auto span = tensor.as<std::int64_t>();
  return {span.begin(), span.end()};
}

TEST(orchestrate_simulate, moves_shards_to_one_destination_each) {
  const HostTensor source = counting_rows(2, 3);  // 1 2 3 | 4 5 6
  HostTensor output(DType::int64, {2, 4, 1});
  orchestrate_simulate(
      source.view(), output.view(),
      table(IndexArray::matrix({{1, 2}, {2, 1}}), IndexArray::matrix({{1, 0}, {1, 0}}),
            IndexArray::matrix({{0, 0}, {1, 2}})));
  EXPECT_EQ(values(output), (std::vector<std::int64_t>{2, 3, 6, 0, 1, 4, 5, 0}));
}

TEST(orchestrate_simulate, moves_a_shard_to_several_destinations) {
  const HostTensor source = counting_rows(2, 2);  // 1 2 | 3 4
  HostTensor output(DType::int64, {2, 5, 1});
  orchestrate_simulate(
      source.view(), output.view(),
      table(IndexArray::matrix({{2}, {2}}), IndexArray::cube({{{1, 0, 1}}, {{-1, 0, -1}}}),
            IndexArray::cube({{{0, 3, 2}}, {{0, 1, 0}}})));
  EXPECT_EQ(values(output), (std::vector<std::int64_t>{0, 3, 4, 1, 2, 1, 2, 1, 2, 0}));
}

TEST(orchestrate_simulate, steps_over_shards_without_destination) {
  const HostTensor source = counting_rows(1, 5);
  HostTensor output(DType::int64, {1, 3, 1});
  orchestrate_simulate(
      source.view(), output.view(),
      table(IndexArray::matrix({{2, 0, 1, 2}}), IndexArray::matrix({{-1, 0, -1, 0}}),
            IndexArray::matrix({{0, 3, 0, 1}})));
  EXPECT_EQ(values(output), (std::vector<std::int64_t>{0, 4, 5}));
}

TEST(orchestrate_simulate, reads_no_offset_of_unused_entries) {
  const HostTensor source = counting_rows(1, 1);
  HostTensor output(DType::int64, {1, 1, 1});
  orchestrate_simulate(
      source.view(), output.view(),
      table(IndexArray::matrix({{1}}), IndexArray::matrix({{-1}}), IndexArray::matrix({{-99}})));
  EXPECT_EQ(values(output), (std::vector<std::int64_t>{0}));
}

TEST(orchestrate_simulate, accepts_nothing_to_do) {
  HostTensor none(DType::float32, {3, 0, 8});
  orchestrate_simulate(none.view(), none.view(),
                       table(IndexArray({3, 0}), IndexArray({3, 0, 2}), IndexArray({3, 0, 2})));
  const HostTensor source = counting_rows(2, 1);
  HostTensor output = counting_rows(2, 1);
  orchestrate_simulate(source.view(), output.view(),
                       table(IndexArray({2, 1}), IndexArray({2, 1, 0}), IndexArray({2, 1, 0})));
  EXPECT_EQ(values(output), values(source));
  HostTensor no_hidden(DType::float32, {1, 4, 0});
  HostTensor no_hidden_output(DType::float32, {1, 4, 0});
  orchestrate_simulate(
      no_hidden.view(), no_hidden_output.view(),
      table(IndexArray::matrix({{4}}), IndexArray::matrix({{0}}), IndexArray::matrix({{0}})));
}

TEST(orchestrate_simulate, equals_plain_loops_for_every_dtype) {
  for (const DType dtype : {DType::boolean, DType::int8, DType::float8_e5m2, DType::int16,
                            DType::bfloat16, DType::float16, DType::int32, DType::float32,
                            DType::int64, DType::uint64, DType::float64}) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const RandomJob job = random_job(seed, {.copies = static_cast<std::int64_t>(seed % 4)});
      const std::int64_t hidden = 1 + static_cast<std::int64_t>(seed % 5);
      const HostTensor source = random_tensor(dtype, {3, job.source_rows, hidden}, seed);
      HostTensor output = filled_tensor(dtype, {3, job.output_rows, hidden}, 0xEE);
      HostTensor expected = output;
      orchestrate_simulate(source.view(), output.view(), job.metadata);
      simulate_plainly(source, expected, job.metadata);
      ASSERT_EQ(bytes_of(output), bytes_of(expected)) << dtype << ", seed " << seed;
    }
  }
}

TEST(orchestrate_simulate, takes_normalised_metadata) {
  const RandomJob job = random_job(5, {.copies = 2});
  const HostTensor source = random_tensor(DType::float32, {3, job.source_rows, 4}, 1);
  HostTensor output(DType::float32, {3, job.output_rows, 4});
  HostTensor expected = output;
  simulate_plainly(source, expected, job.metadata);
  orchestrate_simulate(
      source.view(), output.view(),
      table(job.metadata.seq_len.to(DType::uint32), job.metadata.dst_rank.to(DType::int32),
            job.metadata.dst_offset.to(DType::uint32)));
  EXPECT_EQ(bytes_of(output), bytes_of(expected));
}

/// A [W, n, H] view into a larger allocation, of a kind that test names say.
struct StridedTensor {
  HostTensor memory;
  TensorView view;
};

enum class Layout { padded_rows, hidden_first, rows_first, every_other, reversed };

StridedTensor strided(Layout layout, DType dtype, std::int64_t world, std::int64_t rows,
                      std::int64_t hidden, std::uint64_t seed) {
  StridedTensor result;
  Shape strides;
  std::int64_t first = 0;
  std::int64_t size = world * rows * hidden;
  switch (layout) {
    case Layout::padded_rows:  // rows of hidden + 3
      strides = {rows * (hidden + 3), hidden + 3, 1};
      size = world * rows * (hidden + 3);
      first = 2;
      break;
    case Layout::hidden_first:  // [H, W, n] transposed
      strides = {rows, 1, world * rows};
      break;
    case Layout::rows_first:  // [n, W, H] transposed
      strides = {hidden, world * hidden, 1};
      break;
    case Layout::every_other:
      strides = {rows * hidden * 4, hidden * 4, 2};
      size *= 4;
      break;
    case Layout::reversed:
      strides = {-rows * hidden, -hidden, -1};
      first = world * rows * hidden - 1;
      break;
  }
  result.memory = random_tensor(dtype, {size}, seed);
  result.view = TensorView(result.memory.bytes().data() + first * dtype_bytes(dtype), dtype,
                           {world, rows, hidden});
  result.view.strides = strides;
  return result;
}

TEST(orchestrate_simulate, strided_views_equal_plain_loops_and_keep_the_gaps) {
  constexpr Layout layouts[] = {Layout::padded_rows, Layout::hidden_first, Layout::rows_first,
                                Layout::every_other, Layout::reversed};
  std::uint64_t seed = 0;
  for (const Layout from : layouts) {
    for (const Layout to : layouts) {
      for (const DType dtype : {DType::uint8, DType::float16, DType::float32, DType::float64}) {
        const RandomJob job = random_job(++seed, {.copies = static_cast<std::int64_t>(seed % 3)});
        const StridedTensor source = strided(from, dtype, 3, job.source_rows, 5, seed);
        StridedTensor output = strided(to, dtype, 3, job.output_rows, 5, seed + 1000);
        // What the view's elements must become, and all other bytes of its memory must stay.
        const StridedTensor before{output.memory, {}};
        const HostTensor plain_source = dense_copy(source.view);
        HostTensor expected = dense_copy(output.view);
        simulate_plainly(plain_source, expected, job.metadata);
        orchestrate_simulate(source.view, output.view, job.metadata);
        ASSERT_EQ(bytes_of(dense_copy(output.view)), bytes_of(expected)) << "seed " << seed;
        // Putting the old elements back must give the old memory.
        TensorView old_view = output.view;
        HostTensor old_memory = before.memory;
        old_view.data =
            old_memory.bytes().data() + (output.view.data - output.memory.bytes().data());
        const HostTensor old_elements = dense_copy(old_view);
        const RandomJob all{
            table(IndexArray::full({3, 1}, job.output_rows),
                  IndexArray({3, 1}, std::vector<std::int64_t>{0, 1, 2}), IndexArray({3, 1})),
            0, 0};
        orchestrate_simulate(old_elements.view(), output.view, all.metadata);
        ASSERT_EQ(bytes_of(output.memory), bytes_of(before.memory)) << "seed " << seed;
      }
    }
  }
}

TEST(orchestrate_simulate, source_may_repeat_a_row) {
  const HostTensor row = random_tensor(DType::float32, {1, 1, 4}, 3);
  ConstTensorView source = row.view();
  source.shape = {2, 3, 4};
  source.strides = {0, 0, 1};
  HostTensor output(DType::float32, {2, 3, 4});
  orchestrate_simulate(
      source, output.view(),
      table(IndexArray::matrix({{3}, {3}}), IndexArray::matrix({{1}, {0}}), IndexArray({2, 1})));
  EXPECT_EQ(bytes_of(output), bytes_of(dense_copy(source)));
}

TEST(orchestrate_simulate, source_and_output_may_be_halves_of_one_tensor) {
  HostTensor both = random_tensor(DType::float32, {2, 3, 8}, 4);
  TensorView left = both.view();
  left.shape[2] = 4;
  TensorView right = left;
  right.data += 16;
  const HostTensor wanted = dense_copy(left);
  const Metadata stay =
      table(IndexArray::matrix({{3}, {3}}), IndexArray::matrix({{0}, {1}}), IndexArray({2, 1}));
  orchestrate_simulate(left, right, stay);
  EXPECT_EQ(bytes_of(dense_copy(right)), bytes_of(wanted));
  HostTensor rows = random_tensor(DType::float32, {2, 6, 4}, 4);
  TensorView first = rows.view();
  first.shape[1] = 3;
  TensorView second = first;
  second.data += 3 * 16;
  const HostTensor wanted_rows = dense_copy(second);
  orchestrate_simulate(second, first, stay);
  EXPECT_EQ(bytes_of(dense_copy(first)), bytes_of(wanted_rows));
}

TEST(orchestrate_simulate, last_writer_in_the_global_order_wins) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const RandomJob job = random_job(
        seed, {.shards = 8, .copies = static_cast<std::int64_t>(seed % 3), .overlapping = true});
    const HostTensor source = random_tensor(DType::int32, {3, job.source_rows, 3}, seed);
    HostTensor expected = filled_tensor(DType::int32, {3, job.output_rows, 3}, 0x11);
    const HostTensor before = expected;
    simulate_plainly(source, expected, job.metadata);
    for (int threads = 1; threads <= 8; ++threads) {
      HostTensor output = before;
      orchestrate_simulate(source.view(), output.view(), job.metadata,
                           {Overlap::last_wins, threads});
      ASSERT_EQ(bytes_of(output), bytes_of(expected)) << "seed " << seed;
    }
  }
}

TEST(orchestrate_simulate, result_does_not_depend_on_threads) {
  // Rows of 16 KiB make work items of a few rows, so all threads meet inside of segments; the
  // total of 96 MiB is written around the cache.
  const RandomJob job = random_job(9, {.world_size = 4, .shards = 6, .copies = 2, .max_rows = 300});
  const std::int64_t hidden = 16384;
  const HostTensor source = random_tensor(DType::uint8, {4, job.source_rows, hidden}, 9);
  HostTensor expected(DType::uint8, {4, job.output_rows, hidden});
  simulate_plainly(source, expected, job.metadata);
  for (const int threads : {0, 1, 2, 3, 8}) {
    HostTensor output(DType::uint8, {4, job.output_rows, hidden});
    orchestrate_simulate(source.view(), output.view(), job.metadata, {Overlap::reject, threads});
    ASSERT_TRUE(same_bytes(output.bytes(), expected.bytes())) << threads << " threads";
  }
}

TEST(orchestrate_simulate, large_jobs_at_odd_addresses) {
  // 70 MiB in rows of an odd size, so no row begins where the one before did.
  constexpr std::int64_t hidden = 4099;
  const std::int64_t rows = (std::int64_t{70} << 20) / hidden;
  HostTensor memory = random_tensor(DType::uint8, {rows * hidden + 1}, 2);
  HostTensor target(DType::uint8, {rows * hidden + 2});
  const TensorView source(memory.bytes().data() + 1, DType::uint8, {1, rows, hidden});
  const TensorView output(target.bytes().data() + 1, DType::uint8, {1, rows, hidden});
  orchestrate_simulate(source, output,
                       table(IndexArray::matrix({{rows - 7, 7}}), IndexArray::matrix({{0, 0}}),
                             IndexArray::matrix({{7, 0}})));
  constexpr std::size_t moved = 7 * hidden;
  const auto got = target.bytes().subspan(1, static_cast<std::size_t>(rows * hidden));
  const auto from = memory.bytes().subspan(1);
  EXPECT_TRUE(same_bytes(got.subspan(moved), from.first(got.size() - moved)));
  EXPECT_TRUE(same_bytes(got.first(moved), from.last(moved)));
  EXPECT_EQ(target.bytes().front(), std::byte{0});
  EXPECT_EQ(target.bytes().back(), std::byte{0});
}

}  // namespace
}  // namespace waybill
