// Sizes near 2^63 from metadata and views: refused, and nothing overflows on the way (UBSan).

#include <gtest/gtest.h>

#include <limits>

#include "simulate_support.h"
#include "support/expect_error.h"
#include "waybill/simulate/orchestrate.h"

namespace waybill {
namespace {

using test::rejects;

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t large[] = {most,      most - 1, most / 2 + 1,          most / 2,
                                  most / 3,  most / 8, std::int64_t{1} << 61, 1LL << 60,
                                  1LL << 40, 1LL << 32};

Metadata one_row_to(std::int64_t num_recv) {
  Metadata metadata;
  metadata.seq_len = IndexArray::matrix({{1}});
  metadata.dst_rank = IndexArray::matrix({{0}});
  metadata.dst_offset = IndexArray::matrix({{0}});
  metadata.num_recv_tokens = IndexArray::matrix({{1, num_recv}});
  return metadata;
}

TEST(HostileSizes, num_recv_tokens) {
  for (const DType dtype : {DType::uint8, DType::float32, DType::float64}) {
    for (const std::int64_t hidden : {1, 2, 3, 4096}) {
      const HostTensor tensor(dtype, {1, hidden});
      const ConstTensorView view = tensor.view();
      for (const std::int64_t rows : large) {
        EXPECT_TRUE(rejects(
            [&] {
              (void)simulate_communication({&view, 1}, one_row_to(rows));
            },
            {"num_recv_tokens of rank 0", "expected 1"}))
            << rows;
      }
    }
  }
  const HostTensor tensor(DType::uint8, {1, 1});
  const ConstTensorView view = tensor.view();
  EXPECT_TRUE(rejects(
      [&] {
        (void)simulate_communication({&view, 1}, one_row_to(-1));
      },
      {"expected >= 0"}));
}

/// A source of 2^61 rows that are all the same one: what arrives cannot be counted in 63 bits.
TEST(HostileSizes, rows_sent_in_all) {
  const std::byte byte{7};
  ConstTensorView view(&byte, DType::uint8, {std::int64_t{1} << 61, 1});
  view.strides = {0, 1};
  const std::vector<ConstTensorView> tensors(2, view);
  Metadata metadata;
  const std::int64_t rows = std::int64_t{1} << 60;
  metadata.seq_len = IndexArray::matrix({{rows, rows}, {rows, rows}});
  metadata.dst_rank = IndexArray::cube({{{0, 0, 0}, {0, 0, 0}}, {{0, 0, 0}, {0, 0, 0}}});
  metadata.dst_offset = IndexArray::cube({{{0, 0, 0}, {0, 0, 0}}, {{0, 0, 0}, {0, 0, 0}}});
  metadata.num_recv_tokens = IndexArray::matrix({{0, 0, rows}, {0, 0, 0}});
  EXPECT_TRUE(rejects(
      [&] { (void)simulate_communication(tensors, metadata, {.overlap = Overlap::last_wins}); },
      {"simulate_communication", "rows"}));
}

/// The stride of an axis with one element is never used, whatever it is.
TEST(HostileSizes, strides_of_axes_with_one_element) {
  const HostTensor source = test::random_tensor(DType::float64, {1, 1, 1}, 3);
  for (const std::int64_t stride : {most, most / 8 + 1, -most - 1, std::int64_t{0}}) {
    ConstTensorView from = source.view();
    from.strides = {stride, stride, stride};
    HostTensor output(DType::float64, {1, 1, 1});
    TensorView to = output.view();
    to.strides = {stride, stride, stride};
    orchestrate_simulate(from, to, one_row_to(1));
    EXPECT_EQ(test::bytes_of(output), test::bytes_of(source));

    from.shape.pop_back();
    to.shape.pop_back();
    from.strides.pop_back();
    to.strides.pop_back();
    to.data[0] = std::byte{99};
    sum_kv_copies(from, to, IndexArray::matrix({{1}}), IndexArray::vector({1}));
    EXPECT_EQ(test::bytes_of(output), test::bytes_of(source));
  }
  // Two rows of one element each, apart; the stride inside a row is not used.
  const HostTensor two = test::random_tensor(DType::float32, {1, 2, 1}, 3);
  ConstTensorView from = two.view();
  from.strides[2] = most;
  from.strides[0] = -most;
  HostTensor output(DType::float32, {1, 2, 1});
  Metadata metadata = one_row_to(2);
  metadata.seq_len = IndexArray::matrix({{2}});
  orchestrate_simulate(from, output.view(), metadata);
  EXPECT_EQ(test::bytes_of(output), test::bytes_of(two));
}

TEST(HostileSizes, shapes_without_elements) {
  for (const std::int64_t rows : large) {
    Metadata metadata = one_row_to(1);
    if (rows >= std::int64_t{1} << 60) {  // a table of fewer rows may well fit into memory
      EXPECT_ANY_THROW((void)source_rows({1, rows, 0}, {1, rows, 0}, metadata)) << rows;
    }
    // Nothing moves, however many rows there are.
    const ConstTensorView from(nullptr, DType::float64, {1, rows, 0});
    const TensorView to(nullptr, DType::float64, {1, rows, 0});
    orchestrate_simulate(from, to, metadata);
  }
  EXPECT_TRUE(rejects([&] { (void)IndexArray(Shape{most / 2 + 1}); }, {"IndexArray", "2^62"}));
  EXPECT_TRUE(rejects([&] { (void)IndexArray(Shape{most / 4}); }, {"IndexArray", "2^62 bytes"}));
}

TEST(HostileSizes, values_of_metadata) {
  const HostTensor tensor(DType::float64, {1, 3, 2});
  HostTensor output(DType::float64, {1, 3, 2});
  for (const std::int64_t value : large) {
    for (const std::int64_t sign : {1, -1}) {
      for (int field = 0; field < 3; ++field) {
        Metadata metadata = one_row_to(1);
        auto& array = field == 0   ? metadata.seq_len
                      : field == 1 ? metadata.dst_rank
                                   : metadata.dst_offset;
        array.i64()[0] = sign * value;
        EXPECT_TRUE(rejects([&] { orchestrate_simulate(tensor.view(), output.view(), metadata); },
                            {"orchestrate_simulate"}))
            << field << ' ' << value;
      }
      EXPECT_FALSE(to_string([&] {
                     Metadata metadata = one_row_to(sign * value);
                     metadata.seq_len = IndexArray::matrix({{value, value, value}});
                     metadata.dst_rank = IndexArray::matrix({{0, 0, 0}});
                     metadata.dst_offset = IndexArray::matrix({{value, sign * value, 0}});
                     return metadata;
                   }())
                       .empty());
    }
  }
}

}  // namespace
}  // namespace waybill
