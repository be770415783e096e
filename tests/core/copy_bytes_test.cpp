#include "core/copy_bytes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace waybill {
namespace {

TEST(copy_bytes, copies_what_it_is_told_and_nothing_else) {
  std::vector<std::byte> from(10'000);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + i / 256);
  for (const bool streaming : {false, true}) {
    for (const std::size_t count : std::vector<std::size_t>{0, 1, 15, 63, 1023, 1024, 1025, 8191}) {
      for (const std::size_t shift : std::vector<std::size_t>{0, 1, 8, 15, 16, 33}) {
        std::vector<std::byte> to(from.size(), std::byte{0xEE});
        detail::copy_bytes(to.data() + shift, from.data() + 3 * shift, count, streaming);
        detail::finish_streaming();
        const auto begin = to.begin() + static_cast<std::ptrdiff_t>(shift);
        const auto end = begin + static_cast<std::ptrdiff_t>(count);
        ASSERT_TRUE(std::equal(begin, end, from.begin() + static_cast<std::ptrdiff_t>(3 * shift)))
            << count << " bytes, shifted by " << shift;
        ASSERT_EQ(std::count(to.begin(), begin, std::byte{0xEE}), shift);
        ASSERT_EQ(std::count(end, to.end(), std::byte{0xEE}), to.end() - end);
      }
    }
  }
}

}  // namespace
}  // namespace waybill
