#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "core/number.h"
#include "simulate_support.h"
#include "support/expect_error.h"
#include "waybill/simulate/orchestrate.h"

namespace waybill {
namespace {

using test::bytes_of;
using test::filled_tensor;
using test::rejects;

/// Shards of 2, 0, 1 and 3 rows; copies {0, 2}, {1}, none, {0, 1, 2}. T = 6, C = 3.
const IndexArray lens = IndexArray::vector({2, 0, 1, 3});
const IndexArray mask = IndexArray::matrix({{1, 0, 1}, {0, 1, 0}, {0, 0, 0}, {1, 1, 1}});
constexpr std::int64_t num_rows = 6;
constexpr std::int64_t num_copies = 3;

bool is_used(std::int64_t copy, std::int64_t row) {
  const std::int64_t shard = row < 2 ? 0 : row < 3 ? 2 : 3;
  return mask.at({shard, copy}) == 1;
}

template <class Stored>
double load(DType dtype, Stored value) {
  if constexpr (sizeof(Stored) == 2) {
    return static_cast<double>(dtype == DType::bfloat16 ? bfloat16_to_float(value)
                                                        : float16_to_float(value));
  } else {
    return static_cast<double>(value);
  }
}

/// Finite values of very different size, so that the order of a sum matters.
template <class Stored>
HostTensor random_planes(DType dtype, std::int64_t hidden, std::uint64_t seed) {
  HostTensor planes(dtype, {num_copies * num_rows, hidden});
  Random random(seed);
  for (Stored& value : planes.as<Stored>()) {
    const int exponent = static_cast<int>(random.below(20)) - 10;
    const double x = std::ldexp(random.uniform_double() - 0.5, exponent);
    if constexpr (sizeof(Stored) == 2) {
      value = dtype == DType::bfloat16 ? float_to_bfloat16(static_cast<float>(x))
                                       : float_to_float16(static_cast<float>(x));
    } else {
      value = static_cast<Stored>(x);
    }
  }
  return planes;
}

template <class Stored, class Sum>
void check_sums(DType dtype, std::int64_t hidden) {
  const HostTensor planes = random_planes<Stored>(dtype, hidden, 3);
  HostTensor output = filled_tensor(dtype, {num_rows, hidden}, 0xFF);
  sum_kv_copies(planes.view(), output.view(), mask, lens);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    for (std::int64_t h = 0; h < hidden; ++h) {
      Sum sum = 0;
      for (std::int64_t c = 0; c < num_copies; ++c) {
        if (!is_used(c, row)) continue;
        const auto at = static_cast<std::size_t>((c * num_rows + row) * hidden + h);
        sum += static_cast<Sum>(load(dtype, planes.as<Stored>()[at]));
      }
      Stored expected{};
      if constexpr (sizeof(Stored) == 2) {
        expected = dtype == DType::bfloat16 ? float_to_bfloat16(sum) : float_to_float16(sum);
      } else {
        expected = sum;
      }
      ASSERT_EQ(output.as<Stored>()[static_cast<std::size_t>(row * hidden + h)], expected)
          << dtype << ", row " << row << ", element " << h;
    }
  }
}

TEST(sum_kv_copies, sums_in_copy_order_and_rounds_once) {
  for (const std::int64_t hidden : {1, 7, 512, 1100}) {
    check_sums<float, float>(DType::float32, hidden);
    check_sums<double, double>(DType::float64, hidden);
    check_sums<std::uint16_t, float>(DType::bfloat16, hidden);
    check_sums<std::uint16_t, float>(DType::float16, hidden);
  }
}

TEST(sum_kv_copies, small_terms_are_not_lost_between_roundings) {
  // In bfloat16, 256 + 1 is 256 again; twice 1 must count all the same.
  HostTensor planes(DType::bfloat16, {3, 1});
  const auto values = planes.as<std::uint16_t>();
  values[0] = float_to_bfloat16(256.0F);
  values[1] = values[2] = float_to_bfloat16(1.0F);
  HostTensor output(DType::bfloat16, {1, 1});
  sum_kv_copies(planes.view(), output.view(), IndexArray::matrix({{1, 1, 1}}),
                IndexArray::vector({1}));
  EXPECT_EQ(bfloat16_to_float(output.as<std::uint16_t>()[0]), 258.0F);
  HostTensor wide(DType::float32, {1, 1});
  values[0] = float_to_bfloat16(512.0F);
  sum_kv_copies(planes.view(), wide.view(), IndexArray::matrix({{1, 1, 1}}),
                IndexArray::vector({1}));
  EXPECT_EQ(wide.as<float>()[0], 514.0F);
}

TEST(sum_kv_copies, one_copy_keeps_its_bits_and_unused_planes_are_not_read) {
  HostTensor planes(DType::float32, {2, 3});
  const auto values = planes.as<float>();
  values[0] = values[1] = values[2] = std::nanf("");  // plane 0, not used
  values[3] = -0.0F;
  values[4] = std::bit_cast<float>(0x7FA00001U);  // a signalling NaN
  values[5] = 1e-42F;
  HostTensor output(DType::float32, {1, 3});
  sum_kv_copies(planes.view(), output.view(), IndexArray::matrix({{0, 1}}),
                IndexArray::vector({1}));
  EXPECT_EQ(std::memcmp(output.bytes().data(), planes.bytes().data() + 12, 12), 0);
}

TEST(sum_kv_copies, strided_views_and_threads_give_the_same) {
  const std::int64_t hidden = 40;
  const HostTensor planes = random_planes<float>(DType::float32, hidden, 8);
  HostTensor expected(DType::float32, {num_rows, hidden});
  sum_kv_copies(planes.view(), expected.view(), mask, lens, 1);

  HostTensor wide(DType::float32, {num_copies * num_rows, hidden + 3});
  TensorView source = wide.view();
  source.shape[1] = hidden;
  for (std::int64_t row = 0; row < num_copies * num_rows; ++row) {
    std::memcpy(source.data + row * (hidden + 3) * 4, planes.bytes().data() + row * hidden * 4,
                static_cast<std::size_t>(hidden) * 4);
  }
  for (int threads = 1; threads <= 8; ++threads) {
    HostTensor transposed(DType::float32, {hidden, num_rows});
    TensorView target = transposed.view();
    target.shape = {num_rows, hidden};
    target.strides = {1, num_rows};
    sum_kv_copies(source, target, mask, lens, threads);
    EXPECT_EQ(bytes_of(test::dense_copy(target)), bytes_of(expected));
  }
}

TEST(sum_kv_copies, many_rows_on_many_threads) {
  const std::int64_t rows = 4000;
  HostTensor planes = test::random_tensor(DType::int8, {2 * rows, 64 * 4}, 5);
  for (std::byte& byte : planes.bytes()) byte &= std::byte{0x3F};  // floats below 2, never NaN
  const ConstTensorView view(planes.bytes().data(), DType::float32, {2 * rows, 64});
  const IndexArray many_lens = IndexArray::vector({1, rows - 2, 1});
  const IndexArray many_mask = IndexArray::matrix({{1, 1}, {1, 1}, {0, 1}});
  HostTensor expected(DType::float32, {rows, 64});
  sum_kv_copies(view, expected.view(), many_mask, many_lens, 1);
  for (const int threads : {0, 2, 7}) {
    HostTensor output(DType::float32, {rows, 64});
    sum_kv_copies(view, output.view(), many_mask, many_lens, threads);
    EXPECT_EQ(bytes_of(output), bytes_of(expected)) << threads;
  }
}

TEST(sum_kv_copies, reads_the_tables_of_a_rank) {
  Metadata rev;
  rev.seq_len = IndexArray({2, 0});
  rev.seq_recv_mask = IndexArray({2, 4, 3});
  rev.recv_seq_lens = IndexArray({2, 4});
  std::ranges::copy(mask.i64(), rev.seq_recv_mask->i64().begin() + 12);
  std::ranges::copy(lens.i64(), rev.recv_seq_lens->i64().begin() + 4);
  const HostTensor planes = random_planes<float>(DType::float32, 4, 2);
  HostTensor expected(DType::float32, {num_rows, 4});
  sum_kv_copies(planes.view(), expected.view(), mask, lens);
  HostTensor output(DType::float32, {num_rows, 4});
  sum_kv_copies(planes.view(), output.view(), rev, Rank{1});
  EXPECT_EQ(bytes_of(output), bytes_of(expected));

  Metadata slice;  // normalised
  slice.seq_len = IndexArray({0}, DType::uint32);
  slice.seq_recv_mask = mask.to(DType::uint32);
  slice.recv_seq_lens = lens.to(DType::uint32);
  HostTensor again(DType::float32, {num_rows, 4});
  sum_kv_copies(planes.view(), again.view(), slice, Rank{1});
  EXPECT_EQ(bytes_of(again), bytes_of(expected));

  EXPECT_TRUE(rejects([&] { sum_kv_copies(planes.view(), output.view(), rev, Rank{2}); },
                      {"rank = 2", "0..1"}));
  EXPECT_TRUE(rejects([&] { sum_kv_copies(planes.view(), output.view(), Metadata{}, Rank{0}); },
                      {"seq_recv_mask"}));
}

TEST(sum_kv_copies, accepts_no_rows_and_no_copies) {
  HostTensor planes(DType::float32, {0, 4});
  HostTensor output = filled_tensor(DType::float32, {2, 4}, 0xFF);
  sum_kv_copies(planes.view(), output.view(), IndexArray({1, 0}), IndexArray::vector({2}));
  EXPECT_EQ(bytes_of(output), bytes_of(HostTensor(DType::float32, {2, 4})));
  HostTensor none(DType::float32, {0, 4});
  sum_kv_copies(planes.view(), none.view(), IndexArray({0, 3}), IndexArray({0}));
}

TEST(sum_kv_copies, refuses_what_does_not_fit) {
  HostTensor planes(DType::float32, {18, 4});
  HostTensor output = filled_tensor(DType::float32, {6, 4}, 0x55);
  const auto before = bytes_of(output);
  const auto rejected = [&](const ConstTensorView& from, const TensorView& to,
                            const IndexArray& used, const IndexArray& rows,
                            std::initializer_list<std::string_view> parts) {
    EXPECT_TRUE(rejects([&] { sum_kv_copies(from, to, used, rows); }, parts));
    EXPECT_EQ(bytes_of(output), before);
  };
  HostTensor short_output(DType::float32, {5, 4});
  HostTensor half(DType::float16, {6, 4});
  HostTensor whole(DType::int32, {18, 4});
  HostTensor few(DType::float32, {17, 4});
  rejected(planes.view(), short_output.view(), mask, lens, {"[5, 4]", "6 rows"});
  rejected(few.view(), output.view(), mask, lens, {"[17, 4]", "[3 * 6, 4]"});
  rejected(planes.view(), half.view(), mask, lens, {"float32", "float16"});
  rejected(whole.view(), output.view(), mask, lens, {"planes of int32"});
  rejected(planes.view(), output.view(), IndexArray({3, 3}), lens, {"[3, 3]", "[4, C]"});
  rejected(planes.view(), output.view(), mask, IndexArray({2, 2}), {"recv_seq_lens", "[2, 2]"});
  rejected(planes.view(), output.view(), mask, IndexArray::vector({2, -1, 2, 3}),
           {"recv_seq_lens[1] = -1"});
  rejected(planes.view(), output.view(), IndexArray::full({4, 3}, 2), lens,
           {"seq_recv_mask[0, 0] = 2"});
  TensorView alias = planes.view();
  alias.shape[0] = 6;
  rejected(planes.view(), alias, mask, lens, {"shares memory"});
}

}  // namespace
}  // namespace waybill
