#include "waybill/core/host_tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "support/expect_error.h"

namespace waybill {
namespace {

TEST(host_tensor, starts_as_aligned_zeros) {
  for (const std::int64_t size : {1, 63, 64, 65, 1'000'003}) {
    const HostTensor tensor(DType::uint8, {size});
    EXPECT_EQ(tensor.size_bytes(), size);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.bytes().data()) % 64, 0U);
    EXPECT_TRUE(std::ranges::all_of(tensor.bytes(), [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST(host_tensor, is_contiguous_row_major) {
  HostTensor tensor(DType::int32, {2, 3});
  EXPECT_EQ(tensor.size_bytes(), 24);
  const TensorView view = tensor.view();
  EXPECT_EQ(view.shape, (Shape{2, 3}));
  EXPECT_EQ(view.strides, (Shape{3, 1}));
  EXPECT_EQ(view.dtype, DType::int32);
  tensor.as<std::int32_t>()[4] = 7;
  const HostTensor& read_only = tensor;
  EXPECT_EQ(read_only.as<std::int32_t>()[4], 7);
  EXPECT_EQ(read_only.view().data, view.data);
}

TEST(host_tensor, copies_are_deep_and_moves_keep_the_memory) {
  HostTensor first(DType::float32, {4});
  first.as<float>()[2] = 1.5F;
  HostTensor copy = first;
  copy.as<float>()[2] = 2.5F;
  EXPECT_EQ(first.as<float>()[2], 1.5F);
  const void* memory = first.bytes().data();
  const HostTensor moved = std::move(first);
  EXPECT_EQ(moved.bytes().data(), memory);
  EXPECT_EQ(moved.as<float>()[2], 1.5F);
  copy = moved;
  EXPECT_EQ(copy.as<float>()[2], 1.5F);
  EXPECT_NE(copy.bytes().data(), memory);
}

TEST(host_tensor, may_be_empty) {
  const HostTensor none;
  EXPECT_EQ(none.shape(), (Shape{0}));
  EXPECT_TRUE(none.bytes().empty());
  const HostTensor empty(DType::float64, {3, 0, 5});
  const HostTensor copy = empty;
  EXPECT_EQ(copy.size_bytes(), 0);
  EXPECT_TRUE(copy.as<double>().empty());
}

TEST(host_tensor, refuses_what_cannot_be) {
  EXPECT_TRUE(test::rejects([] { HostTensor(DType::uint8, {2, -1}); }, {"[2, -1]"}));
  EXPECT_TRUE(test::rejects([] { HostTensor(DType::int64, {std::int64_t{1} << 61}); }, {"2^62"}));
  HostTensor tensor(DType::float32, {2});
  EXPECT_TRUE(test::rejects([&] { (void)tensor.as<double>(); }, {"8", "expected 4", "float32"}));
}

}  // namespace
}  // namespace waybill
